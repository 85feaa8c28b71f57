"""A room to look at: in flat colours, or in letters."""

from functools import lru_cache

from sensorium.envs.sokoban.rooms import Position, Room
from sensorium.envs.tiles import Mark, draw_tiles

WALL, FLOOR, TARGET = (70, 74, 84), (236, 226, 198), (52, 168, 83)
BOX, BOX_ON_TARGET, PLAYER = (150, 92, 40), (120, 180, 60), (214, 48, 49)


def draw_text(room: Room, position: Position) -> str:
    """The room in letters: # wall, _ floor, O target, X box, P player, √ a box on a target, S the player on one."""

    def letter(row: int, column: int) -> str:
        place = (row, column)
        on = place in room.targets
        if place in position.boxes:
            return "√" if on else "X"
        if place == position.player:
            return "S" if on else "P"
        return "#" if place not in room.floor else "O" if on else "_"

    return "\n".join("".join(letter(r, c) for c in range(room.size)) for r in range(room.size))


@lru_cache(maxsize=4096)
def draw_png(room: Room, position: Position, cell: int) -> bytes:
    """The room in flat colours. A target is a green square, and stays visible around what stands on it."""
    colours = [[FLOOR if (r, c) in room.floor else WALL for c in range(room.size)] for r in range(room.size)]
    third, seventh = cell // 3, cell // 7
    marks = [Mark(*place, cell // 14, TARGET) for place in sorted(room.targets)]
    marks += [Mark(*place, seventh, BOX_ON_TARGET if place in room.targets else BOX) for place in sorted(position.boxes)]
    return draw_tiles(colours, [*marks, Mark(*position.player, third if cell >= 9 else seventh, PLAYER)], cell)


@lru_cache(maxsize=16)
def draw_blank(size: int, cell: int) -> bytes:
    """A picture that tells nothing: floor alone."""
    return draw_tiles([[FLOOR] * size] * size, [], cell)

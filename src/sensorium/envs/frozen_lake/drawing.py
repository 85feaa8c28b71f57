"""A lake to look at: in flat colours, or in letters."""

from functools import lru_cache

from sensorium.envs.frozen_lake.maps import Grid
from sensorium.envs.tiles import Mark, draw_tiles

COLOURS = {"F": (205, 228, 245), "H": (24, 30, 66), "G": (52, 168, 83), "S": (244, 200, 66)}
PLAYER = (214, 48, 49)


def draw_text(grid: Grid, place: int) -> str:
    """The lake in letters, the player on it."""
    cells = "".join(grid).translate(str.maketrans("FH", "_O"))
    cells = cells[:place] + "P" + cells[place + 1 :]
    return "\n".join(cells[i : i + len(grid)] for i in range(0, len(cells), len(grid)))


@lru_cache(maxsize=4096)
def draw_png(grid: Grid, place: int | None, cell: int) -> bytes:
    """The lake in flat colours, a square of ``cell`` pixels per place, the player (if any) a smaller square on it."""
    marks = [] if place is None else [Mark(*divmod(place, len(grid)), cell // 7, PLAYER)]
    return draw_tiles([[COLOURS[letter] for letter in row] for row in grid], marks, cell)

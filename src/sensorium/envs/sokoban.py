"""Sokoban: push every box onto a target. The seed decides the room, its start, and the noise of demonstrations.

A room is solvable by construction: boxes start on their targets, and all moves are played backwards (a push becomes a
pull). That search meets every position in the order of its distance to the goal, so the length of the shortest solution is
known exactly, and one of the length asked for is chosen. This room is one move from its end, Right:

    ######
    #_PXO#     P player, X box, O target, # wall, _ floor
    #____#
    ######
"""

import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Unpack

from sensorium.data.media_store import MediaStore
from sensorium.envs.actions import (
    MAX_PIXELS_ACROSS,
    ActionEnvironment,
    Mark,
    PlayedTurn,
    PlayOptions,
    State,
    describe,
    draw_tiles,
    observation_of,
    path_to,
)
from sensorium.envs.protocol import Observation, within
from sensorium.vocabulary.errors import EnvironmentFailure

NAME = "sokoban"
ACTIONS = ("Up", "Down", "Left", "Right")
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))  # rows down and columns right of each action
MAX_TRIES = 200
MAX_POSITIONS = 200_000  # that a search may meet
DEFAULTS = {"size": 6, "boxes": 1, "min_solution": 1, "max_solution": 5, "walls": 0.1}

WALL, FLOOR, TARGET = (70, 74, 84), (236, 226, 198), (52, 168, 83)
BOX, BOX_ON_TARGET, PLAYER = (150, 92, 40), (120, 180, 60), (214, 48, 49)
LEGENDS = {
    "text": "# is wall, _ floor, O a target, X a box, √ a box on a target, P is you, S is you on a target.",
    "picture": "Grey is wall; a green square is a target, a brown one a box, a light green one a box on a target; "
    "the red square is you.",
}

Place = tuple[int, int]


@dataclass(frozen=True)
class Position:
    """Where the player and the boxes are."""

    player: Place
    boxes: frozenset[Place]


@dataclass(frozen=True)
class Room:
    """Floor (what is not floor is wall) and targets, within ``size`` rows and columns."""

    size: int
    floor: frozenset[Place]
    targets: frozenset[Place]

    def after(self, position: Position, action: int) -> Position:
        """The position that a move leads to; the same one where a wall or a second box is in the way."""
        ahead = _step(position.player, action)
        if ahead not in self.floor:
            return position
        if ahead not in position.boxes:
            return Position(ahead, position.boxes)
        beyond = _step(ahead, action)
        if beyond not in self.floor or beyond in position.boxes:
            return position
        return Position(ahead, position.boxes - {ahead} | {beyond})

    def before(self, position: Position) -> Iterator[Position]:
        """Every position from which one move leads here."""
        for action in range(len(MOVES)):
            stood = _step(position.player, action, -1)
            if stood not in self.floor or stood in position.boxes:
                continue
            yield Position(stood, position.boxes)
            pushed = _step(position.player, action)
            if pushed in position.boxes:
                yield Position(stood, position.boxes - {pushed} | {position.player})

    def solved(self, position: Position) -> bool:
        return position.boxes == self.targets


@lru_cache(maxsize=4096)
def room_of(size: int, boxes: int, shortest: int, longest: int, walls: float, seed: int) -> tuple[Room, Position]:
    """The room of a seed and its start, ``shortest`` to ``longest`` moves from its solution."""
    chance = random.Random(f"sokoban/{size}/{boxes}/{shortest}/{longest}/{walls}/{seed}")
    for _ in range(MAX_TRIES):
        inner = [(r, c) for r in range(1, size - 1) for c in range(1, size - 1)]
        floor = frozenset(place for place in inner if chance.random() >= walls)
        if len(floor) < 2 * boxes + 1 or not _connected(floor):
            continue
        room = Room(size, floor, frozenset(chance.sample(sorted(floor), boxes)))
        length = chance.randint(shortest, longest)
        starts = positions_at(room, length)
        if starts:
            return room, chance.choice(starts)
    raise EnvironmentFailure(
        f"sokoban: none of {MAX_TRIES} rooms of size {size} with {boxes} boxes has a solution of {shortest} to {longest} "
        "moves; ask for shorter ones, a larger room or fewer walls."
    )


def positions_at(room: Room, length: int) -> list[Position]:
    """Every position whose shortest solution has exactly so many moves, in a fixed order."""
    layer = [Position(place, room.targets) for place in sorted(room.floor - room.targets)]
    seen = set(layer)
    for _ in range(length):
        layer = [new for new in dict.fromkeys(b for position in layer for b in room.before(position)) if new not in seen]
        seen.update(layer)
        if not layer or len(seen) > MAX_POSITIONS:
            return []
    return sorted(layer, key=lambda position: (position.player, sorted(position.boxes)))


def solution(room: Room, start: Position) -> tuple[int, ...] | None:
    """The moves of a shortest solution (ties go to the first of ACTIONS), or None where there is none."""
    came: dict[Position, tuple[Position, int] | None] = {start: None}
    frontier = deque([start])
    while frontier and len(came) <= MAX_POSITIONS:
        here = frontier.popleft()
        if room.solved(here):
            return path_to(here, came)
        for action in range(len(MOVES)):
            there = room.after(here, action)
            if there not in came:
                came[there] = (here, action)
                frontier.append(there)
    return None


def _connected(floor: frozenset[Place]) -> bool:
    seen = {min(floor)}
    frontier = list(seen)
    while frontier:
        here = frontier.pop()
        near = {_step(here, action) for action in range(len(MOVES))} & floor - seen
        seen |= near
        frontier += near
    return len(seen) == len(floor)


def _step(place: Place, action: int, times: int = 1) -> Place:
    down, right = MOVES[action]
    return place[0] + times * down, place[1] + times * right


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
    """The room in flat colours. A target is a green square, visible around what is on it."""
    colours = [[FLOOR if (r, c) in room.floor else WALL for c in range(room.size)] for r in range(room.size)]
    third, seventh = cell // 3, cell // 7
    marks = [Mark(*place, cell // 14, TARGET) for place in sorted(room.targets)]
    marks += [Mark(*place, seventh, BOX_ON_TARGET if place in room.targets else BOX) for place in sorted(position.boxes)]
    return draw_tiles(colours, [*marks, Mark(*position.player, third if cell >= 9 else seventh, PLAYER)], cell)


@lru_cache(maxsize=16)
def draw_blank(size: int, cell: int) -> bytes:
    """A picture of floor only."""
    return draw_tiles([[FLOOR] * size] * size, [], cell)


class Sokoban(ActionEnvironment):
    """One room, played once: push the boxes onto the targets, in ``min_solution`` to ``max_solution`` moves at best.

    Gives ``step_reward`` for each move, ``box_reward`` for each box pushed onto a target (taken back when it leaves it) and
    ``success_reward`` when all are there.
    """

    def __init__(
        self,
        store: MediaStore,
        size: int = 6,
        boxes: int = 1,
        min_solution: int = 1,
        max_solution: int = 5,
        walls: float = 0.1,
        bare: bool = False,
        cell: int = 28,
        step_reward: float = -0.1,
        box_reward: float = 1.0,
        success_reward: float = 10.0,
        demonstration_noise: float = 0.0,
        **play: Unpack[PlayOptions],
    ) -> None:
        within(NAME, "size", size, 4, 16)
        within(NAME, "boxes", boxes, 1, 8)
        within(NAME, "min_solution", min_solution, 1, max_solution)
        within(NAME, "max_solution", max_solution, 1, 1000)
        within(NAME, "walls", walls, 0.0, 0.9)
        within(NAME, "cell", cell, 4, 512)
        within(NAME, "size times cell (the picture's width)", size * cell, 8, MAX_PIXELS_ACROSS)
        within(NAME, "demonstration_noise", demonstration_noise, 0.0, 1.0)
        rewards = {"step": step_reward, "box": box_reward, "success": success_reward}
        super().__init__(NAME, store, ACTIONS, ["picture", "text", "blank"], rewards, bare=bare, **play)
        self.cell, self.demonstration_noise = cell, demonstration_noise
        self._kind = (size, boxes, min_solution, max_solution, walls)
        self._room, self._position = Room(size, frozenset(), frozenset()), Position((0, 0), frozenset())

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        room, start = room_of(*(options.get(key, value) for key, value in DEFAULTS.items()), seed)
        return draw_text(room, start).replace("\n", "/")

    def _begin(self, seed: int) -> None:
        self._room, self._position = room_of(*self._kind, seed)

    def _play(self, actions: tuple[int, ...]) -> PlayedTurn:
        start, targets, made = self._position, self._room.targets, 0
        for action in actions:
            self._position = self._room.after(self._position, action)
            made += 1
            if self._room.solved(self._position):
                break
        solved = self._room.solved(self._position)
        placed = len(self._position.boxes & targets) - len(start.boxes & targets)
        earned = {"step": made, "box": placed, "success": solved}
        return PlayedTurn(made, solved, solved, earned, {"moved": start != self._position})

    def _rules(self) -> str:
        explained = (
            "You play Sokoban. Push every box onto a target. You can push a box by walking against it, one at a time, "
            f"and you cannot pull. {LEGENDS['text' if self.view == 'text' else 'picture']}{self._state_instruction()}"
        )
        before = "player at (1, 1); box at (2, 1); target at (3, 1)"
        after = "player at (2, 1); box at (3, 1); target at (3, 1)"
        reason = "The box is below me and its target below that."
        thought = {"think": reason, "observation": before, "reasoning": reason, "prediction": after}
        return self._system_prompt("Push the boxes onto the targets.", explained, (1,), **thought)

    def _state(self, position: Position | None = None) -> State:
        here = position or self._position
        return {"player": frozenset([here.player]), "box": here.boxes, "target": self._room.targets}

    def _way(self) -> tuple[int, ...]:
        way = solution(self._room, self._position)
        if way is None:
            drawn = draw_text(self._room, self._position)
            raise EnvironmentFailure(f"sokoban: nothing solves the room of seed {self._seed} from here:\n{drawn}")
        return way

    def _thought(self, actions: tuple[int, ...]) -> dict[str, str]:
        then = self._position
        for action in actions:
            then = self._room.after(then, action)
        reason = f"The shortest way goes {self.grammar.spell(actions).lower()}."
        states = {"observation": describe(self._state()), "prediction": describe(self._state(then))}
        return {"think": reason, "reasoning": reason, **states}

    def _shown(self, above: str) -> Observation:
        if self.view == "text":
            return observation_of(above, draw_text(self._room, self._position))
        if self.view == "blank":
            png = draw_blank(self._room.size, self.cell)
        else:
            png = draw_png(self._room, self._position, self.cell)
        return observation_of(above, self.store.put(png, "picture", f"sokoban seed {self._seed} turn {self._turn}"))

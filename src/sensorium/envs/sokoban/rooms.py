"""Rooms of Sokoban: their rules, which one a seed stands for, and shortest solutions.

A room can be solved by construction: boxes start on their targets, and all moves are played backwards (a push becomes a
pull). That search meets every position in the order of its distance to the goal, so the length of the shortest solution is
known exactly, and one of the length asked for is chosen. This room is one move from its end, Right:

    ######
    #_PXO#      P player, X box, O target, # wall, _ floor
    #____#
    ######
"""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from sensorium.envs.way_back import way_back
from sensorium.vocabulary.errors import EnvironmentFailure

ACTIONS = ("Up", "Down", "Left", "Right")
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))
"""Rows down and columns right of each action."""

MOST_TRIES = 200
MOST_POSITIONS = 200_000
"""Positions that a search may meet."""

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
        """Whether every box is on a target."""
        return position.boxes == self.targets


@lru_cache(maxsize=4096)
def room_of(size: int, boxes: int, shortest: int, longest: int, walls: float, seed: int) -> tuple[Room, Position]:
    """The room a seed stands for and its start, ``shortest`` to ``longest`` moves from its solution."""
    chance = random.Random(f"sokoban/{size}/{boxes}/{shortest}/{longest}/{walls}/{seed}")
    for _ in range(MOST_TRIES):
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
        f"sokoban: of {MOST_TRIES} rooms of size {size} with {boxes} boxes none has a solution of {shortest} to {longest} "
        "moves; ask for shorter ones, a larger room or fewer walls."
    )


def positions_at(room: Room, length: int) -> list[Position]:
    """Every position whose shortest solution has exactly so many moves, in a fixed order."""
    layer = [Position(place, room.targets) for place in sorted(room.floor - room.targets)]
    seen = set(layer)
    for _ in range(length):
        layer = [new for new in dict.fromkeys(b for position in layer for b in room.before(position)) if new not in seen]
        seen.update(layer)
        if not layer or len(seen) > MOST_POSITIONS:
            return []
    return sorted(layer, key=lambda position: (position.player, sorted(position.boxes)))


def solution(room: Room, start: Position) -> tuple[int, ...] | None:
    """The moves of a shortest solution (ties go to the first of ACTIONS), or None where there is none."""
    came: dict[Position, tuple[Position, int] | None] = {start: None}
    frontier = deque([start])
    while frontier and len(came) <= MOST_POSITIONS:
        here = frontier.popleft()
        if room.solved(here):
            return way_back(came, here)
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

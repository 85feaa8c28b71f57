"""Sokoban: push every box onto a target. The seed decides the room, its start, and the noise of demonstrations."""

import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from sensorium.data.media_store import MediaStore
from sensorium.envs.actions import (
    ActionGrammar,
    ActionPrompts,
    State,
    TurnPay,
    describe,
    described_parts,
    instruction,
    judged,
    sight,
    turn_result,
)
from sensorium.envs.grids import Mark, draw_tiles, way_back
from sensorium.envs.protocol import Observation, StepResult, one_of, within
from sensorium.envs.responses import ResponseFormat
from sensorium.vocabulary.content import Message, system
from sensorium.vocabulary.errors import EnvironmentFailure

# A room can be solved by construction: boxes start on their targets, and all moves are played backwards (a push becomes
# a pull). That search meets every position in the order of its distance to the goal, so the length of the shortest
# solution is known exactly, and one of the length asked for is chosen. This room is one move from its end, Right:
# ###### #_PXO# P player, X box, O target, # wall, _ floor #____# ######


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


NAME = "sokoban"
MOST_PIXELS_ACROSS = 4096
DEFAULTS = {"size": 6, "boxes": 1, "min_solution": 1, "max_solution": 5, "walls": 0.1}
LEGENDS = {
    "text": "# is wall, _ floor, O a target, X a box, √ a box on a target, P is you, S is you on a target.",
    "picture": "Grey is wall; a green square is a target, a brown one a box, a light green one a box on a target; "
    "the red square is you.",
}


class Sokoban:
    """One room, played once: push the boxes onto the targets, in ``min_solution`` to ``max_solution`` moves at best.

    Pays ``step_reward`` for each move, ``box_reward`` for each box pushed onto a target (taken back when it leaves it),
    ``success_reward`` when all are there, ``format_reward`` and ``state_reward`` as FrozenLake does. ``view`` shows the
    room as a picture or text, or shows nothing of it, to see whether a model looks.
    """

    instant = True

    def __init__(
        self,
        store: MediaStore,
        size: int = 6,
        boxes: int = 1,
        min_solution: int = 1,
        max_solution: int = 5,
        walls: float = 0.1,
        max_turns: int = 10,
        max_actions_per_turn: int = 1,
        view: Literal["picture", "text", "blank"] = "picture",
        prompt: Literal["short", "full"] = "short",
        response_format: str = "",
        bare: bool = False,
        cell: int = 28,
        step_reward: float = -0.1,
        box_reward: float = 1.0,
        success_reward: float = 10.0,
        format_reward: float = 0.5,
        state_reward: float = 0.0,
        demonstration_noise: float = 0.0,
        grammar: Literal["own", "vagen"] = "own",
    ) -> None:
        one_of(NAME, "view", view, ["picture", "text", "blank"])
        one_of(NAME, "prompt", prompt, ["short", "full"])
        within(NAME, "size", size, 4, 16)
        within(NAME, "boxes", boxes, 1, 8)
        within(NAME, "min_solution", min_solution, 1, max_solution)
        within(NAME, "max_solution", max_solution, 1, 1000)
        within(NAME, "walls", walls, 0.0, 0.9)
        within(NAME, "max_turns", max_turns, 1, 10**6)
        within(NAME, "max_actions_per_turn", max_actions_per_turn, 1, 10**6)
        within(NAME, "cell", cell, 4, 512)
        within(NAME, "size times cell (the picture's width)", size * cell, 8, MOST_PIXELS_ACROSS)
        within(NAME, "demonstration_noise", demonstration_noise, 0.0, 1.0)
        self.store, self.max_turns, self.view, self.cell = store, max_turns, view, cell
        self._kind = (size, boxes, min_solution, max_solution, walls)
        form = ResponseFormat(response_format or ("free_think" if prompt == "full" else "no_think"), grammar=grammar)
        self.grammar = ActionGrammar(ACTIONS, max_actions_per_turn, form, bare)
        self.prompts = ActionPrompts(self.grammar, full=prompt == "full")
        described = described_parts(NAME, form, state_reward)
        self.pay = TurnPay(
            {"step": step_reward, "box": box_reward, "success": success_reward, "format": format_reward, **described}
        )
        self.demonstration_noise = demonstration_noise
        self._room: Room | None = None
        self._position = Position((0, 0), frozenset())
        self._seed = self._turn = 0
        self._over = True

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        """What the seed leads to: the room and its start."""
        room, start = room_of(*(options.get(key, value) for key, value in DEFAULTS.items()), seed)
        return draw_text(room, start).replace("\n", "/")

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        """A new room at its start."""
        self._room, self._position = room_of(*self._kind, seed)
        self._seed, self._turn, self._over = seed, 0, False
        return (system(self._rules()),), self._observe(self.prompts.opening())

    def step(self, response: str) -> StepResult:
        """Carry out the moves the response names, until the room is solved or the last of them."""
        room = self._open_room()
        asked = self.grammar.read(response)
        before, start, made = self._state(), self._position, 0
        for action in asked.actions:
            self._position = room.after(self._position, action)
            made += 1
            if room.solved(self._position):
                break
        self._turn += 1
        success = room.solved(self._position)
        truncated = not success and self._turn >= self.max_turns
        self._over = success or truncated
        said = self.grammar.spell(asked.actions[:made])
        described = judged(asked, before, self._state(), self.pay.worth)
        placed = len(self._position.boxes & room.targets) - len(start.boxes & room.targets)
        good = asked.well_formed and asked.valid
        pay = self.pay.of(step=made, box=placed, success=success, format=good, **described)
        shown = None if self._over else self._observe(self.prompts.after(said))
        moved = start != self._position
        return turn_result(asked, said, shown, pay, truncated=truncated, success=success, moved=moved, **described)

    def demonstrate(self) -> str:
        """The next moves of a shortest solution; by ``demonstration_noise`` a move at random, keyed by seed and turn."""
        room = self._open_room()
        way = solution(room, self._position)
        if way is None:
            raise EnvironmentFailure(f"sokoban: nothing solves the room of seed {self._seed} from here:\n{self._drawn()}")
        actions = way[: self.grammar.most_actions]
        chance = random.Random(f"sokoban/{self._seed}/{self._turn}")
        if chance.random() < self.demonstration_noise:
            actions = (chance.randrange(len(ACTIONS)),)
        return self.grammar.write(actions, **self._thought(actions))

    def close(self) -> None:
        """Nothing is held."""

    def _open_room(self) -> Room:
        if self._room is None or self._over:
            raise EnvironmentFailure("sokoban: the room is solved, or play has ended or not begun; reset it first.")
        return self._room

    def _rules(self) -> str:
        legend = LEGENDS["text" if self.view == "text" else "picture"]
        states = f"\n{instruction(self._state())}" if {"observation", "prediction"} & set(self.pay.worth) else ""
        explained = (
            "You play Sokoban. Push every box onto a target. You can push a box by walking against it, one at a time, "
            f"and you cannot pull. {legend}{states}"
        )
        example = "player at (1, 1); box at (2, 1); target at (3, 1)"
        after = "player at (2, 1); box at (3, 1); target at (3, 1)"
        reason = "The box is below me and its target below that."
        thought = {"think": reason, "observation": example, "reasoning": reason, "prediction": after}
        return self.prompts.rules("Push the boxes onto the targets.", explained, (1,), **thought)

    def _state(self, position: Position | None = None) -> State:
        """Where things are."""
        assert self._room is not None
        here = position or self._position
        return {"player": frozenset([here.player]), "box": here.boxes, "target": self._room.targets}

    def _thought(self, actions: tuple[int, ...]) -> dict[str, str]:
        room, then = self._open_room(), self._position
        for action in actions:
            then = room.after(then, action)
        reason = f"The shortest way goes {self.grammar.spell(actions).lower()}."
        states = {"observation": describe(self._state()), "prediction": describe(self._state(then))}
        return {"think": reason, "reasoning": reason, **states}

    def _drawn(self) -> str:
        assert self._room is not None
        return draw_text(self._room, self._position)

    def _observe(self, words: str) -> Observation:
        assert self._room is not None
        if self.view == "text":
            return sight(words, self._drawn())
        blank = self.view == "blank"
        png = draw_blank(self._room.size, self.cell) if blank else draw_png(self._room, self._position, self.cell)
        return sight(words, self.store.put(png, "picture", f"sokoban seed {self._seed} turn {self._turn}"))

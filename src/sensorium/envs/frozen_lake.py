"""FrozenLake: walk over a frozen lake to the goal without falling into a hole. The seed decides everything."""

import random
from collections import deque
from collections.abc import Mapping
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
from sensorium.envs.grids import Mark, draw_tiles
from sensorium.envs.protocol import Observation, StepResult, one_of, within
from sensorium.envs.responses import ResponseFormat
from sensorium.vocabulary.content import Message, system
from sensorium.vocabulary.errors import EnvironmentFailure

# Places are counted row by row from the top left, so on a lake of size 4 the goal is place 15: SFFF FHFH safe_way(grid,
# 0) gives (1, 1, 2, 1, 2, 2): Down, Down, Right, Down, Right, Right FFFH HFFG


ACTIONS = ("Left", "Down", "Right", "Up")
"""Gymnasium's actions, in its order."""
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
"""Rows down and columns right of each action."""
MOST_TRIES = 10_000

Grid = tuple[str, ...]
"""A lake by rows: S start, G goal, F frozen, H hole."""


@lru_cache(maxsize=4096)
def lake(size: int, p: float, seed: int) -> Grid:
    """The map a seed stands for, always solvable: gymnasium's map of that seed.

    Maps are drawn until one is solvable. Rows of data may ask for ice so thin that none ever is, so tries are bounded.
    """
    from gymnasium.utils.seeding import np_random

    numbers, _ = np_random(seed)
    chance = min(1.0, p)
    for _ in range(MOST_TRIES):
        cells = numbers.choice(["F", "H"], (size, size), p=[chance, 1 - chance])
        cells[0][0], cells[-1][-1] = "S", "G"
        grid = tuple("".join(row) for row in cells)
        if safe_way(grid, 0) is not None:
            return grid
    raise EnvironmentFailure(
        f"frozen_lake: of {MOST_TRIES:,} maps of size {size} with p {p:g} none can be walked across; raise p, or shrink it."
    )


def safe_way(grid: Grid, place: int) -> tuple[int, ...] | None:
    """The moves of a shortest way to the goal that touches no hole (ties go to the first of ACTIONS), or None."""
    size = len(grid)
    ways: dict[int, tuple[int, ...]] = {place: ()}
    frontier = deque([place])
    while frontier:
        here = frontier.popleft()
        row, column = divmod(here, size)
        if grid[row][column] == "G":
            return ways[here]
        for action, (down, right) in enumerate(MOVES):
            r, c = row + down, column + right
            if 0 <= r < size and 0 <= c < size and grid[r][c] != "H" and r * size + c not in ways:
                ways[r * size + c] = (*ways[here], action)
                frontier.append(r * size + c)
    return None


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


NAME = "frozen_lake"
MOST_PIXELS_ACROSS = 4096
LEGENDS = {
    "text": "_ is ice, O a hole, S the start, G the goal and P is you.",
    "picture": "Light blue is ice, dark blue a hole, yellow the start, green the goal; the red square is you.",
}


class FrozenLake:
    """One lake, walked once. Pays ``goal_reward`` at the goal, ``format_reward`` for each valid and well-formed response.

    ``view`` shows the lake as a picture or as text, or a picture of bare ice, to see whether a model looks; ``prompt``
    explains it in a few words or in full. ``response_format`` is one of the five of ``envs/responses.py``; by default the
    full prompt asks for a thought before the answer. A response names up to ``max_actions_per_turn`` moves:
    ``<answer>Left, Down</answer>``, or with ``bare`` the words alone. ``state_reward`` is paid for what a well-formed
    response says of the lake: its observation of how it is, its prediction of how it will be after the moves.
    """

    instant = True

    def __init__(
        self,
        store: MediaStore,
        size: int = 4,
        p: float = 0.8,
        slippery: bool = False,
        max_turns: int = 12,
        max_actions_per_turn: int = 1,
        view: Literal["picture", "text", "blank"] = "picture",
        prompt: Literal["short", "full"] = "short",
        bare: bool = False,
        cell: int = 28,
        goal_reward: float = 1.0,
        format_reward: float = 0.0,
        demonstration_noise: float = 0.0,
        response_format: str = "",
        state_reward: float = 0.0,
        grammar: Literal["own", "vagen"] = "own",
    ) -> None:
        one_of(NAME, "view", view, ["picture", "text", "blank"])
        one_of(NAME, "prompt", prompt, ["short", "full"])
        within(NAME, "size", size, 2, 64)
        within(NAME, "p", p, 0.01, 1.0)
        within(NAME, "max_turns", max_turns, 1, 10**6)
        within(NAME, "max_actions_per_turn", max_actions_per_turn, 1, 10**6)
        within(NAME, "cell", cell, 4, 512)
        within(NAME, "size times cell (the picture's width)", size * cell, 8, MOST_PIXELS_ACROSS)
        within(NAME, "demonstration_noise", demonstration_noise, 0.0, 1.0)
        self.store = store
        self.size, self.p, self.slippery = size, p, slippery
        self.max_turns, self.view, self.cell = max_turns, view, cell
        form = ResponseFormat(response_format or ("free_think" if prompt == "full" else "no_think"), grammar=grammar)
        self.grammar = ActionGrammar(ACTIONS, max_actions_per_turn, form, bare)
        self.prompts = ActionPrompts(self.grammar, full=prompt == "full")
        described = described_parts(NAME, form, state_reward)
        self.pay = TurnPay({"goal": goal_reward, "format": format_reward, **described})
        self.demonstration_noise = demonstration_noise
        self._walk: Any = None
        self._grid: Grid = ()
        self._seed = self._turn = self._place = 0
        self._over = True

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        """What the seed leads to: the map. Equal maps are the same environment, whatever their seeds."""
        return "/".join(lake(options.get("size", 4), options.get("p", 0.8), seed))

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        """A new lake, the player at its start."""
        from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

        self.close()
        self._seed, self._turn, self._over = seed, 0, False
        self._grid = lake(self.size, self.p, seed)
        self._walk = FrozenLakeEnv(desc=list(self._grid), is_slippery=self.slippery)
        self._place = int(self._walk.reset(seed=seed)[0])
        return (system(self._rules()),), self._observe(self.prompts.opening())

    def step(self, response: str) -> StepResult:
        """Carry out the moves the response names, until the goal, a hole, or the last of them."""
        if self._over:
            raise EnvironmentFailure("frozen_lake: the walk is over (or has not begun); reset it first.")
        asked = self.grammar.read(response)
        before, place, reached, ended = self._state(), self._place, False, False
        for action in asked.actions:
            moved_to, reward, ended, _, _ = self._walk.step(action)
            self._place, reached = int(moved_to), reward > 0
            if ended:
                break
        self._turn += 1
        truncated = not ended and self._turn >= self.max_turns
        self._over = ended or truncated
        said = self.grammar.spell(asked.actions)
        good = asked.well_formed and asked.valid
        described = judged(asked, before, self._state(), self.pay.worth)
        shown = None if self._over else self._observe(self.prompts.after(said))
        pay = self.pay.of(goal=reached, format=good, **described)
        moved = place != self._place
        return turn_result(asked, said, shown, pay, truncated=truncated, success=reached, moved=moved, **described)

    def demonstrate(self) -> str:
        """The next moves of a shortest safe way; by ``demonstration_noise`` a move at random, keyed by seed and turn."""
        if self._over:
            raise EnvironmentFailure("frozen_lake: the walk is over (or has not begun); there is nothing to demonstrate.")
        way = safe_way(self._grid, self._place)
        if way is None:
            raise EnvironmentFailure(
                f"frozen_lake: no safe way leads from place {self._place} of {self._grid} to the goal."
            )
        actions = way[: self.grammar.most_actions]
        chance = random.Random(f"frozen_lake/{self._seed}/{self._turn}")
        if chance.random() < self.demonstration_noise:
            actions = (chance.randrange(len(ACTIONS)),)
        return self.grammar.write(actions, **self._thought(actions))

    def close(self) -> None:
        """Give the gymnasium environment back."""
        if self._walk is not None:
            self._walk.close()
            self._walk = None

    def _rules(self) -> str:
        legend = LEGENDS["text" if self.view == "text" else "picture"]
        slip = " The ice is slippery: you may slide sideways." if self.slippery else ""
        states = f"\n{instruction(self._state())}" if {"observation", "prediction"} & set(self.pay.worth) else ""
        explained = f"You walk over a frozen lake. Reach the goal without falling into a hole. {legend}{slip}{states}"
        return self.prompts.rules("Walk to the goal.", explained, (1,), **self._thought((1,), example=True))

    def _state(self) -> State:
        """Where things are."""
        size = len(self._grid)
        holes = frozenset((r, c) for r, row in enumerate(self._grid) for c, letter in enumerate(row) if letter == "H")
        player = frozenset([divmod(self._place, size)])
        return {"player": player, "goal": frozenset([(size - 1, size - 1)]), "hole": holes}

    def _thought(self, actions: tuple[int, ...], *, example: bool = False) -> dict[str, str]:
        """What a demonstration thinks; an example of the prompt tells nothing of the lake at hand."""
        if not self.grammar.format.thinks:
            return {}
        if example:
            player, after = "player at (0, 0); goal at (3, 3)", "player at (1, 0); goal at (3, 3)"
            reason = "The goal is below me and the ice is safe."
        else:
            player, reason = describe(self._state()), f"The safe way goes {self.grammar.spell(actions).lower()}."
            after = describe({**self._state(), "player": frozenset([divmod(self._after(actions), len(self._grid))])})
        return {"think": reason, "observation": player, "reasoning": reason, "prediction": after}

    def _after(self, actions: tuple[int, ...]) -> int:
        """Where some moves lead on ice that does not slip."""
        row, column = divmod(self._place, (size := len(self._grid)))
        for action in actions:
            down, right = MOVES[action]
            row, column = min(max(row + down, 0), size - 1), min(max(column + right, 0), size - 1)
            if self._grid[row][column] in "GH":
                break
        return row * size + column

    def _observe(self, words: str) -> Observation:
        if self.view == "text":
            return sight(words, draw_text(self._grid, self._place))
        blank = self.view == "blank"
        grid = ("F" * self.size,) * self.size if blank else self._grid
        png = draw_png(grid, None if blank else self._place, self.cell)
        return sight(words, self.store.put(png, "picture", f"frozen_lake seed {self._seed} turn {self._turn}"))

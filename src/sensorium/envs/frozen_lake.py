"""FrozenLake: walk over a frozen lake to the goal without falling into a hole. Gymnasium's dynamics, our pictures.

The seed decides everything: the map (gymnasium's generator, always solvable), slips, and the noise of demonstrations.
"""

import random
import re
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from sensorium.envs.protocol import Observation, StepResult
from sensorium.media.picture import encode_png
from sensorium.media.store import MediaStore
from sensorium.vocabulary.content import Message, Text, system, user
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError, nearest

ACTIONS = ("Left", "Down", "Right", "Up")
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
COLOURS = {"F": (205, 228, 245), "H": (24, 30, 66), "G": (52, 168, 83), "S": (244, 200, 66)}
PLAYER = (214, 48, 49)
ANSWER = re.compile(r"<answer>([^<]*)</answer>", re.IGNORECASE)
THOUGHT_AND_ANSWER = re.compile(r"\s*<think>.*?</think>\s*<answer>[^<]*</answer>\s*", re.DOTALL | re.IGNORECASE)
ANSWER_ALONE = re.compile(r"\s*<answer>[^<]*</answer>\s*", re.IGNORECASE)

Grid = tuple[str, ...]

MOST_TRIES = 10_000
MOST_PIXELS_ACROSS = 4096


class FrozenLake:
    """One lake, walked once. Pays ``goal_reward`` at the goal, ``format_reward`` for each valid and well-formed response.

    ``view`` shows the lake as a picture or as text, or a picture of bare ice, to see whether a model looks; ``prompt``
    explains it in a few words or in full (the full one asks for a thought before the answer). A response names up to
    ``max_actions_per_turn`` moves: ``<answer>Left, Down</answer>``, or with ``bare`` the words alone. One that names none,
    too many or an unknown one moves nothing.
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
    ) -> None:
        _one_of("view", view, ["picture", "text", "blank"])
        _one_of("prompt", prompt, ["short", "full"])
        _within("size", size, 2, 64)
        _within("p", p, 0.01, 1.0)
        _within("max_turns", max_turns, 1, 10**6)
        _within("max_actions_per_turn", max_actions_per_turn, 1, 10**6)
        _within("cell", cell, 4, 512)
        _within("size times cell (the picture's width)", size * cell, 8, MOST_PIXELS_ACROSS)
        _within("demonstration_noise", demonstration_noise, 0.0, 1.0)
        self.store = store
        self.size, self.p, self.slippery = size, p, slippery
        self.max_turns, self.max_actions_per_turn = max_turns, max_actions_per_turn
        self.view, self.prompt, self.bare, self.cell = view, prompt, bare, cell
        self.goal_reward, self.format_reward = goal_reward, format_reward
        self.demonstration_noise = demonstration_noise
        self._world: Any = None
        self._grid: Grid = ()
        self._seed = self._turn = self._place = 0
        self._over = True

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        """What the seed leads to: the map. Equal maps are the same world, whatever their seeds."""
        return "/".join(lake(options.get("size", 4), options.get("p", 0.8), seed))

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        """A new lake, the player at its start."""
        from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

        self.close()
        self._seed, self._turn, self._over = seed, 0, False
        self._grid = lake(self.size, self.p, seed)
        self._world = FrozenLakeEnv(desc=list(self._grid), is_slippery=self.slippery)
        self._place = int(self._world.reset(seed=seed)[0])
        return (system(self._rules()),), self._observe("You see:" if self.prompt == "full" else "")

    def step(self, response: str) -> StepResult:
        """Carry out the moves the response names, until the goal, a hole, or the last of them."""
        if self._over:
            raise EnvironmentFailure("frozen_lake: the walk is over (or has not begun); reset it first.")
        actions, well_formed = self.read(response)
        before, reached, ended = self._place, False, False
        for action in actions:
            place, reward, ended, _, _ = self._world.step(action)
            self._place, reached = int(place), reward > 0
            if ended:
                break
        self._turn += 1
        truncated = not ended and self._turn >= self.max_turns
        self._over = ended or truncated
        said = ", ".join(ACTIONS[action] for action in actions)
        return StepResult(
            observation=None if self._over else self._observe(self._after(said)),
            reward=float(self.goal_reward * reached + self.format_reward * (well_formed and bool(actions))),
            done=self._over,
            truncated=truncated,
            success=reached if self._over else None,
            info={
                "valid": bool(actions),
                "format": well_formed,
                "actions": said,
                "moved": before != self._place,
                "success": reached,
            },
        )

    def read(self, response: str) -> tuple[tuple[int, ...], bool]:
        """The moves a response names (none if any of it is invalid), and whether it is laid out as asked."""
        found = ANSWER.findall(response)
        named = found[-1] if found else response if self.bare else ""
        words = [word.strip().capitalize() for word in named.split(",")]
        valid = len(words) <= self.max_actions_per_turn and all(word in ACTIONS for word in words)
        actions = tuple(ACTIONS.index(word) for word in words) if valid else ()
        layout = THOUGHT_AND_ANSWER if self.prompt == "full" else ANSWER_ALONE
        return actions, layout.fullmatch(response) is not None or (self.bare and not found and valid)

    def demonstrate(self) -> str:
        """The next moves of a shortest safe way; by ``demonstration_noise`` a move at random, keyed by seed and turn."""
        if self._over:
            raise EnvironmentFailure("frozen_lake: the walk is over (or has not begun); there is nothing to demonstrate.")
        way = safe_way(self._grid, self._place)
        if way is None:
            raise EnvironmentFailure(
                f"frozen_lake: no safe way leads from place {self._place} of {self._grid} to the goal."
            )
        actions = way[: self.max_actions_per_turn]
        chance = random.Random(f"frozen_lake/{self._seed}/{self._turn}")
        if chance.random() < self.demonstration_noise:
            actions = (chance.randrange(len(ACTIONS)),)
        said = ", ".join(ACTIONS[action] for action in actions)
        if self.prompt == "full":
            return f"<think>The safe way goes {said.lower()}.</think><answer>{said}</answer>"
        return said if self.bare else f"<answer>{said}</answer>"

    def close(self) -> None:
        """Give the gymnasium world back."""
        if self._world is not None:
            self._world.close()
            self._world = None

    def _observe(self, words: str) -> Observation:
        if self.view == "text":
            return Observation((user("\n".join(filter(None, (words, draw_text(self._grid, self._place))))),))
        blank = self.view == "blank"
        grid = ("F" * self.size,) * self.size if blank else self._grid
        png = draw_png(grid, None if blank else self._place, self.cell)
        media = self.store.put(png, "picture", f"frozen_lake seed {self._seed} turn {self._turn}")
        return Observation((Message("user", (*([Text(words + "\n")] if words else []), media)),))

    def _after(self, said: str) -> str:
        if self.prompt == "full":
            return f"You moved {said}. You see:" if said else "That was not a valid answer; you did not move. You see:"
        return "" if said else "Not a move."

    def _rules(self) -> str:
        if self.prompt == "short":
            return "Walk to the goal."
        look = (
            "Light blue is ice, dark blue a hole, yellow the start, green the goal; the red square is you."
            if self.view != "text"
            else "_ is ice, O a hole, S the start, G the goal and P is you."
        )
        many = self.max_actions_per_turn
        how = "one move" if many == 1 else f"up to {many} moves, separated by commas"
        slip = " The ice is slippery: you may slide sideways." if self.slippery else ""
        return (
            f"You walk over a frozen lake. Reach the goal without falling into a hole. {look}{slip}\n"
            f"Moves: {', '.join(ACTIONS)}. Each turn, think and then give {how}:\n"
            f"<think>your thoughts</think><answer>your {'move' if many == 1 else 'moves'}</answer>\n"
            f"For example: <think>The goal is below me and the ice is safe.</think><answer>Down</answer>"
        )


@lru_cache(maxsize=4096)
def lake(size: int, p: float, seed: int) -> Grid:
    """The map a seed stands for, always solvable: S start, G goal, F frozen, H hole. Gymnasium's map of that seed.

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


def draw_text(grid: Grid, place: int) -> str:
    """The lake in letters, the player on it."""
    cells = "".join(grid).translate(str.maketrans("FH", "_O"))
    cells = cells[:place] + "P" + cells[place + 1 :]
    return "\n".join(cells[i : i + len(grid)] for i in range(0, len(cells), len(grid)))


@lru_cache(maxsize=4096)
def draw_png(grid: Grid, place: int | None, cell: int) -> bytes:
    """The lake in flat colours, a square of ``cell`` pixels per place, the player (if any) a smaller square on it."""
    tiles = np.array([[COLOURS[letter] for letter in row] for row in grid], np.uint8)
    pixels = tiles.repeat(cell, axis=0).repeat(cell, axis=1)
    if place is not None:
        row, column = (index * cell for index in divmod(place, len(grid)))
        inset = cell // 7
        pixels[row + inset : row + cell - inset, column + inset : column + cell - inset] = PLAYER
    return encode_png(pixels)


def _one_of(option: str, value: str, known: list[str]) -> None:
    if value not in known:
        raise RecipeError(f"frozen_lake: option {option} cannot be '{value}'{nearest(str(value), known)}")


def _within(option: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise RecipeError(f"frozen_lake: option {option} is {value}; it must lie between {low} and {high}.")

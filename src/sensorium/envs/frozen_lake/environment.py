"""The FrozenLake environment. The seed decides everything: the map, slips, and the noise of demonstrations."""

import random
from collections.abc import Mapping
from typing import Any, Literal

from sensorium.envs.frozen_lake.drawing import draw_png, draw_text
from sensorium.envs.frozen_lake.grammar import Grammar, spell
from sensorium.envs.frozen_lake.maps import ACTIONS, Grid, lake, safe_way
from sensorium.envs.frozen_lake.pay import Pay
from sensorium.envs.protocol import Observation, StepResult
from sensorium.media.store import MediaStore
from sensorium.vocabulary.content import Message, Text, system, user
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError, nearest

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
        self.max_turns, self.view, self.cell = max_turns, view, cell
        self.grammar = Grammar(max_actions_per_turn, thought=prompt == "full", bare=bare)
        self.pay = Pay(goal_reward, format_reward)
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
        rules = self.grammar.rules(in_letters=self.view == "text", slippery=self.slippery)
        return (system(rules),), self._observe(self.grammar.opening())

    def step(self, response: str) -> StepResult:
        """Carry out the moves the response names, until the goal, a hole, or the last of them."""
        if self._over:
            raise EnvironmentFailure("frozen_lake: the walk is over (or has not begun); reset it first.")
        actions, well_formed = self.grammar.read(response)
        before, reached, ended = self._place, False, False
        for action in actions:
            place, reward, ended, _, _ = self._walk.step(action)
            self._place, reached = int(place), reward > 0
            if ended:
                break
        self._turn += 1
        truncated = not ended and self._turn >= self.max_turns
        self._over = ended or truncated
        said = spell(actions)
        return StepResult(
            observation=None if self._over else self._observe(self.grammar.after(said)),
            reward=self.pay.of(reached=reached, well_formed=well_formed and bool(actions)),
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
        return self.grammar.write(actions)

    def close(self) -> None:
        """Give the gymnasium environment back."""
        if self._walk is not None:
            self._walk.close()
            self._walk = None

    def _observe(self, words: str) -> Observation:
        if self.view == "text":
            return Observation((user("\n".join(filter(None, (words, draw_text(self._grid, self._place))))),))
        blank = self.view == "blank"
        grid = ("F" * self.size,) * self.size if blank else self._grid
        png = draw_png(grid, None if blank else self._place, self.cell)
        media = self.store.put(png, "picture", f"frozen_lake seed {self._seed} turn {self._turn}")
        return Observation((Message("user", (*([Text(words + "\n")] if words else []), media)),))


def _one_of(option: str, value: str, known: list[str]) -> None:
    if value not in known:
        raise RecipeError(f"frozen_lake: option {option} cannot be '{value}'{nearest(str(value), known)}")


def _within(option: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise RecipeError(f"frozen_lake: option {option} is {value}; it must lie between {low} and {high}.")

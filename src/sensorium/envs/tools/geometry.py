r"""Geometry: figures on squared paper, from seeds, with geo3k's tool. How wide is it? How high?

Unlike ``geo3k``, which asks the questions of rows, it needs no data: a seed draws a figure, and lengths are whole numbers.

    the picture, "How wide is the rectangle?"
    <tool_call>{"name":"calc_score","arguments":{"answer":6}}</tool_call>      →  "6 is wrong."
    \boxed{7}                                                                  →  success
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from sensorium.envs.option_checks import one_of, within
from sensorium.envs.protocol import Observation, StepResult
from sensorium.envs.tools.geo3k import NAMES, Geo3k
from sensorium.media.picture import encode_png
from sensorium.media.store import MediaStore
from sensorium.vocabulary.content import Message, Text, system
from sensorium.vocabulary.errors import EnvironmentFailure
from sensorium.vocabulary.task import Task

NAME = "geometry"
SQUARES = 6
"""Squares of the paper in a row."""

PAPERS = {"white": (250, 249, 243), "yellow": (252, 238, 176), "grey": (206, 210, 216), "black": (36, 38, 44)}
COLOURS = {
    "red": (214, 48, 49),
    "blue": (44, 92, 197),
    "green": (52, 148, 83),
    "brown": (150, 92, 40),
    "orange": (240, 140, 30),
    "purple": (138, 60, 170),
    "pink": (240, 120, 170),
    "cyan": (30, 170, 190),
}
LINES = (160, 166, 174)
SHAPES = ("rectangle", "triangle")
QUESTIONS = ("wide", "high")


@dataclass(frozen=True)
class Figure:
    """A rectangle or a right-angled triangle in the corner of the paper: its size in squares, and what is asked of it."""

    shape: str
    width: int
    height: int
    colour: str
    paper: str
    asked: str

    @property
    def answer(self) -> int:
        """The length that is asked for."""
        return self.width if self.asked == "wide" else self.height


def figure_of(seed: int) -> Figure:
    """The figure that a seed stands for."""
    chance = random.Random(f"geometry/{seed}")
    width, height = (chance.randint(1, SQUARES) for _ in range(2))
    looks = (chance.choice(list(COLOURS)), chance.choice(list(PAPERS)))
    return Figure(chance.choice(SHAPES), width, height, *looks, chance.choice(QUESTIONS))


@lru_cache(maxsize=4096)
def draw_png(figure: Figure | None, cell: int) -> bytes:
    """The figure on squared paper, its right angle at the lower left; or bare paper."""
    pixels = np.full((SQUARES * cell, SQUARES * cell, 3), PAPERS[figure.paper if figure else "white"], np.uint8)
    if figure is not None:
        down, across = np.mgrid[: figure.height * cell, : figure.width * cell]
        inside = np.ones(down.shape, bool)
        if figure.shape == "triangle":
            inside = (2 * across + 1) * figure.height < (2 * down + 1) * figure.width
        pixels[-figure.height * cell :, : figure.width * cell][inside] = COLOURS[figure.colour]
    pixels[cell - 1 :: cell], pixels[:, cell - 1 :: cell] = LINES, LINES
    return encode_png(pixels)


class Geometry(Geo3k):
    """One figure, measured once: try a length with the tool, then give the final one in a box.

    ``view`` shows the figure or bare paper, to see whether a model looks. ``tool`` tells the truth, or ``garbled`` replies
    that say right or wrong by chance, to see whether a model uses it.
    """

    instant = True

    def __init__(
        self,
        store: MediaStore,
        max_turns: int = 3,
        success_reward: float = 1.0,
        view: Literal["picture", "blank"] = "picture",
        tool: Literal["true", "garbled"] = "true",
        prompt: Literal["short", "full"] = "short",
        cell: int = 16,
        demonstration_noise: float = 0.0,
    ) -> None:
        one_of(NAME, "view", view, ["picture", "blank"])
        one_of(NAME, "tool", tool, ["true", "garbled"])
        one_of(NAME, "prompt", prompt, ["short", "full"])
        within(NAME, "cell", cell, 4, 128)
        within(NAME, "demonstration_noise", demonstration_noise, 0.0, 1.0)
        super().__init__(store, Task(NAME), max_turns, success_reward, explain=prompt == "full")
        self.store, self.view, self.tool, self.cell = store, view, tool, cell
        self.demonstration_noise = demonstration_noise
        self._seed, self._figure = 0, figure_of(0)
        self._confirmed = ""

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        """What the seed leads to: the figure and the question."""
        return str(figure_of(seed))

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        """The figure and the question."""
        self._seed, self._figure, self._confirmed = seed, figure_of(seed), ""
        png = draw_png(None if self.view == "blank" else self._figure, self.cell)
        picture = self.store.put(png, "picture", f"geometry seed {seed}")
        question = f"How {self._figure.asked} is the {self._figure.shape}?"
        if self.explain:
            question += " The squares of the paper have side 1; lengths are whole numbers."
        asked = Message("user", (picture, Text(question)))
        head = (system("Measure."),) if not self.explain else ()
        self.task = Task(f"{NAME}-{seed}", (*head, asked), answer=str(self._figure.answer))
        return super().reset(seed)

    def step(self, response: str) -> StepResult:
        """Compare the answer of a call, or take the response for the final one."""
        self._confirmed = ""
        return super().step(response)

    def demonstrate(self) -> str:
        """Try the right length, give what the tool confirmed; by ``demonstration_noise`` a length by chance."""
        if self._over:
            raise EnvironmentFailure(f"{NAME}: nothing is asked; there is nothing to demonstrate.")
        chance = random.Random(f"geometry/{self._seed}/{self._turn}")
        answer = self._confirmed or str(self._figure.answer)
        if chance.random() < self.demonstration_noise:
            answer = str(chance.randint(1, SQUARES))
        if self._confirmed or self._turn + 1 >= self.max_turns:
            return f"\\boxed{{{answer}}}"
        call = f'{{"name":"{NAMES[0]}","arguments":{{"answer":{answer}}}}}'
        return f"<tool_call>{call}</tool_call>"

    def _told(self, answer: str, right: bool) -> str:
        if self.tool == "garbled":
            right = random.Random(f"geometry/{self._seed}/{self._turn}/{answer}").random() < 0.5
        self._confirmed = answer if right else ""
        return super()._told(answer, right) if self.explain else f"{answer} is {'right' if right else 'wrong'}."

    def _right(self, answer: str) -> bool:
        try:
            return float(answer) == self._figure.answer if len(answer) <= 40 else False
        except ValueError:
            return False

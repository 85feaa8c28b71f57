r"""Geo3k, slime's geometry example, and ``geometry``, which draws its figures from seeds and needs no data.

Each turn a response may call ``calc_score`` (or ``calc_geo3k_reward``) with an ``answer`` and learns whether it is right. A
response without a call, or whose last call is no JSON, is the final answer, as is the one of turn ``max_turns``. The last
``\boxed{}`` of the whole episode decides, by mathematical equivalence; the tool's replies never count.

    "How wide is the rectangle?"
    <tool_call>{"name":"calc_score","arguments":{"answer":6}}</tool_call>   → "6 is wrong."
    \boxed{7}                                                               → success
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.envs.protocol import Observation, StepResult, one_of, within
from sensorium.envs.question import question_of
from sensorium.envs.tool_use import ToolCall, calls_in, write_call
from sensorium.rewards.equivalence import EquivalencePool
from sensorium.rewards.reward_term import boxed, expected_answers
from sensorium.vocabulary.content import Message, Text, system, user
from sensorium.vocabulary.errors import EnvironmentFailure, RewardFailure
from sensorium.vocabulary.task import Task

NAMES = ("calc_score", "calc_geo3k_reward")
FORM = write_call(NAMES[0], {"answer": "your answer"})
MOST_CHARACTERS = 2000  # a longer answer is wrong
_pool = EquivalencePool(timeout_s=5.0, count=2)  # starts with the first comparison; shared by all episodes of the process


class Geo3k:
    r"""A row's problem (its picture and text), with a tool that checks answers.

    With ``explain`` the system prompt explains the tool and ``\boxed{}``; else the problem should.
    """

    instant = False

    def __init__(
        self, store: MediaStore, task: Task, max_turns: int = 3, success_reward: float = 1.0, explain: bool = True
    ):
        within("geo3k", "max_turns", max_turns, 1, 10**6)
        self.task, self.max_turns, self.success_reward, self.explain = task, max_turns, success_reward, explain
        self._turn, self._over, self._box = 0, True, ""

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        head, asked = question_of(self.task)
        expected_answers(self.task)
        self._turn, self._over, self._box = 0, False, ""
        if self.explain:
            rules = (
                f"Solve the geometry problem. You may try an answer before you give it: write\n{FORM}\nand you are told "
                "whether it is right. Give the final answer without a call, as \\boxed{answer}."
            )
            before = (*head[0].content, *user(f"\n\n{rules}").content) if head else user(rules).content
            head = (Message("system", before), *head[1:])
        return head, Observation(asked)

    def step(self, response: str) -> StepResult:
        """Check the answer of the last call, or take the response as the final answer."""
        if self._over:
            raise EnvironmentFailure(
                f"task {self.task.id}: its answer was given (or nothing was asked yet); reset it first."
            )
        self._turn += 1
        self._box = boxed(response) or self._box
        calls = calls_in(response)
        reply, ends, info = self._answered(calls[-1] if calls else None)
        self._over = ends or self._turn >= self.max_turns
        if not self._over:
            return StepResult(Observation((user(reply),)), reward={"success": 0.0}, info=info)
        success = bool(self._box) and self._right(self._box)
        return StepResult(
            None,
            reward={"success": self.success_reward * success},
            done=True,
            truncated=not ends and not success,
            success=success,
            info={**info, "success": success},
        )

    def demonstrate(self) -> str:
        """Try the known answer, then give it."""
        if self._over:
            raise EnvironmentFailure(f"task {self.task.id}: nothing is asked; there is nothing to demonstrate.")
        known = expected_answers(self.task)[0]
        last = self._turn + 1 >= self.max_turns
        return f"The answer is \\boxed{{{known}}}." if self._turn or last else write_call(NAMES[0], {"answer": known})

    def close(self) -> None:
        """Nothing: the processes are shared."""

    def _answered(self, call: ToolCall | None) -> tuple[str, bool, dict[str, Any]]:
        """The tool's reply, whether the call ends the episode, and the step's info."""
        info: dict[str, Any] = {"valid": call is not None and not call.problem, "tool": call.name[:60] if call else ""}
        if call is None or not call.is_json:
            return "No tool was called.", True, info
        answer, problem = call.arguments.get("answer"), ""
        if call.name not in NAMES:
            problem = f"There is no tool '{call.name:.60}'."
        elif call.problem:
            problem = f"The call failed: {call.problem}."
        elif isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
            problem = "The call has no answer."
        if problem:
            return f"{problem} Write {FORM}", False, {**info, "valid": False}
        try:
            right = self._right(str(answer)) or ((box := boxed(str(answer))) is not None and self._right(box))
        except RewardFailure:
            return "Error: the answer could not be compared in time. Write it more simply.", False, info
        return self._reply(f"{answer!s:.200}", right), False, info

    def _reply(self, answer: str, right: bool) -> str:
        if right:
            return f"{answer} matches the reference answer. Now give the final answer as \\boxed{{}}."
        last = " Your next answer is final." if self._turn + 1 >= self.max_turns else ""
        return f"{answer} does not match the reference answer. Think again.{last}"

    def _right(self, answer: str) -> bool:
        if len(answer) > MOST_CHARACTERS:
            return False
        verdicts = [_pool.equal(known, answer.strip()) for known in expected_answers(self.task)]
        if all(verdict is None for verdict in verdicts):
            raise EnvironmentFailure(
                f"task {self.task.id}: its answer {self.task.answer!r:.80} cannot be read as mathematics."
            )
        return any(verdicts)


NAME = "geometry"
SQUARES = 6  # of the paper in a row
PAPERS = {"white": (250, 249, 243), "yellow": (252, 238, 176), "grey": (206, 210, 216), "black": (36, 38, 44)}
COLOURS = {
    "red": (214, 48, 49), "blue": (44, 92, 197), "green": (52, 148, 83), "brown": (150, 92, 40), "orange": (240, 140, 30),
    "purple": (138, 60, 170), "pink": (240, 120, 170), "cyan": (30, 170, 190),
}  # fmt: skip
LINES = (160, 166, 174)
SHAPES = ("rectangle", "triangle")
QUESTIONS = ("wide", "high")


@dataclass(frozen=True)
class Figure:
    """A rectangle or right-angled triangle in the corner of the paper, its size in squares, and the question about it."""

    shape: str
    width: int
    height: int
    colour: str
    paper: str
    asked: str

    @property
    def answer(self) -> int:
        return self.width if self.asked == "wide" else self.height


def figure_of(seed: int) -> Figure:
    """The figure of a seed."""
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
    """One figure to measure: try a length with the tool, then give the final one in a box.

    ``view: blank`` shows bare paper, to test whether a model looks; ``tool: garbled`` gives random replies, to test whether
    it uses the tool.
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
        return str(figure_of(seed))

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
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
        """Check the answer of a call, or take the response as the final answer."""
        self._confirmed = ""
        return super().step(response)

    def demonstrate(self) -> str:
        """Try the right length, then give the confirmed one; with ``demonstration_noise`` sometimes a random length."""
        if self._over:
            raise EnvironmentFailure(f"{NAME}: nothing is asked; there is nothing to demonstrate.")
        chance = random.Random(f"geometry/{self._seed}/{self._turn}")
        answer = self._confirmed or str(self._figure.answer)
        if chance.random() < self.demonstration_noise:
            answer = str(chance.randint(1, SQUARES))
        if self._confirmed or self._turn + 1 >= self.max_turns:
            return f"\\boxed{{{answer}}}"
        return f'<tool_call>{{"name":"{NAMES[0]}","arguments":{{"answer":{answer}}}}}</tool_call>'

    def _reply(self, answer: str, right: bool) -> str:
        if self.tool == "garbled":
            right = random.Random(f"geometry/{self._seed}/{self._turn}/{answer}").random() < 0.5
        self._confirmed = answer if right else ""
        return super()._reply(answer, right) if self.explain else f"{answer} is {'right' if right else 'wrong'}."

    def _right(self, answer: str) -> bool:
        try:
            return float(answer) == self._figure.answer if len(answer) <= 40 else False
        except ValueError:
            return False

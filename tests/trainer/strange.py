"""Strange values and exceptions: what a user's reward term or environment may return or raise."""

import asyncio
import random
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from sensorium.data.media_store import MediaStore
from sensorium.envs.protocol import Observation, StepResult
from sensorium.vocabulary import Episode, Media, Message, Score, Task, Text, system, user


class Hostile:
    """Raises whatever is asked of it."""

    def _fail(self, *arguments: Any) -> Any:
        raise SystemExit("hostile")

    __repr__ = __str__ = __float__ = __int__ = __bool__ = __len__ = __iter__ = __eq__ = __hash__ = _fail  # type: ignore[assignment]
    __getitem__ = __index__ = item = tolist = keys = items = _fail


class Awkward(Exception):
    """An exception that cannot be printed."""

    def __str__(self) -> str:
        raise ValueError("no words")


class Colour(Enum):
    RED = 1


def endless() -> list[Any]:
    held: list[Any] = []
    held.append(held)
    return held


class Unread(dict[Any, Any]):
    """A mapping that cannot be read."""

    def items(self) -> Any:
        raise RuntimeError("closed")


VALUES: list[Any] = [
    None, True, 0, 1, -1, 0.5, float("nan"), float("inf"), float("-inf"), 10**400, 10**5000, -0.0, 1e308, 1j, "", "0.5",
    "\ud800", "x" * 10**5, b"1", (), [], [1.0], (1.0, 2.0), {}, {"a": 1}, {1: 2}, {"a": {"b": object()}}, {None: 1},
    {"\ud800": 1}, {"mean": 0.5}, object(), Hostile(), Colour.RED, Unread(), range(3), lambda: 1, type, iter([1]),
    np.float32(0.5), np.float64("nan"), np.int64(3), np.bool_(True), np.array(0.5), np.array([0.5]), np.zeros((2, 0)),
    np.array("x"), np.array([object()]), np.datetime64("2020-01-01"), torch.tensor(0.5), torch.tensor([1.0]),
    torch.tensor(True), torch.tensor(1.0, requires_grad=True), torch.empty(3, device="meta"),
    torch.tensor(1.0, dtype=torch.bfloat16), Fraction(1, 3), Decimal("0.1"), Decimal("NaN"), Decimal("1e999999"), endless(),
    Score("other", 1.0), user("hello"), ...,
]  # fmt: skip
RAISED: list[BaseException] = [
    ValueError("\ud800"), Awkward(), SystemExit(0), SystemExit("bye"), GeneratorExit(), StopIteration(1),
    StopAsyncIteration(), asyncio.CancelledError(), TimeoutError(), MemoryError(), RecursionError(), KeyError(Hostile()),
    OSError(28, "No space left"), ExceptionGroup("several", [ValueError(1)]), BaseExceptionGroup("worse", [SystemExit(1)]),
    AssertionError(), Warning("w"),
]  # fmt: skip


def _value(place: int) -> Any:
    return VALUES[place]


TEXTS = st.text(st.characters(exclude_categories=()), max_size=8)
PLAIN = (
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.binary(max_size=4) | st.decimals() | st.fractions()
)
ANYTHING = st.recursive(
    PLAIN | st.integers(0, len(VALUES) - 1).map(_value),  # some of them cannot be shown
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.integers(), inner, max_size=3) | st.tuples(inner)
    ),
    max_leaves=4,
)


def step_result(field: str, value: Any) -> Any:
    """A step's outcome in which one thing is strange."""
    match field:
        case "whole":
            return value
        case "observation":
            return StepResult(value)
        case "messages":
            return StepResult(Observation(value))
        case "message":
            return StepResult(Observation((value,)))
        case "role":
            return StepResult(Observation((Message(value, (Text("x"),)),)))
        case "content":
            return StepResult(Observation((Message("user", value),)))
        case "text":
            return StepResult(Observation((Message("user", (Text(value),)),)))
        case "hash":
            return StepResult(Observation((Message("user", (Media("picture", value),)),)))
        case "info value":
            return StepResult(None, info={"key": value})
        case _:
            return StepResult(**{"observation": None, field: value})


STEP_FIELDS = [
    "whole", "observation", "messages", "message", "role", "content", "text", "hash", "reward", "done", "truncated",
    "success", "info", "info value",
]  # fmt: skip


def returned_score(field: str, value: Any) -> Any:
    """What a term returns, in which one thing is strange."""
    match field:
        case "whole":
            return value
        case "list":
            return [value]
        case "value of a dict":
            return {"part": value}
        case "several":
            return (Score("term", 1.0), value)
        case _:
            return Score(**{"name": "term", "value": 1.0, field: value})


SCORE_FIELDS = [
    "whole",
    "list",
    "value of a dict",
    "several",
    "name",
    "value",
    "scope",
    "turn",
    "span",
    "correct",
    "reason",
]


class StrangeWorld:
    """Does something strange in most of its calls, by its seed."""

    def __init__(self, store: MediaStore) -> None:
        self.chance = random.Random(0)

    @classmethod
    def content_key(cls, seed: int, options: Any) -> str:
        return str(seed)

    def reset(self, seed: int) -> Any:
        self.chance = random.Random(seed)
        self.turn = 0
        if self.chance.random() < 0.1:
            raise self.chance.choice(RAISED)
        return (system("go"),), Observation((user("0"),)) if self.chance.random() < 0.9 else self.chance.choice(VALUES)

    def step(self, response: str) -> Any:
        self.turn += 1
        if self.chance.random() < 0.15:
            raise self.chance.choice(RAISED)
        if self.chance.random() < 0.5:
            return step_result(self.chance.choice(STEP_FIELDS), self.chance.choice(VALUES))
        done = self.turn == 2
        return StepResult(None if done else Observation((user("1"),)), reward=float(len(response) % 3), done=done)

    def close(self) -> Any:
        if self.chance.random() < 0.3:
            raise self.chance.choice(RAISED)
        return self.chance.choice(VALUES)


class StrangeTerm:
    """Judges half of the episodes, and is strange with the others; by the episode's id."""

    name = "term"

    def __init__(self, instant: bool = False, name: str = "term") -> None:
        self.instant, self.name = instant, name

    def score(self, task: Task, episode: Episode) -> Any:
        chance = random.Random(f"{self.name}/{episode.id}")
        if chance.random() < 0.5:
            return float(episode.index)
        if chance.random() < 0.3:
            raise chance.choice(RAISED)
        return returned_score(chance.choice(SCORE_FIELDS), chance.choice(VALUES))

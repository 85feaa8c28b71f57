"""Question: a task's messages as an environment that ends after one step.

A recorded episode, played again, shows the observations and rewards of the recording, whatever the environment was. The
task of a recording (``data/demonstrations.py``) names it, and nothing else can: it is not in the table of environments.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any
from weakref import WeakKeyDictionary

from sensorium.data.demonstrations import RecordedEnd
from sensorium.data.media_store import MediaStore
from sensorium.envs.adapters.content import key_of
from sensorium.envs.protocol import Observation, StepResult, then
from sensorium.recipe.registry import build
from sensorium.vocabulary.content import Message
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError
from sensorium.vocabulary.task import Task


class Question:
    """Shows the task's messages and takes one response. It gives no reward: reward terms judge the answer."""

    instant = True

    def __init__(self, task: Task) -> None:
        self.task = task
        self._open = False

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        """The head is the leading system messages, the observation all others."""
        head, asked = question_of(self.task)
        self._open = True
        return head, Observation(asked)

    def step(self, response: str) -> StepResult:
        if not self._open:
            raise EnvironmentFailure(f"task {self.task.id}: a question takes one response after each reset.")
        self._open = False
        return StepResult(None, done=True)

    def demonstrate(self) -> str:
        if not self.task.demonstration:
            raise EnvironmentFailure(f"task {self.task.id} has no demonstration to learn from; give its row one.")
        return self.task.demonstration[0]

    def close(self) -> None:
        """Nothing to release."""


def question_of(task: Task) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """A task's leading system messages, and its other messages."""
    start = next((i for i, message in enumerate(task.messages) if message.role != "system"), None)
    if start is None:
        raise EnvironmentFailure(f"task {task.id} asks nothing: it needs a message that is not a system prompt.")
    return task.messages[:start], task.messages[start:]


NAME = "rows"
_key_store = MediaStore()  # media of rows whose content key is requested
_sources: "WeakKeyDictionary[MediaStore, dict[str, Sequence[Task]]]" = WeakKeyDictionary()
_lock = threading.Lock()


class RowsEnvironment:
    """``source`` with ``options``, as a recipe names sources of tasks; the seed, counted round, chooses the row.

    The row's own environment (``geo3k``, ``tools``, …) plays it and gives the reward. Reward terms do not see the row, so a
    row whose environment gives no reward has none here.
    """

    instant = False
    recipe_only = ("source", "options")

    def __init__(self, store: MediaStore, source: str, options: Mapping[str, Any] | None = None) -> None:
        self._store = store
        self._rows = _rows_of(store, source, dict(options or {}))
        self._played: Any = None

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        """The question of a seed's row, and the answer."""
        rows = _rows_of(_key_store, str(options["source"]), dict(options.get("options") or {}))
        task = rows[seed % len(rows)]
        return f"{key_of(task.messages)} {task.answer!r} {task.environment!r}"

    def reset(self, seed: int) -> Any:
        self.close()
        task = self._rows[seed % len(self._rows)]
        spec = task.environment
        if spec is None:
            self._played = Question(task)
        elif spec.name == NAME:
            raise EnvironmentFailure(f"{NAME}: task {task.id} is played in rows itself.")
        else:
            where = f"task {task.id}"
            self._played = build("environment", spec.name, spec.options, where, store=self._store, task=task)

        def named(begun: Any) -> Any:
            head, first = begun
            return head, replace(first, category=first.category or str(task.metadata.get("category") or "")[:80])

        return then(self._played.reset(spec.seed if spec else 0), named)

    def step(self, response: str) -> StepResult:
        result: StepResult = self._open().step(response)
        return result

    def demonstrate(self) -> str:
        return str(self._open().demonstrate())

    def close(self) -> None:
        played, self._played = self._played, None
        if played is not None:
            played.close()

    def _open(self) -> Any:
        if self._played is None:
            raise EnvironmentFailure(f"{NAME}: it has not begun; reset it first.")
        return self._played


def _rows_of(store: MediaStore, source: str, options: dict[str, Any]) -> Sequence[Task]:
    """The rows of a source, read once for each store."""
    with _lock:
        known = _sources.setdefault(store, {})
        key = repr((source, sorted(options.items(), key=repr)))
        if key not in known:
            rows = build("source", source, options, NAME, store=store)
            if not len(rows):
                raise RecipeError(f"{NAME}: the source '{source}' has no rows.")
            known[key] = rows
        return known[key]


class RecordedEnvironment:
    """Shows what the recorded episode showed; its demonstration is what was answered then."""

    instant = True

    def __init__(self, task: Task) -> None:
        assert task.environment is not None
        options = task.environment.options
        self._responses, self._turn = task.demonstration, 0
        self._head: tuple[Message, ...] = task.messages[: options["head"]]
        ends = accumulate(options["turns"], initial=options["head"])
        self._observations = [
            Observation(task.messages[start:end], after=after)
            for (start, end), after in zip(pairwise(ends), options["after"], strict=True)
        ]
        self._rewards: Sequence[float | Mapping[str, float] | None] = options["rewards"]
        self._end = RecordedEnd(**options["end"])

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        self._turn = 0
        return self._head, replace(self._observations[0], category=self._end.category)

    def step(self, response: str) -> StepResult:
        reward = self._rewards[self._turn]
        self._turn += 1
        if self._turn < len(self._observations):
            return StepResult(self._observations[self._turn], reward)
        return StepResult(None, reward, not self._end.truncated, self._end.truncated, self._end.success)

    def demonstrate(self) -> str:
        if self._turn >= len(self._responses):
            raise EnvironmentFailure("the recorded episode has ended.")
        return self._responses[self._turn]

    def close(self) -> None:
        """Nothing to release."""

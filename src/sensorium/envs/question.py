"""Question: a task's messages as an environment that ends after one step."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from sensorium.data.media_store import MediaStore
from sensorium.envs.adapters.content import key_of
from sensorium.envs.protocol import Observation, StepResult
from sensorium.recipe.names import build
from sensorium.vocabulary.content import Message
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError
from sensorium.vocabulary.task import Task


class Question:
    """Shows the task's messages, takes one response, pays nothing by itself: reward terms judge the answer."""

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
        """The response ends it."""
        if not self._open:
            raise EnvironmentFailure(f"task {self.task.id}: a question takes one response after each reset.")
        self._open = False
        return StepResult(None, done=True)

    def demonstrate(self) -> str:
        """The task's worked response."""
        if not self.task.demonstration:
            raise EnvironmentFailure(f"task {self.task.id} has no demonstration to learn from; give its row one.")
        return self.task.demonstration[0]

    def close(self) -> None:
        """Nothing is held."""


def question_of(task: Task) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """A task's leading system messages, and what it asks."""
    start = next((i for i, message in enumerate(task.messages) if message.role != "system"), None)
    if start is None:
        raise EnvironmentFailure(f"task {task.id} asks nothing: it needs a message that is not a system prompt.")
    return task.messages[:start], task.messages[start:]


NAME = "rows"

_sources: "WeakKeyDictionary[MediaStore, dict[str, Sequence[Task]]]" = WeakKeyDictionary()
_lock = threading.Lock()


class RowsEnvironment:
    """``source`` with ``options``, as a recipe names sources of tasks; the seed, counted round, says which row is played.

    What is shown and paid is what the row's own environment does (``geo3k``, ``tools``, …). Reward terms do not see the
    row, so a row whose environment pays nothing is worth nothing here.
    """

    instant = False
    recipe_only = ("source", "options")

    def __init__(self, store: MediaStore, source: str, options: Mapping[str, Any] | None = None) -> None:
        self._store = store
        self._rows = _rows_of(store, source, dict(options or {}))
        self._played: Any = None

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        """What a seed leads to: what its row asks, and the answer."""
        rows = _rows_of(_keys, str(options["source"]), dict(options.get("options") or {}))
        task = rows[seed % len(rows)]
        return f"{key_of(task.messages)} {task.answer!r} {task.environment!r}"

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        """The row of a seed, in its environment."""
        self.close()
        task = self._rows[seed % len(self._rows)]
        spec = task.environment
        if spec is not None and spec.name == NAME:
            raise EnvironmentFailure(f"{NAME}: task {task.id} is played in rows itself.")
        made = (
            build("environment", spec.name, spec.options, f"task {task.id}", store=self._store, task=task) if spec else None
        )
        self._played = made if made is not None else Question(task)
        begun: tuple[tuple[Message, ...], Observation] = self._played.reset(spec.seed if spec else 0)
        return begun

    def step(self, response: str) -> StepResult:
        """Act in the row's environment."""
        result: StepResult = self._open().step(response)
        return result

    def demonstrate(self) -> str:
        """A good response, by the row's environment."""
        said: str = self._open().demonstrate()
        return said

    def close(self) -> None:
        """Close the row's environment."""
        played, self._played = self._played, None
        if played is not None:
            played.close()

    def _open(self) -> Any:
        if self._played is None:
            raise EnvironmentFailure(f"{NAME}: it has not begun; reset it first.")
        return self._played


_keys = MediaStore()
"""Where the media of rows are that are only asked for their content."""


def _rows_of(store: MediaStore, source: str, options: dict[str, Any]) -> Sequence[Task]:
    """The rows of a source, read once for each store."""
    with _lock:
        held = _sources.setdefault(store, {})
        key = repr((source, sorted(options.items(), key=repr)))
        if key not in held:
            rows = build("source", source, options, NAME, store=store)
            if not len(rows):
                raise RecipeError(f"{NAME}: the source '{source}' has no rows.")
            held[key] = rows
        return held[key]

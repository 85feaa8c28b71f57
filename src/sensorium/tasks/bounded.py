"""A user's own source or planner behind a deadline: what never answers ends the run with a paragraph, not with silence,
and so does a row whose code raises anything but the errors of a bad row.

Each is called in one thread, whoever asks, so that files and connections stay where they were opened. What the clock
decides is never skipped as a bad row would be: a resumed run could decide otherwise.
"""

import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sensorium.tasks.source import TaskSource
from sensorium.vocabulary.errors import RecipeError, SensoriumError
from sensorium.vocabulary.plain import words
from sensorium.vocabulary.task import Task
from sensorium.workers.pool import WorkerFailure, WorkerPool
from sensorium.workers.worker import Worker

if TYPE_CHECKING:
    from sensorium.tasks.planner import GroupOutcome, PlannedTasks, Planner

ROW_DEADLINE_S = 300.0


class _BoundedCalls:
    """Calls of one object of the user's own, one at a time in one thread, each waited for at most ``deadline_s``."""

    def __init__(self, subject: str, advice: str, deadline_s: float) -> None:
        self._subject, self._advice, self._deadline_s = subject, advice, deadline_s
        self._pool = WorkerPool("source")
        self._worker: Worker | None = None
        self._lock = threading.Lock()

    def ask(self, what: str, call: Callable[[], Any]) -> Any:
        """What a call returns, or the error it raises."""
        with self._lock:
            try:
                self._worker = self._worker or self._pool.lease()
                ended = self._pool.call_now(call, self._deadline_s, self._worker)
            except WorkerFailure as error:
                if self._worker is not None:
                    self._pool.give_back(self._worker)
                    self._worker = None
                raise RecipeError(
                    f"{self._subject} was asked for {what} and {error}. See what it waits for; {self._advice}"
                ) from error
        if ended.error is not None:
            raise ended.error
        return ended.value


class BoundedSource:
    """A source whose rows, and their number, are waited for at most ``deadline_s``."""

    def __init__(self, source: TaskSource, name: str, where: str, deadline_s: float = ROW_DEADLINE_S) -> None:
        self._source, self._who = source, f"{where}: source '{name}'"
        advice = "rows that take long are better made before the run."
        self._calls = _BoundedCalls(self._who, advice, deadline_s)

    def __len__(self) -> int:
        found: int = self._calls.ask("its length", lambda: len(self._source))
        return found

    def __getitem__(self, index: int) -> Task:
        try:
            task: Task = self._calls.ask(f"row {index}", lambda: self._source[index])
        except SensoriumError:
            raise
        except Exception as error:  # a source of the user's own may raise anything; such a row is a mistake in its code
            place = _line_of(error, type(self._source))
            raise RecipeError(f"{self._who}, row {index}{place}: {words(error)}") from error
        return task

    def __getattr__(self, name: str) -> Any:
        """What else a source has, such as ``table_columns``."""
        return getattr(self.__dict__["_source"], name)


class BoundedPlanner:
    """A planner whose every answer is waited for at most ``deadline_s``."""

    def __init__(self, planner: "Planner", name: str, deadline_s: float = ROW_DEADLINE_S) -> None:
        self._planner = planner
        self.observes = bool(getattr(planner, "observes", True))
        self._calls = _BoundedCalls(f"tasks.planner: '{name}'", "a step cannot begin before it has its tasks.", deadline_s)

    def draw(self, count: int) -> "PlannedTasks":
        """The next tasks."""
        drawn: PlannedTasks = self._calls.ask(f"{count} tasks", lambda: self._planner.draw(count))
        return drawn

    def observe(self, groups: "Sequence[GroupOutcome]") -> None:
        """What became of a step's groups."""
        self._calls.ask("observe()", lambda: self._planner.observe(groups))

    def state_dict(self) -> dict[str, Any]:
        """The planner's state."""
        state: dict[str, Any] = self._calls.ask("its state", self._planner.state_dict)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self._calls.ask("load_state_dict()", lambda: self._planner.load_state_dict(state))


def _line_of(error: Exception, kind: type) -> str:
    """Where in the file of a class an error was raised, as `` (rows.py:7)``; empty if nowhere in it."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({Path(str(file)).name}:{lines[-1]})" if lines else ""


def bounded(source: TaskSource, name: str, where: str) -> TaskSource:
    """The source itself where it is one of ours, which read files; a user's own behind a deadline."""
    return BoundedSource(source, name, where) if ":" in name else source

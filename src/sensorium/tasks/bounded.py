"""A user's own source behind a deadline: a row that never comes ends the run with a paragraph, not with silence.

Rows are read in one thread, whoever asks, so that files and connections stay where they were opened. What the clock decides
is never skipped as a bad row would be: a resumed run could decide otherwise.
"""

import threading
from typing import Any

from sensorium.tasks.source import TaskSource
from sensorium.vocabulary.errors import RecipeError
from sensorium.vocabulary.task import Task
from sensorium.workers.pool import WorkerFailure, WorkerPool
from sensorium.workers.worker import Worker

ROW_DEADLINE_S = 300.0


class BoundedSource:
    """A source whose rows, and their number, are waited for at most ``deadline_s``."""

    def __init__(self, source: TaskSource, name: str, where: str, deadline_s: float = ROW_DEADLINE_S) -> None:
        self._source, self._name, self._where, self._deadline_s = source, name, where, deadline_s
        self._pool = WorkerPool("source")
        self._worker: Worker | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        found: int = self._read("its length", lambda: len(self._source))
        return found

    def __getitem__(self, index: int) -> Task:
        task: Task = self._read(f"row {index}", lambda: self._source[index])
        return task

    def __getattr__(self, name: str) -> Any:
        """What else a source has, such as ``table_columns``."""
        return getattr(self.__dict__["_source"], name)

    def _read(self, what: str, read: Any) -> Any:
        with self._lock:
            try:
                self._worker = self._worker or self._pool.lease()
                call = self._pool.call_now(read, self._deadline_s, self._worker)
            except WorkerFailure as error:
                if self._worker is not None:
                    self._pool.give_back(self._worker)
                    self._worker = None
                raise RecipeError(
                    f"{self._where}: source '{self._name}' was asked for {what} and {error}. See what it waits for; rows "
                    "that take long are better made before the run."
                ) from error
        if call.error is not None:
            raise call.error
        return call.value


def bounded(source: TaskSource, name: str, where: str) -> TaskSource:
    """The source itself where it is one of ours, which read files; a user's own behind a deadline."""
    return BoundedSource(source, name, where) if ":" in name else source

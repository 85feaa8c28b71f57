"""The heartbeat of a run with processes beside the driver: their state, written every few seconds for others to read."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sensorium.runs.process_table import ProcessRow, RunEnd, forget_processes, write_processes
from sensorium.vocabulary.errors import SensoriumError

EVERY_S = 5.0
LONGEST_CAUSE = 1000


def run_end(error: BaseException | None, *, finished: bool) -> RunEnd:
    """How a run ended, by the error that ended it, if any. ``finished``: it has made its last step."""
    if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
        return RunEnd("stopped")
    if error is None:
        return RunEnd("finished" if finished else "stopped")
    words = " ".join(str(error).split())
    cause = words if isinstance(error, SensoriumError) and words else f"{type(error).__name__}: {words}"
    return RunEnd("failed", cause[:LONGEST_CAUSE])


class Heartbeat:
    """Writes ``parts()`` into a run directory, from a thread of its own, until it is closed.

    Without parts it writes nothing, and removes what the run wrote before it was resumed without them.
    """

    def __init__(
        self, folder: Path, parts: Callable[[], tuple[ProcessRow, ...]], steps: int, every_s: float = EVERY_S
    ) -> None:
        self._folder, self._parts, self._steps, self._every_s = folder, parts, steps, every_s
        self._step = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._rows = parts()
        if self._rows:
            self._thread.start()
        else:
            forget_processes(folder)

    def at(self, step: int) -> None:
        """The run is at this step."""
        self._step = step

    def close(self, end: RunEnd) -> None:
        """Write once more that the run is over, and how it ended."""
        self._closed.set()
        if self._rows:
            self._thread.join()
            self._write(end)

    def _beat(self) -> None:
        while not self._closed.is_set():
            self._write()
            self._closed.wait(self._every_s)

    def _write(self, end: RunEnd | None = None) -> None:
        with suppress(SensoriumError, OSError, RuntimeError):  # they change meanwhile: then keep the old rows
            self._rows = self._parts() or self._rows  # a learner that lost a rank has ended all of them
        with suppress(SensoriumError, OSError, RuntimeError):  # the run itself reports a failing disk
            write_processes(self._folder, self._step, self._rows, steps=self._steps, end=end)

"""The heartbeat of a run with processes beside the driver: what each does, written every few seconds for others to read."""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sensorium.record.processes import ProcessRow, forget_processes, write_processes
from sensorium.vocabulary.errors import SensoriumError

EVERY_S = 5.0


class Heartbeat:
    """Writes ``parts()`` into a run directory, from a thread of its own, until it is closed.

    Without parts it writes nothing, and takes away what the run said before it was resumed without them.
    """

    def __init__(self, folder: Path, parts: Callable[[], tuple[ProcessRow, ...]], every_s: float = EVERY_S) -> None:
        self._folder, self._parts, self._every_s = folder, parts, every_s
        self._step = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        if parts():
            self._thread.start()
        else:
            forget_processes(folder)

    def at(self, step: int) -> None:
        """The run is at this step."""
        self._step = step

    def close(self) -> None:
        """Write once more that the run is over."""
        rows = self._parts() if self._thread.is_alive() else ()
        self._closed.set()
        if rows:
            self._thread.join()
            self._write(rows, ended=True)

    def _beat(self) -> None:
        while not self._closed.is_set():
            self._write(self._parts())
            self._closed.wait(self._every_s)

    def _write(self, rows: tuple[ProcessRow, ...], *, ended: bool = False) -> None:
        with suppress(SensoriumError, OSError, RuntimeError):  # what is wrong with the disk, the run itself will say
            write_processes(self._folder, self._step, rows, ended=ended)

"""``cluster.json``: the processes of a run, the state of each, and when that was last written."""

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from sensorium.runs.durable import read_json, write_whole
from sensorium.vocabulary.errors import RecordError, SensoriumError

NAME = "cluster.json"
EVERY_S = 5.0
LONGEST_CAUSE = 1000


@dataclass(frozen=True)
class ProcessRow:
    """One process of a run. ``version`` is that of its weights, -1 if it has none.

    ``lost``: it is gone, and nothing will replace it.
    """

    part: str
    pid: int | None
    does: str
    restarts: int = 0
    version: int = -1
    lost: bool = False


@dataclass(frozen=True)
class RunEnd:
    """How a run ended: after its last step, stopped before it (as by Ctrl-C), or failed, with the cause."""

    how: Literal["finished", "stopped", "failed"]
    cause: str = ""


@dataclass(frozen=True)
class RunProcesses:
    """All processes of a run, which is at ``step`` of ``steps``. ``written`` is in seconds since 1970.

    ``ended``: the run closed them; ``end`` says how it ended, which older versions did not write.
    """

    written: float
    host: str
    step: int
    rows: tuple[ProcessRow, ...]
    ended: bool = False
    steps: int = 0
    end: RunEnd | None = None

    @property
    def here(self) -> bool:
        """True if this is the machine of the run's driver, so that its process ids mean something."""
        return self.host == socket.gethostname()


def run_end(error: BaseException | None, *, finished: bool) -> RunEnd:
    """How a run ended, by the error that ended it, if any. ``finished``: it has made its last step."""
    if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
        return RunEnd("stopped")
    if error is None:
        return RunEnd("finished" if finished else "stopped")
    words = " ".join(str(error).split())
    cause = words if isinstance(error, SensoriumError) and words else f"{type(error).__name__}: {words}"
    return RunEnd("failed", cause[:LONGEST_CAUSE])


def write_processes(
    folder: Path, step: int, rows: tuple[ProcessRow, ...], *, steps: int = 0, end: RunEnd | None = None
) -> None:
    """Write the state of a run's processes, or how the run ended."""
    state = RunProcesses(time.time(), socket.gethostname(), step, rows, end is not None, steps, end)
    write_whole(folder / NAME, json.dumps(asdict(state), indent=1) + "\n")


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
            with suppress(OSError):
                (folder / NAME).unlink(missing_ok=True)

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


def read_processes(folder: Path) -> RunProcesses | None:
    """What was last written; None for a run of one process."""
    if not (folder / NAME).exists():
        return None
    way_out = "A running run writes it again; remove it."
    data: dict[str, Any] = read_json(folder / NAME, way_out)
    try:
        return TypeAdapter(RunProcesses).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise RecordError(f"'{folder / NAME}' is damaged: '{place}': {first['msg']}. {way_out}") from error


def alive(pid: int | None) -> bool:
    """True if a process of this machine has this id and has not ended."""
    if pid is None:
        return False
    if state := process_state(pid):
        return state not in "ZX"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it belongs to another user
        pass
    return True


def process_state(pid: int) -> str:
    """The Linux state letter of a process of this machine (R, S, D, T, Z); empty if unknown."""
    try:
        return Path(f"/proc/{pid:d}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""

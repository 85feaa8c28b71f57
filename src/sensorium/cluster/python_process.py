"""A Python process that works for this one: started with sockets to talk over, ended for certain, its end explained."""

import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from sensorium.cluster.channel import Frames, SocketFrames

LAST_LINES = 6
CLOSE_S = 30.0
MARK = "SENSORIUM_STARTED_"
"""Begins the name of an environment variable that a process with a group of its own, and all that it starts, have."""
SEGMENT = re.compile(r"/dev/shm/psm_\w+(?=\n)")
"""Shared memory by the names that ``multiprocessing.shared_memory`` gives; not one that is removed already."""


class PythonProcess:
    """Runs ``python -m module fd …``. What it prints goes to ``log``; its last lines tell why it died.

    With ``own_group`` it leads a process group, and its end is the end of whatever it started: of its group, and of what
    left the group (browsers do) but still has the mark that it inherited in its environment. A PYTHONPATH in
    ``environment`` goes before this process's own path.
    """

    def __init__(
        self,
        module: str,
        sockets: Sequence[socket.socket],
        log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        own_group: bool = False,
    ) -> None:
        self._log, self._own_group = log, own_group
        fds = [end.fileno() for end in sockets]
        given = dict(environment or {})
        self._mark = f"{MARK}{uuid4().hex}" if own_group else ""
        if own_group:
            given[self._mark] = "1"
        given["PYTHONPATH"] = os.pathsep.join(filter(None, [given.get("PYTHONPATH", ""), *sys.path]))
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **given},
                start_new_session=own_group,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def alive(self) -> bool:
        """True until it has ended."""
        return self.process.poll() is None

    def end(self, after_s: float = 0.0) -> None:
        """Wait so long for it to end, then kill it; then the others of its group, and wait until they are gone."""
        try:
            self.process.wait(after_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self._own_group:
            _end_group(self.pid, self._mark)

    def ending(self) -> str:
        """How it ended, as the end of a sentence about it."""
        self.end(CLOSE_S)
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = " (SIGKILL often means that memory ran out)" if code == -signal.SIGKILL else ""
        return how + hint

    def log_text(self) -> str:
        """All that it printed."""
        return self._log.read_text(errors="replace")


def end_descendants() -> None:
    """Kill what this process, started with a group of its own, has started and is still there."""
    for mark in [name for name in os.environ if name.startswith(MARK)]:
        for process in _living(os.getpid(), mark):
            if int(process.name) != os.getpid():
                with suppress(ProcessLookupError):
                    os.kill(int(process.name), signal.SIGKILL)


def guard_group() -> None:
    """Let the group of this process, its leader, end with it however it is killed: by a small process that watches it.

    The group's shared memory, which has a name and would outlive it, is removed. To be called before there are threads.
    Ray, for one, kills what its actors have started, but not what that has started.
    """
    watched, _held = os.pipe()
    if os.fork():
        os.close(watched)
        return  # the other end is held as long as this process lives, and is inherited by nobody
    os.closerange(0, watched)
    os.closerange(watched + 1, min(os.sysconf("SC_OPEN_MAX"), 65536))
    os.read(watched, 1)
    remove_segments(mapped_segments(os.getpgrp()))  # before the kill, which ends this process too
    os.killpg(os.getpgrp(), signal.SIGKILL)


def last_words(log: str) -> str:
    """A sentence with the last lines of a log; empty if there are none."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return f" It last said: {' / '.join(lines[-LAST_LINES:])}" if lines else ""


def _end_group(group: int, mark: str, wait_s: float = 30.0) -> None:
    """Kill what is left of a process group, and wait: a dying worker holds its memory and its GPU for seconds."""
    until = time.monotonic() + wait_s
    remove_segments(mapped_segments(group))
    while (left := list(_living(group, mark))) and time.monotonic() < until:
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(int(process.name), signal.SIGKILL)
        time.sleep(0.05)


def any_alive(group: int) -> bool:
    """True while a process of the group is alive."""
    return any(True for _ in _living(group))


def mapped_segments(group: int) -> set[Path]:
    """The segments of shared memory, as Python names them, that processes of the group have mapped."""
    found = set()
    for process in _living(group):
        with suppress(OSError):
            found |= set(SEGMENT.findall((process / "maps").read_text()))
    return {Path(name) for name in found}


def remove_segments(segments: Iterable[Path]) -> None:
    """Take their names away, and with the last process that has them mapped the memory."""
    for segment in segments:
        with suppress(OSError):
            segment.unlink(missing_ok=True)


def _living(group: int, mark: str = "") -> Iterator[Path]:
    """The folders in /proc of a group's processes, and of those that have a mark in their environment.

    Zombies are left out: whoever adopted them may never collect them.
    """
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError, ValueError):
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if state not in "ZX" and (int(its_group) == group or (mark and _has_mark(stat.parent, mark))):
                yield stat.parent


def _has_mark(process: Path, mark: str) -> bool:
    with suppress(OSError):  # another user's process
        return f"{mark}=".encode() in (process / "environ").read_bytes()
    return False


# Whoever talks to such a process sees a HostedProcess and Frames, and does not know where it is.


class HostedProcess(Protocol):
    """A process that works for this one."""

    @property
    def pid(self) -> int:
        """Its process id, on its machine."""
        ...

    @property
    def alive(self) -> bool:
        """True until it has ended."""
        ...

    def end(self, after_s: float = 0.0) -> None:
        """Wait so long for it to end, then kill it and whatever it started."""
        ...

    def ending(self) -> str:
        """How it ended, as the end of a sentence about it."""
        ...

    def log_text(self) -> str:
        """All that it printed, as far as that can be had."""
        ...


class ProcessHost(Protocol):
    """Starts processes. ``folder`` is one that this process and those it starts both see; None: any of this machine.

    ``address`` is this machine's, as those processes reach it. ``own_device``: they have GPUs of their own, which do not
    have the numbers that they have here; ``shared``: but maybe this process's too.
    """

    folder: Path | None
    address: str
    own_device: bool
    shared: bool

    def start(
        self,
        module: str,
        channels: int,
        log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        own_group: bool = False,
    ) -> tuple[HostedProcess, list[Frames]]:
        """Start ``python -m module`` with so many connections to it."""
        ...

    def close(self) -> None:
        """Start nothing more."""
        ...


class ThisMachine:
    """Starts processes beside this one. ``gpus`` are the only ones that they see, as CUDA_VISIBLE_DEVICES; "": the same."""

    folder: Path | None = None
    address = "127.0.0.1"

    def __init__(self, gpus: str = "", *, shared: bool = False) -> None:
        self._gpus, self.own_device, self.shared = gpus, bool(gpus), shared

    def start(
        self,
        module: str,
        channels: int,
        log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        own_group: bool = False,
    ) -> tuple[HostedProcess, list[Frames]]:
        """Start ``python -m module`` with so many sockets."""
        if self._gpus:
            environment = {**(environment or {}), "CUDA_VISIBLE_DEVICES": self._gpus}
        pairs = [socket.socketpair() for _ in range(channels)]
        with ExitStack() as theirs:
            for _, end in pairs:
                theirs.enter_context(end)
            process = PythonProcess(module, [end for _, end in pairs], log, environment, own_group=own_group)
        return process, [SocketFrames(ours) for ours, _ in pairs]

    def close(self) -> None:
        """There is nothing to give back."""


class ProcessLost(Exception):
    """The process ended, or closed its pipes; the message says how."""


class PipedProcess:
    """``command`` with pipes to its standard input and output. With ``silent`` its standard error goes nowhere."""

    def __init__(
        self, command: Sequence[str], surroundings: Mapping[str, str], folder: str | None = None, *, silent: bool = False
    ) -> None:
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if silent else None,
            bufsize=0,
            env=dict(surroundings),
            cwd=folder,
        )

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def write(self, data: bytes) -> None:
        """Send everything; raises ProcessLost where it does not listen any more."""
        assert self._process.stdin is not None
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._process.stdin.write(rest) :]
        except OSError as error:
            raise ProcessLost(self._death()) from error

    def read(self, count: int, until: float) -> bytes:
        """So many bytes; raises TimeoutError when ``until`` (of time.monotonic) is past, ProcessLost where it ended."""
        assert self._process.stdout is not None
        data = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while len(data) < count:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise TimeoutError
                read = os.read(self._process.stdout.fileno(), min(count - len(data), 1 << 20))
                if not read:
                    raise ProcessLost(self._death())
                data += read
        return bytes(data)

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _death(self) -> str:
        """How it ended."""
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "its process closed its pipes"
        return f"its process died by signal {-code}" if code < 0 else f"its process ended with code {code}"

"""Processes that work for this one: started with connections to them, ended for certain, their end explained.

A ``ProcessHost`` starts them: ``ThisMachine`` beside this process, ``ray_host.RayHost`` wherever Ray has room. Who talks to
a process sees a ``HostedProcess`` and ``Frames``, and does not know where it is.

What a process leaves for others of the machine lies in its folder among temporary files, or in shared memory. Each such
folder is locked by its process as long as that lives, however it ends. So the next process recognizes and removes what
a killed one left there: whole models, or a service's media.

A message between the two is a length of eight bytes, then a pickle.
"""

import atexit
import fcntl
import os
import pickle
import re
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from sensorium.vocabulary import errors

LENGTH = struct.Struct("!Q")

Message = dict[str, Any]


class Frames(Protocol):
    """Carries whole messages as bytes, in order."""

    def send(self, body: bytes, limit_s: float | None = None) -> None:
        """Send; OSError if the other end is gone, TimeoutError if it does not accept it in time."""

    def receive(self, limit_s: float | None = None) -> bytes:
        """The next one; EOFError if the other end is gone, TimeoutError if nothing comes in time."""

    def close(self) -> None:
        """Hang up: the other end reads an EOFError."""


class SocketFrames:
    """Frames over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, body: bytes, limit_s: float | None = None) -> None:
        self._connection.settimeout(limit_s)
        self._connection.sendall(LENGTH.pack(len(body)) + body)

    def receive(self, limit_s: float | None = None) -> bytes:
        """The next body."""
        self._connection.settimeout(limit_s)
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        return self._read(length)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def _read(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._connection.recv(min(count - len(parts), 1 << 20))
            if not part:
                raise EOFError("the other end has hung up")
            parts += part
        return bytes(parts)


class Channel:
    """One end of a connection. Not for several threads at once, unless no call has a limit."""

    def __init__(self, connection: socket.socket | Frames) -> None:
        self._frames = SocketFrames(connection) if isinstance(connection, socket.socket) else connection

    def send(self, message: Any, limit_s: float | None = None) -> None:
        """Send one message; OSError if the other end is gone, TimeoutError if it does not accept it in time."""
        self._frames.send(pickle.dumps(message, protocol=5), limit_s)

    def receive(self, limit_s: float | None = None) -> Any:
        """The next message; EOFError if the other end is gone, TimeoutError if nothing comes in time."""
        return pickle.loads(self._frames.receive(limit_s))

    def close(self) -> None:
        """Hang up: the other end reads an EOFError."""
        self._frames.close()


def own_address(toward: str) -> str:
    """This machine's address as seen from ``toward``; nothing is sent, only the interface is chosen."""
    with socket.socket(socket.AF_INET6 if ":" in toward else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((toward, 9))
        return str(probe.getsockname()[0])


def plain_error(error: BaseException) -> dict[str, str]:
    """An error by its class and text."""
    known = isinstance(error, errors.SensoriumError)
    return {"error": str(error) if known else repr(error), "kind": type(error).__name__}


def error_of(plain: Mapping[str, Any], otherwise: type[errors.SensoriumError], who: str) -> errors.SensoriumError:
    """The error that ``plain_error`` described; one of a foreign class becomes an ``otherwise``: ``who`` failed."""
    kind = getattr(errors, plain["kind"], None)
    if isinstance(kind, type) and issubclass(kind, errors.SensoriumError):
        return kind(plain["error"])
    return otherwise(f"{who} failed: {plain['error']}")


LAST_LINES = 6
CLOSE_S = 30.0
MARK = "SENSORIUM_STARTED_"  # begins the name of a variable that a process with its own group, and its descendants, have;
# its value names the process that ends them (``_identity``), so that they are known as orphans when that one was killed
SEGMENT = re.compile(r"/dev/shm/psm_\w+(?=\n)")  # names by multiprocessing.shared_memory; not of removed segments

Variables = Mapping[str, str] | None


class HostedProcess(Protocol):
    """A process that works for this one. ``address`` is that of its machine, as others of the cluster reach it."""

    @property
    def pid(self) -> int: ...

    @property
    def alive(self) -> bool: ...

    @property
    def address(self) -> str: ...

    def end(self, after_s: float = 0.0) -> None:
        """Wait so long for it to end, then kill it and whatever it started."""

    def ending(self) -> str:
        """How it ended, as the end of a sentence about it."""

    def log_text(self) -> str:
        """All that it printed, as far as known."""


class ProcessHost(Protocol):
    """Starts processes. ``folder`` is visible to this process and to those it starts; None: all are on this machine.

    ``address`` is this machine's, as those processes reach it. ``own_device``: they have their own GPUs, numbered
    differently from here; ``shared``: which may include this process's GPUs.
    """

    folder: Path | None
    address: str
    own_device: bool
    shared: bool

    def start(
        self, module: str, channels: int, log: Path, variables: Variables = None, *, own_group: bool = False
    ) -> tuple[HostedProcess, list[Frames]]:
        """Start ``python -m module`` with so many connections to it."""

    def close(self) -> None:
        """Start nothing more."""


class PythonProcess:
    """``python -m module FD …``, with ``frames`` to talk to it. It prints to ``log``, whose last lines explain its death.

    With ``own_group`` it leads a process group, and with it ends whatever it started: its group, and processes that left
    the group (browsers do) but inherited the mark in its environment. A PYTHONPATH in ``variables`` precedes this
    process's own path.
    """

    address = "127.0.0.1"

    def __init__(
        self, module: str, channels: int, log: Path, variables: Variables = None, *, own_group: bool = False
    ) -> None:
        self._log, self._own_group = log, own_group
        given = dict(variables or {})
        self._mark, value = new_mark() if own_group else ("", "")
        if own_group:
            given[self._mark] = value
        given["PYTHONPATH"] = os.pathsep.join(filter(None, [given.get("PYTHONPATH", ""), *sys.path]))
        pairs = [socket.socketpair() for _ in range(channels)]
        fds = [theirs.fileno() for _, theirs in pairs]
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, *map(str, fds)],
                    pass_fds=fds,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **given},
                    start_new_session=own_group,
                )
        finally:
            for _, theirs in pairs:
                theirs.close()
        self.frames: list[Frames] = [SocketFrames(ours) for ours, _ in pairs]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self, after_s: float = 0.0) -> None:
        """Wait so long for it to end, then kill it; then the others of its group, and wait until they are gone."""
        try:
            self._process.wait(after_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if not self._own_group:
            return
        remove_segments(mapped_segments(self.pid))
        end_group(self.pid, self._mark)

    def ending(self) -> str:
        """How it ended, as the end of a sentence about it."""
        self.end(CLOSE_S)
        code = self._process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return how + (" (SIGKILL often means that memory ran out)" if code == -signal.SIGKILL else "")

    def log_text(self) -> str:
        return self._log.read_text(errors="replace")


class ThisMachine:
    """Starts processes beside this one. ``gpus`` are the only ones that they see, as CUDA_VISIBLE_DEVICES; "": the same."""

    folder: Path | None = None
    address = "127.0.0.1"

    def __init__(self, gpus: str = "", *, shared: bool = False) -> None:
        self._gpus, self.own_device, self.shared = gpus, bool(gpus), shared

    def start(
        self, module: str, channels: int, log: Path, variables: Variables = None, *, own_group: bool = False
    ) -> tuple[HostedProcess, list[Frames]]:
        """Start ``python -m module`` with so many sockets."""
        if self._gpus:
            variables = {**(variables or {}), "CUDA_VISIBLE_DEVICES": self._gpus}
        process = PythonProcess(module, channels, log, variables, own_group=own_group)
        return process, process.frames

    def close(self) -> None:
        """Nothing to release."""


def parent_sockets() -> list[socket.socket]:
    """In a process that a host started: its connections. Ctrl-C, which reaches all processes, is left to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return [socket.socket(fileno=int(number)) for number in sys.argv[1:]]


def last_words(log: str) -> str:
    """A sentence with the last lines of a log; empty if there are none."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return f" Its last output: {' / '.join(lines[-LAST_LINES:])}" if lines else ""


def end_descendants() -> None:
    """In a process with its own group: kill what it has started and is still there."""
    for mark in [name for name in os.environ if name.startswith(MARK)]:
        _kill([process for process in _living(os.getpid(), mark) if int(process.name) != os.getpid()])


def guard_group() -> None:
    """In the leader of a group, before it has threads: make the group end with it, however it is killed.

    A small process watches the leader. It also removes the group's shared memory, which has names and would outlive it.
    Ray, for one, kills what its actors have started, but not their descendants.
    """
    watched, _held = os.pipe()
    if os.fork():
        os.close(watched)
        return  # the other end stays open as long as this process lives, and nobody inherits it
    os.closerange(0, watched)
    os.closerange(watched + 1, min(os.sysconf("SC_OPEN_MAX"), 65536))
    os.read(watched, 1)
    remove_segments(mapped_segments(os.getpgrp()))  # before the kill, which ends this process too
    os.killpg(os.getpgrp(), signal.SIGKILL)


ENDS_WITH = "SENSORIUM_ENDS_WITH"  # the descriptor of a pipe, of which the process that started this one has the other end
ENDING_S = 120.0


def end_with_parent() -> None:
    """End in order, as by SIGTERM, when the process that started this one is gone, however it was killed."""
    given = os.environ.pop(ENDS_WITH, "")
    if not given:
        return

    def wait() -> None:
        os.read(int(given), 1)  # returns when the other end is closed; nothing is ever written
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ENDING_S)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()


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


def remove_segments(segments: set[Path]) -> None:
    """Remove their names; the memory goes with the last process that has them mapped."""
    for segment in segments:
        with suppress(OSError):
            segment.unlink(missing_ok=True)


def new_mark() -> tuple[str, str]:
    """A variable, and its value, for the environment of a process whose descendants are to be found by it."""
    return f"{MARK}{uuid4().hex}", _identity(os.getpid())


def end_orphans() -> list[str]:
    """Kill what processes that were killed themselves have left on this machine; returns a line for each.

    Only processes with a mark are considered, and only if who set it is known to be gone: a pid that another process has
    by now began at another time, and pids of another container are not comparable.
    """
    found: dict[str, list[Path]] = {}
    here = _identity(os.getpid()).partition(":")[0]
    for process in Path("/proc").glob("[0-9]*"):
        for name, value in _marks(process):
            space, _, owner = value.partition(":")
            if here and space == here and _identity(int(owner.partition(".")[0])) != value:
                found.setdefault(name, []).append(process)
    lines = []
    for mark in found:
        for process in (left := list(_living(-1, mark))):
            with suppress(OSError):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                lines.append(f"{process.name} ({command[:80]})")
        _kill(left)
    return lines


def _marks(process: Path) -> list[tuple[str, str]]:
    """The marks in a process's environment, with their values; of processes of other users none are known."""
    try:
        listed = (process / "environ").read_bytes()
    except OSError:
        return []
    pairs = (
        entry.decode(errors="replace").partition("=") for entry in listed.split(b"\0") if entry.startswith(MARK.encode())
    )
    return [(name, value) for name, _, value in pairs if re.fullmatch(r"[^:]+:\d+\.\d+", value)]


def _identity(pid: int) -> str:
    """A process for ever: the namespace of pids, ":", its pid, ".", and when it began; empty if there is none."""
    try:
        began = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        return f"{os.readlink('/proc/self/ns/pid')}".replace(":", "") + f":{pid}.{began}"
    except OSError:
        return ""


def end_group(group: int, mark: str) -> None:
    """Kill the processes of a group or mark, and wait until they are gone."""
    until = time.monotonic() + CLOSE_S  # a dying worker holds its memory and its GPU for seconds
    while (left := list(_living(group, mark))) and time.monotonic() < until:
        _kill(left)
        time.sleep(0.05)


def _kill(processes: Sequence[Path]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(int(process.name), signal.SIGKILL)


def _living(group: int, mark: str = "") -> Iterator[Path]:
    """The folders in /proc of a group's processes; with a mark also of those that have it in their environment.

    Descendants of marked ones are among them: a browser's own processes overwrite their environment. Zombies are left out:
    the process that adopted them may never collect them.
    """
    parents: dict[int, int] = {}
    found: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError, ValueError):  # it has ended, or belongs to another user
            state, parent, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if state in "ZX":
                continue
            parents[pid := int(stat.parent.name)] = int(parent)
            if int(its_group) == group or (mark and f"{mark}=".encode() in (stat.parent / "environ").read_bytes()):
                found.add(pid)
    while mark and (further := {pid for pid, parent in parents.items() if parent in found} - found):
        found |= further
    yield from (Path("/proc", str(pid)) for pid in sorted(found))


class ProcessLost(Exception):
    """The process ended, or closed its pipes; the message says how."""


class PipedProcess:
    """``command`` with pipes to its standard input and output. With ``silent`` its standard error is discarded.

    ``end`` kills it. That is done, too, when nobody knows this object any more, and when this process exits. With
    ``own_group`` whatever it started ends with it, and Ctrl-C reaches this process alone.
    """

    def __init__(
        self,
        command: Sequence[str],
        surroundings: Mapping[str, str],
        folder: str | None = None,
        *,
        silent: bool = False,
        own_group: bool = False,
    ) -> None:
        mark, value = new_mark() if own_group else ("", "")
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if silent else None,
            bufsize=0,
            env=dict(surroundings) | ({mark: value} if mark else {}),
            cwd=folder,
            start_new_session=own_group,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.end = weakref.finalize(self, _end, self._process, mark)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Kill it alone, so that whoever reads from it hears that it is lost; ``end`` must follow."""
        self._process.kill()

    def end_in_order(self, seconds: float) -> None:
        """Close its standard input, wait so long for it to end, and then kill it."""
        with suppress(OSError, ValueError):
            self._stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self.end()

    def write(self, data: bytes) -> None:
        """Send everything; raises ProcessLost if it no longer reads."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._stdin.write(rest) :]
        except OSError as error:
            raise ProcessLost(self._death()) from error

    def read(self, count: int, until: float) -> bytes:
        """So many bytes; raises TimeoutError when ``until`` (of time.monotonic) is past, ProcessLost where it ended."""
        data = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            while len(data) < count:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise TimeoutError("its process did not answer in time")
                read = os.read(self._stdout.fileno(), min(count - len(data), 1 << 20))
                if not read:
                    raise ProcessLost(self._death())
                data += read
        return bytes(data)

    def _death(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "its process closed its pipes"
        return f"its process died by signal {-code}" if code < 0 else f"its process ended with code {code}"


def _end(process: "subprocess.Popen[bytes]", mark: str) -> None:
    with process:  # waits for it and closes its pipes
        process.kill()
    if mark:
        end_group(process.pid, mark)


SHARED_MEMORY = Path("/dev/shm")
PREFIX, LOCK = "sensorium-own-", "lock"

# By process and place: the folder, and the lock that stays open. A fork makes its own.
_made: dict[tuple[int, Path], tuple[Path, int]] = {}


def temporary_folder() -> Path:
    """The folder of this process among temporary files; removed when the process ends, or later if it is killed."""
    return _own(Path(tempfile.gettempdir()))


def memory_folder(size: int) -> Path | None:
    """The folder of this process in shared memory; None where there is none, or no room for twice ``size`` bytes."""
    if not (SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)):
        return None
    try:
        folder = _own(SHARED_MEMORY)
        return folder if shutil.disk_usage(SHARED_MEMORY).free > 2 * size else None
    except OSError:  # no room even for a folder
        return None


def _own(place: Path) -> Path:
    key = os.getpid(), place
    if key not in _made:
        _remove_left_behind(place)
        _made[key] = _make(place)
        atexit.register(_remove_own, key)
    return _made[key][0]


def _make(place: Path) -> tuple[Path, int]:
    """A locked folder. It gets its name only once it is locked, or another process might remove it."""
    draft = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=place))
    lock = os.open(draft / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return draft.rename(place / draft.name.removeprefix(".")), lock


def _remove_left_behind(place: Path) -> None:
    """Remove folders of this user whose processes are gone."""
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is in use, another user's, or is being removed by another process
            if folder.lstat().st_uid != os.getuid():
                continue
            lock = os.open(folder / LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(lock)


def _remove_own(key: tuple[int, Path]) -> None:
    if key[0] == os.getpid():
        folder, lock = _made.pop(key)
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)

"""One process writes into a run directory at a time: it holds a lock on ``run.lock`` for as long as it lives.

Example: process 17 trains into ``runs/a``, so ``runs/a/run.lock`` is locked and says ``{"pid": 17, …}``. Process 18 wants
to resume ``runs/a`` and is refused with who holds it. Process 17 is killed: the system lets go of its lock, and
18 may start. The text in the file only tells who; a text without the lock means nothing.

The folder itself is locked too, where the file system can do that: somebody may delete ``run.lock``, and a folder that is
moved while its run goes on takes its lock along. ``refuse_moved`` tells the run of the latter before it writes elsewhere.
"""

import errno
import fcntl
import json
import os
import shlex
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path

from sensorium.runs.durable import write_all, writing
from sensorium.vocabulary.errors import RecordError

NAME = "run.lock"
UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_held: set[int] = set()
_folders: dict[str, int] = {}
"""The folders that this process holds, and the descriptor of each."""


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Hold a run directory for this process alone, making the folder if need be; refused with who holds it."""
    with ExitStack() as opened:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = _open(folder / NAME, os.O_RDWR | os.O_CREAT, opened)
            itself = _open(folder, os.O_RDONLY | os.O_DIRECTORY, opened)
        _take(descriptor, descriptor, folder)
        with suppress(OSError):  # a network's file system may lock files only; then run.lock must do
            _take(itself, descriptor, folder)
        with writing(folder / NAME):
            os.ftruncate(descriptor, 0)
            write_all(descriptor, (json.dumps(_who()) + "\n").encode())
        name = os.path.abspath(folder)
        _folders[name] = itself
        try:
            yield
        finally:
            del _folders[name]
            with suppress(OSError):
                os.ftruncate(descriptor, 0)


def said_holder(folder: Path) -> tuple[int, str] | None:
    """Process id and host of who last said that it holds a run directory; it may have been killed since."""
    try:
        who = json.loads((folder / NAME).read_text())
        return int(who["pid"]), str(who["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def refuse_moved(folder: Path) -> None:
    """Refuse to go on writing where the folder that this process holds no longer is: the run would lie in two places."""
    held = _folders.get(os.path.abspath(folder))
    if held is None:
        return
    try:
        if os.path.samestat(os.stat(folder), os.fstat(held)):
            return
        now = "another folder stands in its place"
    except OSError as error:
        now = error.strerror or str(error)
    raise RecordError(
        f"run directory '{folder}' was moved or removed while its run was going on ({now}), so nothing more is written. "
        "Go on from its last checkpoint where it is now: sensorium train THERE --resume."
    )


def _open(path: Path, flags: int, opened: ExitStack) -> int:
    descriptor = os.open(path, flags, 0o644)
    _held.add(descriptor)
    opened.callback(_close, descriptor)
    return descriptor


def _close(descriptor: int) -> None:
    _held.discard(descriptor)
    os.close(descriptor)


def _take(descriptor: int, text: int, folder: Path) -> None:
    """Lock a descriptor; ``text`` is that of the file that says who holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = _describe(os.pread(text, 4096, 0))
        raise RecordError(
            f"run directory '{folder}' is in use by {holder}. Wait for it or stop it; a run of its own needs another "
            "directory (name=… or run_dir=…)."
        ) from error
    except OSError as error:
        if descriptor != text:
            raise
        if error.errno not in UNSUPPORTED:
            raise RecordError(f"cannot lock '{folder / NAME}': {error.strerror}. Choose another run_dir.") from error
        warnings.warn(
            f"the file system of '{folder}' does not support locks ({error.strerror}): nothing keeps a second process out "
            "of this run directory, so see to it yourself that there is none.",
            stacklevel=4,
        )


def _who() -> dict[str, object]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": shlex.join(sys.argv)[:500],
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _describe(text: bytes) -> str:
    """Who holds a lock, in words."""
    try:
        who = json.loads(text)
        return f"process {who['pid']} on {who['host']} since {who['since']} ({who['command']})"
    except (ValueError, KeyError, TypeError):
        return "another process, which has not said yet who it is"


def _let_go_in_child() -> None:
    """A forked child is not the holder: what it inherited must not keep the lock when its parent has died."""
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)

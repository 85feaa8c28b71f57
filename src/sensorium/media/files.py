"""Opening files that data name: regular files only, inside the folders that the recipe opens.

A pipe or a device would be read for ever, and a path like ``../../.ssh/id_rsa`` is no picture of the data set.
"""

import errno
import os
import stat
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path

KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def open_regular(path: Path) -> BufferedReader:
    """A regular file, open for reading; an OSError says what else it is. Never waits for a writer."""
    _refuse_other(os.stat(path).st_mode)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse_other(os.fstat(descriptor).st_mode)  # it may have been replaced in between
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def file_state(seen: os.stat_result) -> tuple[int, ...]:
    """What changes when a file is replaced or written to; its last number also when only links or rights change.

    That one, the time of the last change, cannot be set: a file of the same size with a copied time is another one.
    """
    return seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns


def busy() -> OSError:
    """The error of a file that keeps changing while it is read."""
    return OSError(errno.EBUSY, "it is being written to")


def roots_of(folder: Path, opened: Sequence[str] = ()) -> tuple[Path, ...]:
    """The folders that media may lie in: the data's own and those the recipe opens, with links resolved.

    A folder of the Hugging Face cache holds links to the blobs beside it, so these belong to it.
    """
    own = folder.expanduser().resolve()
    blobs = [parent.parent / "blobs" for parent in (own, *own.parents) if parent.name == "snapshots"]
    return (own, *blobs[:1], *(Path(path).expanduser().resolve() for path in opened))


def inside(path: Path, roots: Sequence[Path]) -> bool:
    """True if a path, with all links resolved, lies in one of the folders."""
    real = path.resolve()
    return any(real.is_relative_to(root) for root in roots)


def _refuse_other(mode: int) -> None:
    if not stat.S_ISREG(mode):
        what = next((words for is_one, words in KINDS if is_one(mode)), "something else")
        raise OSError(errno.EINVAL, f"it is {what}, not a regular file")

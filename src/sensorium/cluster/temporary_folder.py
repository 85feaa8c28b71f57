"""This process's folder among temporary files, or in shared memory, for other processes of the machine.

Each such folder is locked by its process as long as that lives, however it ends. So the next process recognizes and removes
what a killed one left there: whole models, or a service's media.
"""

import atexit
import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

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

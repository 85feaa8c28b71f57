"""A folder of this process in the machine's shared memory, for files that other processes of the machine read.

Each such folder is locked by its process as long as that lives, however it ends. So what a killed run left there, whole
models at times, is known for that and removed by the next one: nobody else would, and it takes the machine's memory.
"""

import atexit
import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PREFIX, LOCK = "sensorium-memory-", "lock"

_made: dict[tuple[int, Path], tuple[Path, int]] = {}
"""By process and shared memory: the folder, and the lock that stays open. A fork makes its own."""


def memory_folder(size: int) -> Path | None:
    """The folder of this process in shared memory; None where there is none, or no room for twice ``size`` bytes."""
    if not (SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)):
        return None
    key = os.getpid(), SHARED_MEMORY
    try:
        if key not in _made:
            _remove_left_behind(SHARED_MEMORY)
            _made[key] = _make(SHARED_MEMORY)
            atexit.register(_remove_own, key)
        roomy = shutil.disk_usage(SHARED_MEMORY).free > 2 * size
    except OSError:  # not even a folder has room
        return None
    return _made[key][0] if roomy else None


def _make(place: Path) -> tuple[Path, int]:
    """A locked folder: it has its name only once it is locked, or another process might take it for one left behind."""
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

"""A folder of this process: among temporary files, or in the machine's shared memory, for other processes of the machine.

Each such folder is locked by its process as long as that lives, however it ends. So what a killed process left there, whole
models or a service's media, is known for that and removed by the next one: nobody else would, and it takes room.
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

_made: dict[tuple[int, Path], tuple[Path, int]] = {}
"""By process and place: the folder, and the lock that stays open. A fork makes its own."""


def temporary_folder() -> Path:
    """The folder of this process among temporary files; it goes when the process ends, or after it if that is killed."""
    return _own(Path(tempfile.gettempdir()))


def memory_folder(size: int) -> Path | None:
    """The folder of this process in shared memory; None where there is none, or no room for twice ``size`` bytes."""
    if not (SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)):
        return None
    try:
        folder = _own(SHARED_MEMORY)
        roomy = shutil.disk_usage(SHARED_MEMORY).free > 2 * size
    except OSError:  # not even a folder has room
        return None
    return folder if roomy else None


def _own(place: Path) -> Path:
    key = os.getpid(), place
    if key not in _made:
        _remove_left_behind(place)
        _made[key] = _make(place)
        atexit.register(_remove_own, key)
    return _made[key][0]


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

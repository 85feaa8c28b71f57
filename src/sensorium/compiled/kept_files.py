"""Compiled code in the user's cache.

Behind the code in its file stands the SHA-256 of its bytes, so that a file that was cut off or changed is not taken; its
name is a hash of all that it was made from. Processes that compile at the same time write to files of their own; the last
one to be renamed stays, and they are alike.
"""

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path

DIGEST_BYTES = hashlib.sha256().digest_size


def cache_folder() -> Path:
    """Where this user's compiled code is kept. Links are resolved: one that is switched later leads nowhere else."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return ((Path(given) if os.path.isabs(given) else Path("~/.cache").expanduser()) / "sensorium").resolve()
    except RuntimeError:  # a user without a home folder, as in some containers
        return Path(os.devnull) / "sensorium"  # where nothing is kept


def read_kept(file: Path) -> bytes | None:
    """The code in a file, if it is whole and nobody but this user or root could have written it: what it holds is run.

    The folder and the file that are checked are those that are read, even where a link on the way is switched meanwhile.
    """
    try:
        folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            descriptor = os.open(file.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            with os.fdopen(descriptor, "rb") as opened:
                trusted = _only_ours(os.fstat(folder)) and _only_ours(os.fstat(descriptor))
                content = opened.read() if trusted else b""
        finally:
            os.close(folder)
    except OSError:
        return None
    code, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def keep(code: bytes, file: Path) -> None:
    """A copy for later processes, where the cache folder is this user's; they compile it themselves otherwise."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        if not _only_ours(file.parent.stat()):
            return
        with tempfile.TemporaryDirectory(dir=file.parent) as own:
            whole = Path(own) / file.name
            whole.write_bytes(code + hashlib.sha256(code).digest())
            os.replace(whole, file)


def _only_ours(seen: os.stat_result) -> bool:
    return seen.st_uid in (0, os.geteuid()) and not seen.st_mode & 0o002

"""Durable writes of whole files and rows: a kill loses at most an open row, and a full disk is an error at once.

A row of a ``.jsonl`` file is appended whole or not at all; a torn last row (no newline) is no row. Whole files are written
beside their place and renamed. A failed write or read is a ``RecordError`` that names the file and the way out.
"""

import errno
import json
import os
import shutil
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from sensorium.vocabulary.errors import RecordError, WriteFailed

TIGHT = 64 * 1024  # free bytes on a disk below which no run starts
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PLACE = " (of a run: run_dir)"
WAYS_OUT = {
    errno.ENOSPC: "The disk is full: make room.",
    errno.EDQUOT: "Your quota on this disk is used up: make room.",
    errno.EFBIG: "Files may not grow this large here (ulimit -f): raise the limit.",
    errno.EIO: "The disk may be full, failing, or bounded (ulimit -f): mend that.",
    errno.EMFILE: "This process has too many files open (ulimit -n): raise the limit.",
    errno.EROFS: f"The file system is read-only: choose another place{PLACE}.",
    errno.EACCES: f"Permission is missing: choose another place{PLACE}, or have it made writable.",
    errno.EPERM: f"Permission is missing: choose another place{PLACE}, or have it made writable.",
    errno.EEXIST: f"A file is in the way: remove it, or choose another place{PLACE}.",
    errno.ENOTDIR: f"A file is where a folder should be: remove it, or choose another place{PLACE}.",
    errno.EISDIR: f"A folder is where a file should be: remove it, or choose another place{PLACE}.",
    errno.ENOENT: f"No folder can be made there: choose another place{PLACE}.",
    errno.ENAMETOOLONG: f"The name is too long for this file system: choose another place{PLACE}.",
    errno.ELOOP: f"Its links lead in a circle: choose another place{PLACE}.",
}


def to_line(row: Any) -> str:
    """A row as one compact JSON line; key order is the row's own.

    Rows are long lists of numbers, which pydantic writes four times as fast as the standard library.
    """
    try:
        return to_json(row, inf_nan_mode="constants", fallback=_plain).decode() + "\n"
    except PydanticSerializationError:  # bytes that are no text, half a surrogate pair: converted by ``_plain``
        return json.dumps(row, separators=(",", ":"), ensure_ascii=False, default=_plain) + "\n"


def append_row(path: Path, row: Any) -> None:
    """Append one row, whole or not at all, after removing a torn row left by a kill."""
    data = to_line(row).encode()
    with writing(path):
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            end = os.fstat(descriptor).st_size
            if end and os.pread(descriptor, 1, end - 1) != b"\n":
                end = _whole_rows(os.pread(descriptor, end, 0))
                os.ftruncate(descriptor, end)
            try:
                write_all(descriptor, data)
            except OSError:
                with suppress(OSError):  # if this fails too, the next append removes the torn row
                    os.ftruncate(descriptor, end)
                raise
        finally:
            os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """Write every byte; the system may take only a part at a time."""
    left = memoryview(data)
    while left:
        written = os.write(descriptor, left)
        if written == 0:
            raise OSError(errno.EIO, "nothing more was written")
        left = left[written:]


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, without a torn last one; a broken row before it is an error that names its line."""
    if not path.exists():
        return
    with _reading(path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            yield _row(path, number, line)


def rewrite_rows(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Keep only some rows of a file, atomically and byte for byte; an untouched file stays as it is."""
    if not path.exists():
        return
    with _reading(path):
        data = path.read_bytes()
    lines = data[: _whole_rows(data)].splitlines(keepends=True)
    kept = b"".join(line for number, line in enumerate(lines, start=1) if keep(_row(path, number, line)))
    if kept != data:
        write_whole(path, kept)


def write_rows(path: Path, rows: Iterable[Any]) -> None:
    """Write a whole file of rows, complete or absent."""
    write_whole(path, "".join(to_line(row) for row in rows))


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file beside its place, flush it and rename it in: complete or absent, never half."""
    data = content.encode() if isinstance(content, str) else content
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with drafted(path) as draft:
            draft.write_bytes(data)


@contextmanager
def drafted(path: Path, *, flushed: bool = True, shared: bool = False) -> Iterator[Path]:
    """A hidden draft beside ``path`` for a file or a folder; it is renamed to the path if the block ends without error.

    ``flushed``: it is on the disk before it is renamed. ``shared``: others may write the same path at the same time, so the
    draft's name is this thread's own, and the last to end wins.
    """
    mark = f"{os.getpid()}.{threading.get_ident()}" if shared else "draft"
    draft = path.with_name(f".{path.name}.{mark}")
    _remove(draft)
    try:
        yield draft
        if flushed:
            for part in [*sorted(draft.rglob("*")), draft] if draft.is_dir() else [draft]:
                flush(part)
        if draft.is_dir() and path.is_dir():
            shutil.rmtree(path)
        os.replace(draft, path)
    finally:
        _remove(draft)


def read_json(path: Path, way_out: str) -> dict[str, Any]:
    """The object in a JSON file; a damaged one is an error that names the file and ``way_out``."""
    try:
        _refuse_pipe(path)
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise RecordError(f"cannot read '{path}': {error.strerror}. {way_out}") from error
    except (ValueError, RecursionError) as error:
        raise RecordError(f"'{path}' is damaged: it is not JSON ({error}). {way_out}") from error
    if not isinstance(data, dict):
        raise RecordError(f"'{path}' is damaged: it holds no JSON object. {way_out}")
    return data


def flush(path: Path) -> None:
    """Flush a file's content, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        _refuse_pipe(path)
        yield
    except OSError as error:
        raise RecordError(f"cannot read '{path}': {error.strerror}. Remove it, or put back a copy.") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError inside into a ``RecordError`` that names the file and the way out."""
    try:
        yield
    except OSError as error:
        raise cannot_write(error.filename or path, error) from error


def refuse_full(folder: Path) -> None:
    """Refuse a folder whose disk has less than ``TIGHT`` bytes left."""
    probe = folder / ".room.draft"
    with writing(folder):
        _remove(probe)  # a link or a pipe of that name must not be written through
        try:
            probe.write_bytes(os.urandom(TIGHT))  # zeros take no space on some file systems
            flush(probe)
        finally:
            _remove(probe)


def cannot_write(path: object, error: OSError) -> WriteFailed:
    """The error for a failed write, with the way out."""
    reason = error.strerror or str(error)
    way_out = WAYS_OUT.get(error.errno or 0, "Mend that, then run the command again.")
    return WriteFailed(f"cannot write '{path}': {reason}. {way_out} What was complete before is as it was.")


def full_disk_error(
    error: BaseException, place: Path | None = None, looked_at: frozenset[int] = frozenset()
) -> OSError | None:
    """The system's error for a full disk, if an error, its cause or a part of it is one.

    SQLite reports an I/O error where its first pages find no space; then the disk of ``place`` is asked. ``looked_at`` are
    errors that led here, since an error may be raised from its own group.
    """
    if isinstance(error, OSError) and error.errno in FULL:
        return error
    if isinstance(error, sqlite3.OperationalError) and "disk is full" in str(error):
        return OSError(errno.ENOSPC, str(error))
    folder = place.parent if isinstance(error, sqlite3.OperationalError) and place is not None else None
    if folder is not None and folder.is_dir() and shutil.disk_usage(folder).free < TIGHT:
        return OSError(errno.ENOSPC, str(error))
    inner = [*error.exceptions] if isinstance(error, BaseExceptionGroup) else []
    if error.__cause__ is not None:
        inner.append(error.__cause__)
    seen = looked_at | {id(error)}
    further = [full_disk_error(one, None, seen) for one in inner if id(one) not in seen]
    return next((found for found in further if found is not None), None)


@contextmanager
def database_errors(path: Path, what: str, way_out: str) -> Iterator[None]:
    """Explain an error of an SQLite file in one paragraph: a full disk, or that it cannot be used, with the way out."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        if full := full_disk_error(error, path):
            raise cannot_write(path, full) from error
        raise RecordError(f"{what} '{path}' cannot be used: {error}. {way_out}") from error


def _remove(draft: Path) -> None:
    if draft.is_dir() and not draft.is_symlink():
        shutil.rmtree(draft, ignore_errors=True)
    else:
        with suppress(OSError):
            draft.unlink()


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    problem = "no JSON object"
    try:
        row = json.loads(line)
        if isinstance(row, dict):
            return row
    except (ValueError, RecursionError) as error:
        problem = f"not a JSON row ({error})"
    raise RecordError(f"{path}, line {number}: {problem}; mend or remove that line.")


def _refuse_pipe(path: Path) -> None:
    """Refuse a pipe or a device, which would block for ever."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "a pipe or a device is where a file should be")


def _plain(value: Any) -> Any:
    """A JSON value from an object of a user's code: numbers and arrays of numpy or torch, else its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _whole_rows(data: bytes) -> int:
    return data.rfind(b"\n") + 1

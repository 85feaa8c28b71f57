"""Durable writes: whole files and rows, written so that a kill costs at most an open row.

A row of a ``.jsonl`` file is appended in one write; a torn last row (no newline) is no row. Whole files are written beside
and renamed into place.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from sensorium.vocabulary.errors import SensoriumError


def to_line(row: Any) -> str:
    """A row as one compact JSON line; key order is the row's own."""
    return json.dumps(row, separators=(",", ":"), ensure_ascii=False, default=_plain) + "\n"


def append_row(path: Path, row: Any) -> None:
    """Append one row in one write, after taking away a torn row left by a kill."""
    data = to_line(row).encode()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        end = os.fstat(descriptor).st_size
        if end and os.pread(descriptor, 1, end - 1) != b"\n":
            os.ftruncate(descriptor, _whole_rows(os.pread(descriptor, end, 0)))
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, without a torn last one; a broken row before it is an error that names its line."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                raise SensoriumError(
                    f"{path}, line {number}: not a JSON row ({error}); mend or remove that line."
                ) from error


def rewrite_rows(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Keep only some rows of a file, atomically and byte for byte; an untouched file stays as it is."""
    if not path.exists():
        return
    data = path.read_bytes()
    lines = data[: _whole_rows(data)].splitlines(keepends=True)
    kept = b"".join(line for line in lines if keep(json.loads(line)))
    if kept != data:
        write_whole(path, kept)


def write_rows(path: Path, rows: Iterable[Any]) -> None:
    """Write a whole file of rows, complete or absent."""
    write_whole(path, "".join(to_line(row) for row in rows))


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file beside its place, flush it and rename it in: complete or absent, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def _plain(value: Any) -> Any:
    """A JSON value from what a user's code put into a row: numbers and arrays of numpy or torch, else its words."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _whole_rows(data: bytes) -> int:
    """How many bytes of a file are whole rows."""
    return data.rfind(b"\n") + 1

"""Tasks passed in Python: a list of rows or of Task objects, or a Hugging Face data set."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from PIL import Image

from sensorium.media.picture import encode_png
from sensorium.media.store import MediaStore
from sensorium.tasks.message_parsing import Place
from sensorium.tasks.row_options import RowOptions, RowReading
from sensorium.tasks.rows import stored_row
from sensorium.vocabulary.errors import RecipeError, TaskError
from sensorium.vocabulary.task import Task


class PassedRows:
    """One task a row, with the fields and options of all rows (``RowOptions``); pictures may be PIL images as well.

    Paths start from the current folder and may lead anywhere: the rows are the user's own program's. ``digest`` is that of
    the rows a run began with: others are refused.
    """

    def __init__(self, rows: Sequence[Any], store: MediaStore, digest: str = "", **options: Unpack[RowOptions]) -> None:
        if digest and digest != digest_of(rows):
            raise RecipeError(
                f"the {len(rows)} rows passed are not those the run began with, so going on would not repeat it. Pass the "
                "same rows, or start a new run."
            )
        self.store = store
        self._reading = RowReading(options, "rows")
        self._stored = hasattr(rows, "with_format")  # a data set
        self._rows: Any = rows.with_format("arrow") if self._stored else rows  # type: ignore[attr-defined]
        self._length = self._reading.length(len(rows))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < self._length:
            raise IndexError(index)
        place = Place(f"row {index}", Path(), self.store, self._reading.clips)
        row = stored_row(self._rows, index, place) if self._stored else self._rows[index]
        if isinstance(row, Task):
            return row
        if not isinstance(row, Mapping):
            raise TaskError(f"row {index} of the list of tasks is {type(row).__name__}; give a dict or a Task.")
        return self._reading.format.task(with_bytes(row), f"row/{index}", place)


def digest_of(rows: Sequence[Any]) -> str:
    """What tells rows from others: a data set's own fingerprint, or a hash of everything in them."""
    fingerprint = getattr(rows, "_fingerprint", None)
    if isinstance(fingerprint, str):
        return fingerprint
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        digest.update(repr(row).encode() if isinstance(row, Task) else json.dumps(_hashable(row), default=repr).encode())
    return digest.hexdigest()


def with_bytes(value: Any) -> Any:
    """The same data with every PIL image as the bytes of a PNG."""
    if isinstance(value, Image.Image):
        return encode_png(value)
    if isinstance(value, Mapping):
        return {key: with_bytes(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_bytes(item) for item in value]
    return value


def _hashable(value: Any) -> Any:
    value = with_bytes(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return hashlib.blake2b(bytes(value), digest_size=16).hexdigest()
    if isinstance(value, Mapping):
        return {str(key): _hashable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_hashable(item) for item in value]
    return value

"""Rows of tasks: JSONL and Parquet files, Hugging Face data sets, and lists passed in Python. Every error names its row.

These sources are named in ``recipe/registry.py``.
"""

import hashlib
import json
import os
import threading
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from io import BufferedReader
from itertools import accumulate
from pathlib import Path
from typing import Any, Unpack

from PIL import Image

from sensorium.data.lru import LRU
from sensorium.data.media_files import MIB, file_state, held_kind, open_regular, roots_of
from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.data.row_format import MEDIA, ClipOptions, FileRowOptions, Place, RowOptions, layout_of
from sensorium.data.task_content import UNREAD
from sensorium.vocabulary.content import MediaKind
from sensorium.vocabulary.errors import DataChanged, MediaError, RecipeError, TaskError, nearest, similar_file
from sensorium.vocabulary.plain import strict_json, words
from sensorium.vocabulary.task import Task

ROWS_AT_ONCE = 256
FIRST_ROWS = 8  # that are searched for media in columns that are not read
WHOLE_DIGEST = 256 * MIB
DIGEST_TAIL = 16 * MIB
READINGS = 3  # how often a read is repeated while the file is touched during it


class _Rows:
    """The common part of all sources of rows: options, limit, and the task of a row.

    A subclass sets ``_length``, ``_stored`` (bytes of all rows) and the folder and roots of media, and has ``_read`` (a
    row's fields) and ``_names``.
    """

    _length = _stored = 0
    _folder = Path()
    unsearched: Mapping[str, str] = {}
    """Columns that ``unread_media`` could not search, and why."""
    _roots: tuple[Path, ...] | None = None

    def __init__(self, where: str, store: MediaStore, options: RowOptions) -> None:
        self.store = store
        self._clips = ClipOptions(options.get("video"), options.get("sound"), where)
        layout: dict[str, Any] = dict(options)
        for name in ("video", "sound", "limit", "media_roots"):
            layout.pop(name, None)
        self._format = layout_of(**layout)
        self._limit = options.get("limit", 0)
        for folder in options.get("media_roots", ()):  # type: ignore[attr-defined]
            if not Path(str(folder)).expanduser().is_dir():
                raise TaskError(f"{where}: media_roots names '{folder}', and there is no such folder.")

    def __len__(self) -> int:
        return min(self._limit, self._length) if self._limit else self._length

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._format.task(self._read(index), self._names(index)[1], self._place(index))

    def without_media(self, index: int) -> Task:
        """The task of a row, with references to media that were not read."""
        place = replace(self._place(index), store=UNREAD, roots=None)  # nothing is opened, so it may lie anywhere
        return self._format.task(self._read(index), self._names(index)[1], place)

    @property
    def row_bytes(self) -> float:
        """The mean size of a row as it is stored; 0 if that is not known."""
        return self._stored / max(1, self._length)

    @property
    def media_columns(self) -> list[str]:
        """The columns of media that the options name."""
        return [column for part, column in getattr(self._format, "columns", {}).items() if part in MEDIA]

    def id_of(self, index: int) -> str:
        """The id of a row's task, also of one that cannot be read; no media are."""
        name = self._names(index)[1]
        try:
            return self._format.id_in(self._read(index), name, self._place(index))
        except (TaskError, MediaError):
            return name

    def _names(self, index: int) -> tuple[str, str]:
        """The name of a row in errors, and the id of its task where it has none of its own."""
        raise NotImplementedError

    def _read(self, index: int) -> Mapping[str, Any]:
        raise NotImplementedError

    def unread_media(self) -> dict[str, MediaKind]:
        """Columns in which the first rows have media that no part of a task reads, with their kinds."""
        found: dict[str, MediaKind] = {}
        for row in self._first_rows():
            for column, value in self._format.unread(row):
                if column not in found and (kind := held_kind(value, column, self._folder)):
                    found[column] = kind
        return found

    def _first_rows(self) -> Iterator[Mapping[str, Any]]:
        """The first rows with all of their columns, as far as they can be read."""
        for index in range(min(FIRST_ROWS, len(self))):
            with suppress(TaskError, MediaError):
                yield self._read(index)

    def _place(self, index: int) -> Place:
        return Place(self._names(index)[0], self._folder, self.store, self._clips, self._roots)


class JsonlRows(_Rows):
    """One task a line; blank lines are skipped. Media paths are relative to the file's folder.

    Media lie in the file's folder, or in one of ``media_roots``. Further options: ``FileRowOptions``.
    """

    def __init__(self, path: str, store: MediaStore, **options: Unpack[FileRowOptions]) -> None:
        super().__init__(path, store, options)
        self.path = Path(path)
        self._folder, self._roots = self.path.parent, roots_of(self.path.parent, options.get("media_roots", ()))
        self._starts, self._lines = array("q"), array("q")
        try:
            self._scan()
        except OSError as error:
            similar = similar_file(self.path)
            end = "" if similar.endswith("?") else "."
            raise TaskError(f"{path}: cannot read the file: {error.strerror}{similar}{end}") from error
        self._length, self._stored = len(self._starts), self._scanned[0]
        if not self._length:
            raise TaskError(f"{path}: the file has no rows; a JSONL file has one JSON object a line.")

    @property
    def row_digests(self) -> dict[str, str]:
        """The digest of the rows that are used, by file."""
        return {str(self.path): self._scanned[1]}

    def _names(self, index: int) -> tuple[str, str]:
        line = self._lines[index]
        return f"{self.path}:{line}", f"{self.path.name}:{line}"

    def _read(self, index: int) -> dict[str, Any]:
        place = self._place(index)
        try:
            with open_regular(self.path) as file:
                for _ in range(READINGS):
                    self._refuse_changed(file)
                    file.seek(self._starts[index])
                    line = file.readline()
                    if _state(file) == self._state:
                        break
                else:
                    raise DataChanged(_changed(self.path))
            row = strict_json(line.decode("utf-8-sig").rstrip("\r\n"))
        except json.JSONDecodeError as error:
            raise place.error(f"malformed JSON: {error.msg} at column {error.colno}. Fix or delete the line.") from error
        except FileNotFoundError as error:
            raise DataChanged(_changed(self.path)) from error
        except (ValueError, RecursionError, OSError) as error:
            raise place.error(f"cannot read the line: {error}.") from error
        if not isinstance(row, dict):
            raise place.error(f"a line must hold one JSON object, not {row!r:.60}.")
        return row

    def _scan(self) -> None:
        """Record where each row starts, so that it can be read alone, and a digest of all that was scanned."""
        end, digest = 0, hashlib.blake2b(digest_size=16)
        with open_regular(self.path) as file:
            self._state = _state(file)
            for number, line in enumerate(file, 1):
                digest.update(line)
                if line.strip():
                    self._starts.append(end)
                    self._lines.append(number)
                end += len(line)
                if self._limit and len(self._starts) == self._limit:
                    break
        self._scanned = (end, digest.hexdigest())

    def _refuse_changed(self, file: BufferedReader) -> None:
        """Refuse a file whose scanned content has changed: rows would begin elsewhere. A touch is no change."""
        if (state := _state(file)) == self._state:
            return
        file.seek(0)
        digest, left = hashlib.blake2b(digest_size=16), self._scanned[0]
        while left and (read := file.read(min(left, MIB))):
            digest.update(read)
            left -= len(read)
        if left or digest.hexdigest() != self._scanned[1]:
            raise DataChanged(_changed(self.path))
        self._state = state


class ParquetRows(_Rows):
    """One task a row. Row groups are read when needed and the latest kept, within ``cache_mib``.

    A row group that takes more than ``row_group_mib`` in memory is refused. Further options: ``FileRowOptions``.
    """

    def __init__(
        self,
        path: str,
        store: MediaStore,
        cache_mib: int = 512,
        row_group_mib: int = 4096,
        **options: Unpack[FileRowOptions],
    ) -> None:
        import pyarrow
        from pyarrow.parquet import ParquetFile

        super().__init__(path, store, options)
        self.path = Path(path)
        self._folder, self._roots = self.path.parent, roots_of(self.path.parent, options.get("media_roots", ()))
        try:
            with open_regular(self.path) as opened:
                self._state = _state(opened)
            self.row_digests = {str(self.path): content_digest(self.path)}
            self._file = ParquetFile(self.path)
        except (OSError, pyarrow.ArrowException) as error:
            raise TaskError(f"{path}: cannot read the Parquet file: {error}") from error
        names = self._file.schema_arrow.names
        if repeated := [name for name in names if names.count(name) > 1]:
            raise TaskError(f"{path}: the column '{repeated[0]}' occurs twice, and one would be lost. Rename or drop one.")
        self._fields = self._format.fields(names, path)
        metadata = self._file.metadata
        self._ends = list(accumulate(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)))
        self._length, self._stored = metadata.num_rows, self.path.stat().st_size
        if not self._length:
            raise TaskError(f"{path}: the file has no rows.")
        self._cache: LRU[int, Any] = LRU(cache_mib * MIB, lambda table: table.nbytes, at_least=1)
        self._group_bound = row_group_mib * MIB
        self._lock = threading.Lock()

    def _names(self, index: int) -> tuple[str, str]:
        return f"{self.path}, row {index}", f"{self.path.name}:{index}"

    def _read(self, index: int) -> dict[str, Any]:
        place, group = self._place(index), bisect_right(self._ends, index)
        with self._lock:
            table = self._cache.get(group)
            if table is None:
                table = self._group(group, place)
                self._cache.put(group, table)
        return stored_row(table, index - (self._ends[group - 1] if group else 0), place)

    def _first_rows(self) -> Iterator[Mapping[str, Any]]:
        from pyarrow.parquet import ParquetFile

        stored = self._file.metadata.row_group(0)
        columns = map(stored.column, range(stored.num_columns))
        texts = [column.path_in_schema for column in columns if column.physical_type == "BYTE_ARRAY"]
        # As dictionaries: a value that is repeated in many places is in memory once. Of one group: arrow joins no nested
        # dictionaries of several.
        self.unsearched = {}
        with ParquetFile(self.path, read_dictionary=texts) as file:
            for name in file.schema_arrow.names:
                try:
                    (column,) = next(file.iter_batches(FIRST_ROWS, row_groups=[0], columns=[name])).columns
                    yield from ({name: value} for value in first_values(column))
                except (OSError, ValueError, NotImplementedError) as error:  # of a column that no row may need
                    self.unsearched = {**self.unsearched, name: words(error)}

    def _group(self, group: int, place: Place) -> Any:
        """A row group, read from a file that did not change meanwhile."""
        import pyarrow

        for _ in range(READINGS):
            self._refuse_changed()
            failure = None
            try:
                table = self._read_group(group, place)
            except (OSError, pyarrow.ArrowException) as error:
                failure = error
            if not self._refuse_changed():
                break
        else:
            raise DataChanged(_changed(self.path))
        if failure is not None:
            raise place.error(f"cannot read row group {group}: {failure}") from failure
        return table

    def _refuse_changed(self) -> bool:
        """Refuse a file whose content has changed since the start. True if it was touched since the last check."""
        try:
            with open_regular(self.path) as file:
                state = _state(file)
            if state == self._state:
                return False
            if content_digest(self.path) != self.row_digests[str(self.path)]:
                raise DataChanged(_changed(self.path))
        except OSError as error:
            raise DataChanged(_changed(self.path)) from error
        self._state = state
        return True

    def _read_group(self, group: int, place: Place) -> Any:
        """A row group, in parts: one that is small on disk may be huge in memory, and is refused before it is.

        A value may be as large as its whole column, and a dictionary repeats it in every row: the larger the column, the
        fewer rows are read at once.
        """
        import pyarrow

        stored = self._file.metadata.row_group(group)
        largest = max(stored.column(i).total_uncompressed_size for i in range(stored.num_columns))
        rows = min(ROWS_AT_ONCE, max(1, self._group_bound // max(1, largest)))
        parts, size = [], self._repeated_size(group)
        if size <= self._group_bound:
            size = 0
            for part in self._file.iter_batches(rows, row_groups=[group], columns=self._fields):
                parts.append(part)
                size += part.nbytes
                if size > self._group_bound:
                    break
        if size > self._group_bound:
            raise place.error(
                f"row group {group} takes more than {self._group_bound // MIB} MiB in memory. Write the file with smaller "
                "row groups, or raise the source's option row_group_mib."
            )
        return pyarrow.Table.from_batches(parts)

    def _repeated_size(self, group: int) -> int:
        """The size of values that a dictionary repeats in the lists of a row, computed without repeating them; else 0.

        One row with a thousand times the same 4 MiB is 4 MiB on disk and 4 GiB in memory.
        """
        import pyarrow
        from pyarrow import compute
        from pyarrow.parquet import ParquetFile

        def size_of(array: Any) -> int:
            if isinstance(array, pyarrow.DictionaryArray):
                return compute.sum(compute.binary_length(array.dictionary).take(array.indices)).as_py() or 0
            if isinstance(array, pyarrow.StructArray):
                return sum(map(size_of, array.flatten()))
            return size_of(array.flatten()) if isinstance(array, pyarrow.ListArray | pyarrow.LargeListArray) else 0

        stored = self._file.metadata.row_group(group)
        lists = [
            column.path_in_schema
            for column in map(stored.column, range(stored.num_columns))
            if column.physical_type == "BYTE_ARRAY"
            and column.num_values > stored.num_rows
            and column.num_values * column.total_uncompressed_size > self._group_bound
            and column.path_in_schema.partition(".")[0] in self._fields
        ]
        if not lists:
            return 0
        with ParquetFile(self.path, read_dictionary=lists) as file:
            parts = file.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=lists)
            return sum(size_of(column) for part in parts for column in part.columns)


def stored_row(rows: Any, index: int, place: Place) -> dict[str, Any]:
    """A row of an arrow table as Python values; one with a value that Python cannot hold is a bad row."""
    import pyarrow

    try:
        return dict(rows[index : index + 1].to_pylist()[0])
    except (OSError, ValueError, OverflowError, ImportError, pyarrow.ArrowException) as error:
        raise place.error(f"cannot read the row: {words(error)}.") from error


def first_values(column: Any) -> Iterator[Any]:
    """The first values of an arrow column that are not null, inside of lists, maps and objects too.

    [[{"bytes": …, "path": None}]]   → {"bytes": …}
    [{"page": [None, …], "n": 2}]    → {"page": …}, {"n": 2}
    [[("front", …), ("back", …)]]    → "front" and …: a map, by its keys and values
    """
    from pyarrow import types

    if types.is_map(column.type):
        for part in (column.keys, column.items):
            yield from first_values(part)
    elif types.is_struct(column.type):
        for field, part in zip(column.type, column.flatten(), strict=True):
            yield from ({field.name: value} for value in first_values(part))
    elif hasattr(column.type, "value_field"):
        yield from first_values(column.flatten())
    else:
        with suppress(ValueError, OverflowError):  # a time that Python has none for, a text that is no UTF-8
            yield from column.drop_null()[:1].to_pylist()


def content_digest(path: Path) -> str:
    """The digest of a file's content: of all of it up to 256 MiB, which takes a second or two.

    Of a larger file, so that a start is not delayed: its size, 240 blocks of 1 MiB spread evenly over it, and its last
    16 MiB, which in a Parquet file hold the sizes and statistics of all columns.
    """
    digest = hashlib.blake2b(digest_size=16)
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > WHOLE_DIGEST:
            digest.update(str(size).encode())
            blocks = (WHOLE_DIGEST - DIGEST_TAIL) // MIB
            for block in range(blocks):
                file.seek(block * (size - DIGEST_TAIL) // blocks)
                digest.update(file.read(MIB))
            file.seek(size - DIGEST_TAIL)
        while read := file.read(MIB):
            digest.update(read)
    return digest.hexdigest()


def _state(file: BufferedReader) -> tuple[int, ...]:
    return file_state(os.fstat(file.fileno()))


def _changed(path: Path) -> str:
    return (
        f"{path}: the file was changed, removed or made unreadable while the run reads it, so its rows are no longer those "
        "the run began with. Put it back as it was and resume, or start a new run with the new file. Train on a "
        "copy of a file that is written to."
    )


class HubRows(_Rows):
    """One task a row of ``data`` (a hub id or a local folder), its configuration ``name`` and its ``split``.

    Media are read as stored, not decoded by the library. Media paths are relative to ``folder`` (by default a local
    ``data`` folder) and stay there, in the library's caches, or in ``media_roots``. Data sets with loading scripts are not
    supported, as in the library. Further options: ``FileRowOptions``.
    """

    def __init__(
        self,
        data: str,
        store: MediaStore,
        split: str = "train",
        name: str | None = None,
        revision: str | None = None,
        folder: str | None = None,
        **options: Unpack[FileRowOptions],
    ) -> None:
        super().__init__(data, store, options)
        self.data, self.split = data, split
        rows = _load_split(data, name, split, revision)
        fields = self._format.fields(rows.column_names, f"{data}, split '{split}'")
        # The library names its files by their times, so the split is named instead. One held in memory has no files.
        files = [content_digest(Path(file["filename"])) for file in rows.cache_files]
        self.row_digests = {f"{data}, split '{split}'": " ".join(files)} if files else {}
        # The arrow form of a row holds a medium's bytes or path as they are.
        self._all = rows.with_format("arrow")
        self._rows = self._all.select_columns(fields)
        self._length = len(rows)
        self._stored = sum(Path(file["filename"]).stat().st_size for file in rows.cache_files)
        if not self._length:
            raise TaskError(f"the data set '{data}', split '{split}', has no rows.")
        from datasets import config
        from huggingface_hub.constants import HF_HUB_CACHE

        # Downloads lie in the library's caches (tokens do not); the current folder of the process is not a root.
        local = Path(folder) if folder is not None else Path(data) if Path(data).is_dir() else None
        caches = [str(HF_HUB_CACHE), str(config.HF_DATASETS_CACHE)]
        self._folder = local or Path()
        self._roots = roots_of(local or Path(caches[0]), [*options.get("media_roots", ()), *caches])

    def _names(self, index: int) -> tuple[str, str]:
        return f"{self.data}, split '{self.split}', row {index}", f"{self.data}/{self.split}/{index}"

    def _read(self, index: int) -> dict[str, Any]:
        return stored_row(self._rows, index, self._place(index))

    def _first_rows(self) -> Iterator[Mapping[str, Any]]:
        first = self._all[:FIRST_ROWS].combine_chunks().to_batches()[0]
        for name in first.schema.names:
            yield from ({name: value} for value in first_values(first[name]))


def _load_split(data: str, name: str | None, split: str, revision: str | None) -> Any:
    if find_spec("datasets") is None:
        raise RecipeError("source 'hub' needs the package datasets, which is not installed: pip install datasets.")
    from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

    saved = Path(data)
    try:
        if (saved / "dataset_dict.json").is_file() or (saved / "state.json").is_file():
            found = load_from_disk(data)
        else:
            found = load_dataset(data, name, split=split, revision=revision)
    except Exception as error:  # the library raises whatever a missing network, file or script provokes
        raise TaskError(f"cannot load the data set '{data}': {type(error).__name__}: {error}") from error
    if isinstance(found, DatasetDict):
        if split not in found:
            raise TaskError(f"the data set '{data}' has no split '{split}'{nearest(split, list(map(str, found)))}")
        found = found[split]
    if not isinstance(found, Dataset):
        raise TaskError(f"the data set '{data}' is a {type(found).__name__}, whose rows cannot be read in any order.")
    return found


class PassedRows(_Rows):
    """One task a row of a list or data set passed in Python (``RowOptions``); pictures may be PIL images as well.

    Media paths are relative to the current folder and may lead anywhere: the user's own program made the rows. ``digest``
    is that of the rows a run began with: others are refused.
    """

    def __init__(self, rows: Sequence[Any], store: MediaStore, digest: str = "", **options: Unpack[RowOptions]) -> None:
        if digest and digest != digest_of(rows):
            raise RecipeError(
                f"the {len(rows)} rows passed are not those the run began with, so continuing would not repeat it. Pass "
                "the same rows, or start a new run."
            )
        super().__init__("rows", store, options)
        self._is_data_set = hasattr(rows, "with_format")
        self._rows: Any = rows.with_format("arrow") if self._is_data_set else rows  # type: ignore[attr-defined]
        self._length = len(rows)

    def __getitem__(self, index: int) -> Task:
        if not self._is_data_set and 0 <= index < len(self) and isinstance(self._rows[index], Task):
            task: Task = self._rows[index]
            return task
        return super().__getitem__(index)

    def without_media(self, index: int) -> Task:
        """The task of a row, with references to media that were not read."""
        row = None if self._is_data_set else self._rows[index]
        return row if isinstance(row, Task) else super().without_media(index)

    def id_of(self, index: int) -> str:
        """The id of a row's task."""
        row = None if self._is_data_set else self._rows[index]
        return row.id if isinstance(row, Task) else super().id_of(index)

    def _names(self, index: int) -> tuple[str, str]:
        return f"row {index}", f"row/{index}"

    def _read(self, index: int) -> Any:
        row = stored_row(self._rows, index, self._place(index)) if self._is_data_set else self._rows[index]
        if not isinstance(row, Mapping):
            raise TaskError(f"row {index} of the list of tasks is {type(row).__name__}; give a dict or a Task.")
        return with_bytes(row)


def digest_of(rows: Sequence[Any]) -> str:
    """A digest of rows: a data set's own fingerprint, or a hash of everything in them."""
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

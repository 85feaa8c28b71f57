"""Rows of tasks in JSONL and Parquet files, read when they are asked for. Every error names file and line (or row)."""

import json
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sensorium.media.store import MediaStore
from sensorium.tasks.clips import ClipOptions
from sensorium.tasks.content import Place
from sensorium.tasks.layout import layout_of
from sensorium.vocabulary.errors import TaskError
from sensorium.vocabulary.task import Task

MIB = 1024 * 1024


class JsonlRows:
    """One task a line; blank lines are passed over. Paths of media start from the file's folder.

    Without ``columns`` a line is a task with content blocks; with them it is flat (see ``FlatRows`` for the options).
    ``video`` and ``sound`` say how clips are decoded (see ``ClipOptions``).
    """

    def __init__(
        self,
        path: str,
        store: MediaStore,
        columns: Mapping[str, str] | None = None,
        limit: int = 0,
        instruction: str = "",
        system: str = "",
        media_first: bool = False,
        video: Mapping[str, Any] | None = None,
        sound: Mapping[str, Any] | None = None,
    ) -> None:
        self.path, self.store = Path(path), store
        self._clips = ClipOptions(video, sound, path)
        self._layout = layout_of(columns, instruction, system, media_first)
        self._starts, self._lines = array("q"), array("q")
        try:
            self._scan(limit)
        except OSError as error:
            raise TaskError(f"{path}: cannot read the file: {error.strerror}.") from error

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Task:
        line = self._lines[index]
        place = Place(f"{self.path}:{line}", self.path.parent, self.store, self._clips)
        try:
            with self.path.open("rb") as file:
                file.seek(self._starts[index])
                row = json.loads(file.readline().decode("utf-8-sig"))
        except json.JSONDecodeError as error:
            raise place.error(f"malformed JSON: {error.msg} at column {error.colno}. Mend or delete the line.") from error
        except (ValueError, RecursionError, OSError) as error:
            raise place.error(f"cannot read the line: {error}.") from error
        if not isinstance(row, dict):
            raise place.error(f"a line must hold one JSON object, not {row!r:.60}.")
        return self._layout.task(row, f"{self.path.name}:{line}", place)

    def _scan(self, limit: int) -> None:
        """Note where each row starts, so that any one can be read alone."""
        start = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    self._starts.append(start)
                    self._lines.append(number)
                    if limit and len(self._starts) == limit:
                        return
                start += len(line)


class ParquetRows:
    """One task a row. Row groups are read when needed and the latest kept, within ``cache_mib``.

    Without ``columns`` a row is a task with content blocks; with them it is flat (see ``FlatRows`` for the options).
    ``video`` and ``sound`` say how clips are decoded (see ``ClipOptions``).
    """

    def __init__(
        self,
        path: str,
        store: MediaStore,
        columns: Mapping[str, str] | None = None,
        limit: int = 0,
        instruction: str = "",
        system: str = "",
        media_first: bool = False,
        video: Mapping[str, Any] | None = None,
        sound: Mapping[str, Any] | None = None,
        cache_mib: int = 512,
    ) -> None:
        import pyarrow
        from pyarrow.parquet import ParquetFile

        self.path, self.store = Path(path), store
        self._clips = ClipOptions(video, sound, path)
        self._layout = layout_of(columns, instruction, system, media_first)
        try:
            self._file = ParquetFile(self.path)
        except (OSError, pyarrow.ArrowException) as error:
            raise TaskError(f"{path}: cannot read the Parquet file: {error}") from error
        self._fields = self._layout.fields(self._file.schema_arrow.names, path)
        self._ends: list[int] = []
        for group in range(self._file.metadata.num_row_groups):
            before = self._ends[-1] if self._ends else 0
            self._ends.append(before + self._file.metadata.row_group(group).num_rows)
        rows = self._file.metadata.num_rows
        self._length = min(limit, rows) if limit else rows
        self._cache: OrderedDict[int, Any] = OrderedDict()
        self._bound = cache_mib * MIB
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < self._length:
            raise IndexError(index)
        place = Place(f"{self.path}, row {index}", self.path.parent, self.store, self._clips)
        group = bisect_right(self._ends, index)
        table = self._group(group, place)
        within = index - (self._ends[group - 1] if group else 0)
        row = table.slice(within, 1).to_pylist()[0]
        return self._layout.task(row, f"{self.path.name}:{index}", place)

    def _group(self, group: int, place: Place) -> Any:
        import pyarrow

        with self._lock:
            if group not in self._cache:
                try:
                    self._cache[group] = self._file.read_row_group(group, columns=self._fields)
                except (OSError, pyarrow.ArrowException) as error:
                    raise place.error(f"cannot read row group {group}: {error}") from error
            self._cache.move_to_end(group)
            while len(self._cache) > 1 and sum(table.nbytes for table in self._cache.values()) > self._bound:
                self._cache.popitem(last=False)
            return self._cache[group]

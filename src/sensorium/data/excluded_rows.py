"""Rows that ``tasks.exclude`` leaves out, as ``sensorium validate`` lists them.

    {"source": "tasks.train.0", "row": 17, "id": "clips.jsonl:18", "check": "silence", "reason": "clip.wav is silent"}

``source`` is the recipe's key of a source, ``row`` counts its rows from 0, ``id`` is the task's: a list that was made for
other rows is refused. ``check`` and ``reason`` are for people.
"""

import hashlib
import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sensorium.runs.durable import write_whole
from sensorium.vocabulary.errors import MediaError, RecipeError, TaskError
from sensorium.vocabulary.plain import strict_json
from sensorium.vocabulary.task import Task

if TYPE_CHECKING:
    from sensorium.data.mixture import TaskSource


@dataclass(frozen=True)
class BadRow:
    """A row of a source that had better be left out, and why."""

    source: str
    row: int
    id: str
    check: str = ""
    reason: str = ""


def write_bad_rows(path: Path, rows: Iterable[BadRow]) -> None:
    """Write a list that ``tasks.exclude`` takes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows))


def read_bad_rows(path: Path, sources: Container[str] | None = None) -> list[BadRow]:
    """The rows of a list; a line that is none, or names none of the ``sources``, is refused."""
    try:
        lines = path.expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"tasks.exclude: cannot read '{path}': {getattr(error, 'strerror', None) or error}. `sensorium validate` "
            "writes such a list."
        ) from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = strict_json(line)
            given = BadRow(row["source"], row["row"], str(row["id"]), str(row.get("check", "")), str(row.get("reason", "")))
            fitting = isinstance(given.source, str) and type(given.row) is int and given.row >= 0
        except (ValueError, LookupError, TypeError, AttributeError):
            fitting = False
        if not fitting:
            form = '{"source": "tasks.train.0", "row": 17, "id": "…"}'
            raise RecipeError(f"tasks.exclude: {path}:{number} is no row to leave out. A line is such as {form}.")
        if sources is not None and given.source not in sources:
            raise RecipeError(
                f"tasks.exclude: {path}:{number} leaves out a row of {given.source}, which this recipe does not have. Was "
                "the list made for another recipe?"
            )
        found.append(given)
    return found


def id_of(source: "TaskSource", row: int) -> str | None:
    """The id of a row's task, without its media where the source can; None where it cannot be read."""
    named = getattr(source, "id_of", None)
    try:
        return str(named(row)) if named is not None else source[row].id
    except (TaskError, MediaError):
        return None


class RemainingRows:
    """A source without the excluded rows. ``original(index)`` is the number of a row in the source itself."""

    def __init__(self, source: "TaskSource", excluded: Sequence[BadRow], path: Path) -> None:
        self._source = source
        count = len(source)
        where = excluded[0].source
        for row in excluded:
            known = id_of(source, row.row) if row.row < count else None
            if row.row >= count or known not in (None, row.id):
                here = f"the source has {count:,} rows" if row.row >= count else f"that row is '{known}'"
                raise RecipeError(
                    f"tasks.exclude: '{path}' leaves out row {row.row} of {where} as '{row.id}', and {here}. The rows "
                    f"have changed since the list was made; make it again: sensorium validate."
                )
        left_out = {row.row for row in excluded}
        self._rows = [row for row in range(count) if row not in left_out]
        if not self._rows:
            raise TaskError(f"tasks.exclude: '{path}' leaves out all {count:,} rows of {where}.")
        if hasattr(source, "place_of"):
            raise RecipeError(f"tasks.exclude: rows of {where} depend on each other, so none can be left out alone.")
        levels = [[i for i, row in enumerate(self._rows) if row in level] for level in getattr(source, "levels", ())]
        if not all(levels):
            raise TaskError(f"tasks.exclude: '{path}' leaves out all tasks of a level of {where}.")
        self.levels = tuple(range(places[0], places[-1] + 1) for places in levels)
        listed = "\n".join(f"{row.row} {row.id}" for row in excluded)
        digest = hashlib.blake2b(listed.encode(), digest_size=16).hexdigest()
        self.row_digests: Mapping[str, str] = {**getattr(source, "row_digests", {}), f"{path} for {where}": digest}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Task:
        return self._source[self._rows[index]]

    def id_of(self, index: int) -> str:
        """The id of a row's task."""
        return id_of(self._source, self._rows[index]) or ""

    def original(self, index: int) -> int:
        return self._rows[index]

    def __getattr__(self, name: str) -> Any:
        """Further attributes of the source, such as ``table_columns``."""
        return getattr(self.__dict__["_source"], name)


def original_row(source: "TaskSource", index: int) -> int:
    """The number of a row in its source itself, whether or not rows are left out."""
    return source.original(index) if isinstance(source, RemainingRows) else index

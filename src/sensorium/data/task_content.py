"""What rows ask, compared at the start of a run: rows both held out and trained on, ids used twice, rows without media;
and the rows that ``tasks.exclude`` leaves out.

No medium is read: a file counts as its path, and bytes in a row as their hash. So the same picture under two names counts
as two, which ``sensorium validate`` finds, and nothing that differs is taken for the same.

Rows are left out by lists that ``sensorium validate`` writes:

    {"source": "tasks.train.0", "row": 17, "id": "clips.jsonl:18", "check": "silence", "reason": "clip.wav is silent"}

``source`` is the recipe's key of a source, ``row`` counts its rows from 0, ``id`` is the task's: a list that was made for
other rows is refused. ``check`` and ``reason`` are for people.
"""

import hashlib
import json
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sensorium.data.media_files import MIB
from sensorium.data.media_store import MediaStore
from sensorium.recipe.registry import resolve
from sensorium.runs.durable import write_whole
from sensorium.vocabulary.content import Media, MediaKind
from sensorium.vocabulary.decoding import Parameters
from sensorium.vocabulary.errors import MediaError, RecipeError, TaskError
from sensorium.vocabulary.plain import attempt, counted, strict_json
from sensorium.vocabulary.task import Task

if TYPE_CHECKING:
    from sensorium.data.mixture import TaskSource, Treatment


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


MOST_ROWS = 10_000  # of each source that are compared
MIXED = 10  # of so many rows one without media is an oversight; with more of them they are mixed on purpose
MOST_BYTES = 256 * MIB  # of rows of each source, on average of all of its rows


class UnreadMedia(MediaStore):
    """Refers to media by their paths, or by the bytes that a row holds, without reading or decoding them."""

    def put(self, data: bytes, kind: MediaKind, origin: str = "", parameters: Parameters | None = None) -> Media:
        """A reference to bytes."""
        return Media(kind, hashlib.sha256(data).hexdigest(), origin, parameters)

    def put_picture(self, data: bytes, origin: str) -> Media:
        """A reference to a picture's bytes."""
        return self.put(data, "picture", origin)

    def put_picture_file(self, path: Path, origin: str) -> Media:
        """A reference to a picture's file."""
        return self.put_file(path, "picture", origin)

    def put_file(self, path: Path, kind: MediaKind, origin: str = "", parameters: Parameters | None = None) -> Media:
        """A reference to a file, by its path."""
        return self.put(b"file " + os.fsencode(os.path.abspath(path)), kind, origin, parameters)


UNREAD = UnreadMedia()


def content_of(task: Task, seen: Mapping[str, str] | None = None) -> str:
    """The identity of a task: an environment's start, or the question with its media, whatever its answer is.

    ``seen``: fingerprints of decoded media by key, since one picture may be in several files.
    """
    spec = task.environment
    key = getattr(resolve("environment", spec.name), "content_key", None) if spec is not None else None
    if spec is not None and task.metadata.get("split_by") == "seed":
        return f"{spec.name}/seed {spec.seed}"
    if spec is not None and key is not None and not task.messages:
        content, error = attempt(key, spec.seed, spec.options)
        return f"{spec.name}/{content}" if error is None else f"{spec.name}/seed {spec.seed}"
    known = seen or {}
    shown = [
        (m.role, m.text, [known.get(part.key) or _unseen(part) for item in m.media for part in item.parts])
        for m in task.messages
    ]
    start: tuple[object, ...] = () if spec is None else (spec.name, spec.seed, sorted(spec.options.items()))
    if spec is not None and not task.messages:  # a row that its environment puts into words
        start += (task.answer,)
    return hashlib.blake2b(repr((shown, start)).encode(errors="surrogateescape"), digest_size=16).hexdigest()


def _unseen(part: Media) -> tuple[object, ...]:
    """A medium by its hash, and the part of the clip that is shown, however it is decoded."""
    return part.hash, *(getattr(part.parameters, name, None) for name in ("start", "end"))


@dataclass(frozen=True)
class ComparedRow:
    """What is compared of a row: its source and number there, its task's id and content, and the kinds of its media."""

    source: str
    row: int
    id: str
    content: str
    kinds: frozenset[MediaKind]


def compared_row(task: Task, source: str, row: int, seen: Mapping[str, str] | None = None) -> ComparedRow:
    """What is compared of a task; ``seen`` as in ``content_of``."""
    kinds = frozenset(part.kind for message in task.messages for item in message.media for part in item.parts)
    return ComparedRow(source, row, task.id, content_of(task, seen), kinds)


def compared_rows(source: "TaskSource", where: str, on_bad_row: "Treatment") -> list[ComparedRow]:
    """The first rows of a source that knows its tasks without their media (``without_media``); of others none.

    A row that cannot be read is refused or passed over, as ``on_bad_row`` says.
    """
    from sensorium.data.mixture import with_way_out

    read, size = getattr(source, "without_media", None), getattr(source, "row_bytes", 0.0)
    found: list[ComparedRow] = []
    if read is None:
        return found
    for index in range(min(len(source), MOST_ROWS, int(MOST_BYTES / max(size, 1e-9)))):
        row = original_row(source, index)
        try:
            found.append(compared_row(read(row), where, row))
        except (TaskError, MediaError) as error:
            if on_bad_row == "refuse":
                raise with_way_out(error) from error
    return found


def row_notes(train: "Sequence[TaskSource]", held_out: "Sequence[TaskSource]", on_bad_row: "Treatment") -> Iterator[str]:
    """Sentences about likely mistakes in the rows of both sides."""
    sides: list[list[ComparedRow]] = []
    for side, sources in (("train", train), ("evaluate", held_out)):
        sides.append([])
        for i, source in enumerate(sources):
            rows = compared_rows(source, f"tasks.{side}.{i}", on_bad_row)
            sides[-1] += rows
            yield from text_alone(rows, source)
        yield from repeated_ids(sides[-1])
    yield from other_media(*sides)
    trained = {row.content: row for row in sides[0]}
    if both := [row for row in sides[1] if row.content in trained]:
        first, same = both[0], trained[both[0].content]
        yield (
            f"ATTENTION: {len(both):,} of {len(sides[1]):,} held-out rows that were compared are trained on, too: the "
            f"first, '{first.id}' ({first.source}), asks the same as '{same.id}' ({same.source}). Accuracy on them says "
            "what was memorised. 'sensorium validate' lists all of them, in the form in which tasks.exclude takes rows."
        )


def repeated_ids(rows: Sequence[ComparedRow]) -> Iterator[str]:
    """A sentence about ids under which one side has different rows. A row that is repeated as it is has the same task."""
    first: dict[str, ComparedRow] = {}
    others = [row for row in rows if first.setdefault(row.id, row).content != row.content]
    if others:
        ids, one, other = len({row.id for row in others}), first[others[0].id], others[0]
        yield (
            f"{counted(ids, 'id')} of tasks {'is' if ids == 1 else 'are'} used for different rows, the first, '{one.id}', "
            f"for row {one.row} of {one.source} and row {other.row} of {other.source}: 'sensorium compare' and curricula "
            "by success take them for one task. Give each row an id of its own (the field 'id', or columns: {id: COLUMN})."
        )


def other_media(trained: Sequence[ComparedRow], held_out: Sequence[ComparedRow]) -> Iterator[str]:
    """A sentence if held-out rows show media and training rows none."""
    train, test = (frozenset[MediaKind]().union(*(row.kinds for row in rows)) for rows in (trained, held_out))
    if trained and test and not train:
        yield (
            f"none of {counted(len(trained), 'training row')} shows a medium, and held-out rows show "
            f"{' and '.join(f'{kind}s' for kind in sorted(test))}: what is evaluated is not what is trained."
        )


def text_alone(rows: Sequence[ComparedRow], source: "TaskSource") -> Iterator[str]:
    """A sentence about rows without media: all columns of media that options name are empty, or most rows have some."""
    columns = getattr(source, "media_columns", ())
    empty = [row for row in rows if not row.kinds]
    if empty and (columns or len(empty) * MIXED <= len(rows)):
        nothing = f"have nothing in {' and '.join(map(repr, columns))}" if columns else "show no medium, as the others do"
        yield (
            f"{len(empty):,} of {counted(len(rows), 'row')} of {empty[0].source} {nothing}, and are asked as text alone; "
            f"the first is row {empty[0].row}."
        )

"""Manifests: a JSON file that lists the rows of a data set whose media lie beside it, perhaps still in an archive."""

import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import inf
from pathlib import Path, PurePosixPath
from typing import IO, Any

from sensorium.record.durable import drafted
from sensorium.vocabulary.errors import TaskError
from sensorium.vocabulary.plain import strict_json

MIB = 1024 * 1024
SMALL = 64 * MIB
"""What may be unpacked whatever the ratio: texts shrink a lot."""

MEMBERS = 1_000_000
"""Files that are unpacked at most: empty ones take no bytes, and fill a disk all the same."""


def read_manifest(path: Path) -> list[Any]:
    """The rows of a manifest; a file that is missing or no JSON list is an error that names it."""
    try:
        rows = strict_json(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise TaskError(f"{path}: cannot read the manifest: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{path}: the manifest is no JSON: {error}.") from error
    if not isinstance(rows, list) or not rows:
        raise TaskError(f"{path}: a manifest is a list of rows, not {rows!r:.60}.")
    return rows


def text_of(row: Mapping[str, Any], field: str) -> str:
    """A field that must hold text (or a finite number), or an empty text if it does not."""
    value = row.get(field)
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < inf
    return str(value).strip() if number or isinstance(value, str) else ""


@dataclass(frozen=True)
class _Member:
    """A file of an archive, and how it is opened."""

    name: str
    size: int
    open: Callable[[], IO[bytes]]


def unpack_once(archive: Path, folder: Path, ratio: float = 20.0) -> None:
    """Unpack a zip or plain tar archive into a folder, unless a marker says that it was done.

    One that would take more than ``ratio`` times its size, or more than there is room for, is refused before anything is
    written: no member can grow beyond the size it states. So are links and members outside of the folder. Each file is
    written beside its place and renamed, and the marker comes last: a kill or a second process at the same time costs work,
    never a half file. Nothing is done where there is no archive.
    """
    if not archive.is_file():
        return
    seen = archive.stat()
    state = f"{seen.st_size} {seen.st_mtime_ns}"
    marker = folder / f".{archive.name}.unpacked"
    if marker.is_file() and marker.read_text() == state:
        return
    try:
        with ExitStack() as opened:
            listed = _tar_members if archive.suffix == ".tar" else _zip_members
            members = list(islice(listed(archive, opened), MEMBERS + 1))
            _refuse_bomb(members, archive, folder, seen.st_size, ratio)
            written = [_unpack(member, archive, folder) for member in members]
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, NotImplementedError, RuntimeError, OSError) as error:
        raise TaskError(f"{archive}: cannot unpack the archive: {error}. Download it again, or free some space.") from error
    # Where all was there, a folder that is read-only will do.
    unneeded = nullcontext() if any(written) else suppress(OSError)
    with unneeded, drafted(marker, flushed=False, shared=True) as draft:
        draft.write_text(state)


def _zip_members(archive: Path, opened: ExitStack) -> Iterator[_Member]:
    inside = opened.enter_context(zipfile.ZipFile(archive))
    for info in inside.infolist():
        if not info.is_dir():
            yield _Member(info.filename, info.file_size, partial(inside.open, info))


def _tar_members(archive: Path, opened: ExitStack) -> Iterator[_Member]:
    # A compressed one would have to be read whole to be listed.
    inside = opened.enter_context(tarfile.TarFile(archive))
    for info in inside:
        if info.isdir():
            continue
        if not info.isreg():
            raise TaskError(f"{archive}: its member '{info.name}' is a link or a device; an archive of videos has none.")
        yield _Member(info.name, info.size, partial(_opened, inside, info))


def _opened(inside: tarfile.TarFile, info: tarfile.TarInfo) -> IO[bytes]:
    found = inside.extractfile(info)
    assert found is not None, "it is a regular file"
    return found


def _refuse_bomb(members: Sequence[_Member], archive: Path, folder: Path, packed: int, ratio: float) -> None:
    if len(members) > MEMBERS:
        raise TaskError(f"{archive}: it has more than {MEMBERS:,} members, which no archive of a data set has.")
    stated = sum(member.size for member in members)
    if stated > max(ratio * packed, SMALL):
        raise TaskError(
            f"{archive}: {packed / MIB:,.1f} MiB would unpack to {stated / MIB:,.0f} MiB, more than {ratio:g} times as "
            "much, which no archive of videos does. Raise the source's option unpack_ratio if it is sound."
        )
    places = [(member, _place(member, archive, folder)) for member in members]
    needed = sum(member.size for member, place in places if not _is_there(member, place))
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise TaskError(
            f"{archive}: it unpacks to {needed / MIB:,.0f} MiB and '{folder}' has room for {free / MIB:,.0f} MiB."
        )


def _place(member: _Member, archive: Path, folder: Path) -> Path:
    inside = PurePosixPath(member.name)
    if inside.is_absolute() or ".." in inside.parts:
        raise TaskError(f"{archive}: its member '{member.name}' would be written outside of '{folder}'.")
    return folder / inside


def _is_there(member: _Member, place: Path) -> bool:
    return place.is_file() and place.stat().st_size == member.size


def _unpack(member: _Member, archive: Path, folder: Path) -> bool:
    """Write a member's file, unless it is there; returns whether it was written."""
    place = _place(member, archive, folder)
    if _is_there(member, place):
        return False
    place.parent.mkdir(parents=True, exist_ok=True)
    with drafted(place, flushed=False, shared=True) as draft, member.open() as source, draft.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    return True

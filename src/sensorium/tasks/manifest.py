"""Manifests: a JSON file that lists the rows of a data set whose media lie beside it, perhaps still in an archive."""

import json
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from sensorium.record.durable import drafted
from sensorium.vocabulary.errors import TaskError

MIB = 1024 * 1024
SMALL = 64 * MIB
"""What may be unpacked whatever the ratio: texts shrink a lot."""

MEMBERS = 1_000_000
"""Files that are unpacked at most: empty ones take no bytes, and fill a disk all the same."""


def read_manifest(path: Path) -> list[Any]:
    """The rows of a manifest; a file that is missing or no JSON list is an error that names it."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise TaskError(f"{path}: cannot read the manifest: {error.strerror}.") from error
    except ValueError as error:
        raise TaskError(f"{path}: the manifest is no JSON: {error}.") from error
    if not isinstance(rows, list) or not rows:
        raise TaskError(f"{path}: a manifest is a list of rows, not {rows!r:.60}.")
    return rows


def text_of(row: Mapping[str, Any], field: str) -> str:
    """A field that must hold text (or a number), or an empty text if it does not."""
    value = row.get(field)
    return str(value).strip() if isinstance(value, str | int | float) and not isinstance(value, bool) else ""


def unzip_once(archive: Path, folder: Path, ratio: float = 20.0) -> None:
    """Unpack an archive into a folder, unless a marker says that it was done.

    One that would take more than ``ratio`` times its size, or more than there is room for, is refused before anything is
    written: no member can grow beyond the size it states. Each file is written beside its place and renamed, and the marker
    comes last: a kill or a second process at the same time costs work, never a half file. Nothing is done where there is no
    archive.
    """
    if not archive.is_file():
        return
    seen = archive.stat()
    state = f"{seen.st_size} {seen.st_mtime_ns}"
    marker = folder / f".{archive.name}.unpacked"
    if marker.is_file() and marker.read_text() == state:
        return
    try:
        with zipfile.ZipFile(archive) as opened:
            _refuse_bomb(opened, archive, folder, seen.st_size, ratio)
            for member in opened.infolist():
                _unpack(opened, member, archive, folder)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, OSError) as error:
        raise TaskError(f"{archive}: cannot unpack the archive: {error}. Download it again, or free some space.") from error
    with drafted(marker, flushed=False, shared=True) as draft:
        draft.write_text(state)


def _refuse_bomb(opened: zipfile.ZipFile, archive: Path, folder: Path, packed: int, ratio: float) -> None:
    members = opened.infolist()
    if len(members) > MEMBERS:
        raise TaskError(f"{archive}: it has {len(members):,} members; an archive of a data set has at most {MEMBERS:,}.")
    stated = sum(member.file_size for member in members)
    if stated > max(ratio * packed, SMALL):
        raise TaskError(
            f"{archive}: {packed / MIB:,.1f} MiB would unpack to {stated / MIB:,.0f} MiB, more than {ratio:g} times as "
            "much, which no archive of videos does. Raise the source's option unpack_ratio if it is sound."
        )
    free = shutil.disk_usage(folder).free
    if stated > free:
        raise TaskError(
            f"{archive}: it unpacks to {stated / MIB:,.0f} MiB and '{folder}' has room for {free / MIB:,.0f} MiB."
        )


def _unpack(opened: zipfile.ZipFile, member: zipfile.ZipInfo, archive: Path, folder: Path) -> None:
    inside = PurePosixPath(member.filename)
    if inside.is_absolute() or ".." in inside.parts:
        raise TaskError(f"{archive}: its member '{member.filename}' would be written outside of '{folder}'.")
    place = folder / inside
    if member.is_dir() or (place.is_file() and place.stat().st_size == member.file_size):
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    with drafted(place, flushed=False, shared=True) as draft, opened.open(member) as source, draft.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)

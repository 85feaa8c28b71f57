"""Files and bytes of media as data sets carry them: opened safely, bounded in size, typed by their first bytes.

A pipe or a device would be read for ever, and a path like ``../../.ssh/id_rsa`` is no picture of the data set.
"""

import base64
import binascii
import errno
import mimetypes
import os
import re
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from sensorium.vocabulary.content import MediaKind
from sensorium.vocabulary.errors import MediaError

MIB = 1024 * 1024


@dataclass(frozen=True)
class MediaLimits:
    """The bounds of one medium, as the recipe's section ``media`` sets them."""

    pixels: int = 64_000_000
    file_mib: float = 2048
    clip_s: float = 7200
    clip_mib: float = 1024

    def refuse_pixels(self, width: int, height: int, what: str) -> str:
        """Why a picture or frame of this size is not decoded; empty if it is."""
        size = f"{width} × {height} = {width * height:,} pixels is beyond media.max_pixels {self.pixels:,}"
        return "" if width * height <= self.pixels else f"{what} of {size}. Shrink it, or raise that setting."

    def refuse_file(self, size: int) -> str:
        """Why a file of so many bytes is not read; empty if it is."""
        bound = f"{size / MIB:,.0f} MiB is beyond media.max_file_mib {self.file_mib:g}"
        return "" if size <= self.file_mib * MIB else f"a file of {bound}. Shrink it, or raise that."

    def refuse_length(self, seconds: float) -> str:
        """Why a clip of so many seconds is not decoded; empty if it is."""
        bound = f"{seconds:,.0f} s are beyond media.max_clip_s {self.clip_s:g}"
        return "" if seconds <= self.clip_s else f"{bound}. Trim it with start and end, or raise that."

    def refuse_decoded(self, size: int) -> str:
        """Why a clip that takes so many bytes when decoded is not decoded; empty if it is."""
        bound = f"decoded it would take {size / MIB:,.0f} MiB, and media.max_clip_mib is {self.clip_mib:g}"
        way_out = "Ask for fewer or smaller frames or a shorter part, or raise that."
        return "" if size <= self.clip_mib * MIB else f"{bound}. {way_out}"


KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def open_regular(path: Path) -> BufferedReader:
    """A regular file, open for reading; OSError for anything else. Never waits for a writer."""
    _refuse_other(os.stat(path).st_mode)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse_other(os.fstat(descriptor).st_mode)  # it may have been replaced in between
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def file_state(seen: os.stat_result) -> tuple[int, ...]:
    """Numbers that change when a file is replaced or written to; the last also when only links or rights change.

    That one, the time of the last change, cannot be set: it also reveals a file of the same size with a copied time.
    """
    return seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns


def busy() -> OSError:
    """The error of a file that keeps changing while it is read."""
    return OSError(errno.EBUSY, "it is being written to")


def roots_of(folder: Path, opened: Sequence[str] = ()) -> tuple[Path, ...]:
    """The folders that media may lie in: the data's own and those the recipe opens, with links resolved.

    A folder of the Hugging Face cache holds links to the blobs beside it, so these belong to it.
    """
    own = folder.expanduser().resolve()
    blobs = [parent.parent / "blobs" for parent in (own, *own.parents) if parent.name == "snapshots"]
    return (own, *blobs[:1], *(Path(path).expanduser().resolve() for path in opened))


def inside(path: Path, roots: Sequence[Path]) -> bool:
    """True if a path, with all links resolved, lies in one of the folders."""
    real = path.resolve()
    return any(real.is_relative_to(root) for root in roots)


def _refuse_other(mode: int) -> None:
    if not stat.S_ISREG(mode):
        what = next((words for is_one, words in KINDS if is_one(mode)), "something else")
        raise OSError(errno.EINVAL, f"it is {what}, not a regular file")


KINDS_OF_TYPES: dict[str, MediaKind] = {"image": "picture", "video": "video", "audio": "sound"}
PATH_LENGTH = 1024  # of the longest text that is taken for a path
HEAD_BYTES = 64  # the bytes that decide a file's type
UNKNOWN = "application/octet-stream"
STARTS: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\x00", "image/tiff"),
    (b"MM\x00*", "image/tiff"),
    (b"fLaC", "audio/flac"),
    (b"ID3", "audio/mpeg"),
    (b"#!AMR", "audio/amr"),
    (b"caff", "audio/x-caf"),
    (b".snd", "audio/basic"),
    (b"FLV", "video/x-flv"),
    (b"\x00\x00\x01\xba", "video/mpeg"),
    (b"\x30\x26\xb2\x75", "video/x-ms-asf"),
)
RIFF = {b"WAVE": "audio/wav", b"AVI ": "video/x-msvideo", b"WEBP": "image/webp", b"AIFF": "audio/aiff"}
BRANDS = {b"qt  ": "video/quicktime", b"M4A ": "audio/mp4", b"avif": "image/avif"}


def mime_type(head: bytes, kind: MediaKind) -> str:
    """The MIME type of a medium of ``kind`` by its first bytes; a container that may hold both is audio for a sound."""
    found = _found(head)
    return found.replace("video/", "audio/") if kind == "sound" else found


def kind_of(head: bytes, name: str = "") -> MediaKind | None:
    """Picture, video or sound, by the first bytes or else by the file's name; None if neither is known.

    A container that may hold both is a sound where its name is one of a sound (``.m4a``, ``.oga``).
    """
    by_bytes, by_name = _found(head), mimetypes.guess_type(name, strict=False)[0] or ""
    found = by_name if by_bytes == UNKNOWN or (by_bytes.startswith("video/") and by_name.startswith("audio/")) else by_bytes
    return KINDS_OF_TYPES.get(found.partition("/")[0])


def _found(head: bytes) -> str:
    for start, name in STARTS:
        if head.startswith(start):
            return name
    if head[:4] in (b"RIFF", b"FORM"):
        return RIFF.get(head[8:12], UNKNOWN)
    if head[4:8] == b"ftyp":
        return BRANDS.get(head[8:12], "video/mp4")
    if head.startswith(b"\x1a\x45\xdf\xa3"):
        return "video/webm" if b"webm" in head else "video/x-matroska"
    if head.startswith(b"OggS"):
        return "audio/ogg" if any(codec in head for codec in (b"vorbis", b"Opus", b"FLAC")) else "video/ogg"
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0:
        return "audio/aac"
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:
        return "audio/mpeg"
    return UNKNOWN


MEDIA_NAME = re.compile(r"(?<![a-z])(image|img|picture|photo|video|clip|audio|sound|wav)s?(?![a-z])", re.IGNORECASE)


def held_kind(value: Any, column: str, folder: Path) -> MediaKind | None:
    """Picture, video or sound, where a value of a column is one in a form that ``located`` takes; None for all others.

    A path is one if the file exists, or if the column is named like media too.
    """
    if isinstance(value, list | tuple):
        return next((held_kind(item, column, folder) for item in value if item is not None), None)
    if isinstance(value, Mapping):
        found = [held_kind(value[key], column, folder) for key in ("bytes", "path") if value.get(key) is not None]
        return next(filter(None, found), None)
    if isinstance(value, bytes | bytearray | memoryview):
        return kind_of(bytes(value[:HEAD_BYTES]))
    if not isinstance(value, str):
        return None
    if value.startswith("data:"):
        return KINDS_OF_TYPES.get(value[5:32].partition("/")[0])
    with suppress(OSError, ValueError):  # binascii.Error is one
        if len(value) > PATH_LENGTH:
            return kind_of(base64.b64decode(value[:HEAD_BYTES], validate=True))
        if MEDIA_NAME.search(column) or (folder / value).is_file():
            return kind_of(b"", value)
    return None


FORMS = "a path, a data URI, base64 data, bytes, or {'bytes': …, 'path': …}"


def located(source: Any, kind: MediaKind, origin: str, folder: Path | None = None) -> bytes | Path:
    """A medium's encoded bytes, or the path of a file with them (relative to ``folder``)."""
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, Mapping):
        held, path = source.get("bytes"), source.get("path")
        if set(source) - {"bytes", "path"} or (held is None and path is None):
            raise MediaError(f"{origin}: a {kind} with keys {sorted(source)} cannot be read. Give {FORMS}.")
        if isinstance(held, str):
            return base64_bytes(held, kind, origin)
        return located(path if held is None else held, kind, origin, folder)
    if isinstance(source, Path):
        return source if folder is None else folder / source
    if isinstance(source, str):
        if source.startswith("data:"):
            head, comma, body = source.partition(",")
            if not comma:
                raise MediaError(f"{origin}: '{source[:40]}' is not a data URI; its data must follow a comma.")
            return base64_bytes(body, kind, origin) if head.endswith(";base64") else unquote_to_bytes(body)
        if "://" in source[:16]:
            raise MediaError(f"{origin}: '{source[:80]}' is remote and is not fetched. Download it and give its path.")
        return Path(source) if folder is None else folder / source
    raise MediaError(f"{origin}: a {kind} cannot be read from {type(source).__name__}. Give {FORMS}.")


def read_bytes(path: Path, kind: MediaKind, origin: str, limits: MediaLimits | None = None) -> bytes:
    """The bytes of a regular file; one that is missing, unreadable or too large is an error that names it."""
    try:
        with open_regular(path) as file:
            for _ in range(3):
                state = file_state(os.fstat(file.fileno()))
                problem = (limits or MediaLimits()).refuse_file(os.fstat(file.fileno()).st_size)
                if problem:
                    raise MediaError(f"{origin}: cannot read the {kind} '{path}': {problem}")
                data = file.read()
                if file_state(os.fstat(file.fileno())) == state:
                    return data
                file.seek(0)
            raise busy()
    except (OSError, ValueError) as error:
        raise unreadable(path, kind, origin, error) from error


def unreadable(path: Path, kind: MediaKind, origin: str, error: OSError | ValueError) -> MediaError:
    """The error of a file that cannot be read."""
    why = getattr(error, "strerror", None) or str(error)
    return MediaError(f"{origin}: cannot read the {kind} '{path}': {why}.")


def base64_bytes(text: str, kind: MediaKind, origin: str) -> bytes:
    """Strictly decoded base64; line breaks are allowed."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"{origin}: the {kind}'s base64 data is broken: {error}.") from error

"""The forms in which data sets carry a medium: a path, bytes, a data URI, base64 text, or an object with one of them."""

import base64
import binascii
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from sensorium.media.files import busy, file_state, open_regular
from sensorium.media.limits import MediaLimits
from sensorium.vocabulary.content import MediaKind
from sensorium.vocabulary.errors import MediaError

FORMS = "a path, a data URI, base64 data, bytes, or {'bytes': …, 'path': …}"


def located(source: Any, kind: MediaKind, origin: str, folder: Path | None = None) -> bytes | Path:
    """A medium's encoded bytes, or the path of a file that holds them (relative paths start from ``folder``)."""
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, Mapping):
        return _from_struct(source, kind, origin, folder)
    if isinstance(source, Path):
        return source if folder is None else folder / source
    if isinstance(source, str):
        if source.startswith("data:"):
            return _from_data_uri(source, kind, origin)
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


def _from_struct(source: Mapping[str, Any], kind: MediaKind, origin: str, folder: Path | None) -> bytes | Path:
    held, path = source.get("bytes"), source.get("path")
    unknown = set(source) - {"bytes", "path"}
    if unknown or (held is None and path is None):
        raise MediaError(f"{origin}: a {kind} with keys {sorted(source)} cannot be read. Give {FORMS}.")
    if held is not None:
        return base64_bytes(held, kind, origin) if isinstance(held, str) else located(held, kind, origin, folder)
    return located(path, kind, origin, folder)


def _from_data_uri(uri: str, kind: MediaKind, origin: str) -> bytes:
    head, comma, body = uri.partition(",")
    if not comma:
        raise MediaError(f"{origin}: '{uri[:40]}' is not a data URI; its data must follow a comma.")
    return base64_bytes(body, kind, origin) if head.endswith(";base64") else unquote_to_bytes(body)

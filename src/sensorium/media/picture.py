"""Pictures: decoding bytes to RGB, encoding PNG, and reading the forms in which data sets carry a picture."""

import base64
import binascii
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from sensorium.vocabulary.errors import MediaError

FORMS = "a path, a data URI, base64 data, bytes, or {'bytes': …, 'path': …}"


def decode_picture(data: bytes, origin: str) -> Image.Image:
    """An RGB picture, upright, transparency on white. Every pixel is read, so a truncated file is found here."""
    if not data:
        raise MediaError(f"{origin}: the picture is empty (0 bytes). Restore the file or drop the row.")
    try:
        image: Image.Image = Image.open(BytesIO(data))
        if getattr(image, "is_animated", False) and image.format != "MPO":
            frames = getattr(image, "n_frames", 0)
            raise MediaError(f"{origin}: an animation of {frames} frames is not one picture. Extract the frame you mean.")
        image.load()
        return _on_white(ImageOps.exif_transpose(image))
    except MediaError:
        raise
    except UnidentifiedImageError as error:
        raise MediaError(f"{origin}: these {len(data)} bytes are no picture in a known format, or a broken one.") from error
    except Exception as error:  # Pillow's readers raise whatever a broken file provokes: OSError, SyntaxError, …
        raise MediaError(f"{origin}: cannot decode the picture: {error}. Restore the file or drop the row.") from error


def _on_white(image: Image.Image) -> Image.Image:
    """RGB without transparency; 16-bit grey is scaled, not clipped."""
    if image.mode.startswith("I"):
        levels = np.clip(np.asarray(image).astype(np.int64), 0, 65535) >> 8
        image = Image.fromarray(levels.astype(np.uint8))
    if image.mode == "F":
        raise ValueError("floating-point pixels have no agreed range; save it with 8 or 16 bits")
    if image.has_transparency_data:
        layered = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layered.size, "white"), layered)
    return image.convert("RGB")


def encode_png(picture: "Image.Image | np.ndarray[Any, Any]") -> bytes:
    """PNG bytes of a picture or of a uint8 array [height, width] or [height, width, 3]; equal pixels give equal bytes."""
    if isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8:
            raise ValueError(f"a picture array holds uint8, not {picture.dtype}")
        picture = Image.fromarray(picture)
    buffer = BytesIO()
    picture.save(buffer, format="PNG", compress_level=3)  # half the time of the default, drawn pictures stay small
    return buffer.getvalue()


def picture_bytes(source: Any, origin: str, folder: Path | None = None) -> bytes:
    """The encoded bytes of a picture given as a path (relative to ``folder``), bytes, a data URI or {"bytes", "path"}."""
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, Mapping):
        return _from_struct(source, origin, folder)
    if isinstance(source, Path):
        return _from_file(source, origin, folder)
    if isinstance(source, str):
        if source.startswith("data:"):
            return _from_data_uri(source, origin)
        if "://" in source[:16]:
            raise MediaError(f"{origin}: '{source[:80]}' is remote and is not fetched. Download it and give its path.")
        return _from_file(Path(source), origin, folder)
    raise MediaError(f"{origin}: a picture cannot be read from {type(source).__name__}. Give {FORMS}.")


def base64_bytes(text: str, origin: str) -> bytes:
    """Strictly decoded base64; line breaks are allowed."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"{origin}: the picture's base64 data is broken: {error}.") from error


def _from_struct(source: Mapping[str, Any], origin: str, folder: Path | None) -> bytes:
    held, path = source.get("bytes"), source.get("path")
    unknown = set(source) - {"bytes", "path"}
    if unknown or (held is None and path is None):
        raise MediaError(f"{origin}: a picture with keys {sorted(source)} cannot be read. Give {FORMS}.")
    if held is not None:
        return base64_bytes(held, origin) if isinstance(held, str) else picture_bytes(held, origin, folder)
    return picture_bytes(path, origin, folder)


def _from_file(path: Path, origin: str, folder: Path | None) -> bytes:
    place = path if folder is None else folder / path
    try:
        return place.read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise MediaError(f"{origin}: cannot read the picture '{place}': {why}.") from error


def _from_data_uri(uri: str, origin: str) -> bytes:
    head, comma, body = uri.partition(",")
    if not comma:
        raise MediaError(f"{origin}: '{uri[:40]}' is not a data URI; its data must follow a comma.")
    return base64_bytes(body, origin) if head.endswith(";base64") else unquote_to_bytes(body)

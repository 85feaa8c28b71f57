"""Pictures: reading the forms in which data sets carry them, decoding bytes to RGB, encoding PNG.

They are resized in ``models/preprocessors.py``, frames of videos as ``frame_sizes.py`` says.
"""

import struct
import zlib
from collections.abc import Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from sensorium.data.media_files import MediaLimits, located, read_bytes
from sensorium.vocabulary.errors import MediaError

STORED_BLOCK = 65535


def indexed_png(indices_HW: np.ndarray, palette: Sequence[tuple[int, int, int]]) -> bytes:
    """An uncompressed PNG of palette indices (at most 256 colours): the same bytes with every version of zlib."""
    height, width = indices_HW.shape
    assert indices_HW.dtype == np.uint8
    assert int(indices_HW.max()) < len(palette) <= 256
    rows = b"".join(b"\0" + row.tobytes() for row in indices_HW)
    blocks = []
    for start in range(0, len(rows), STORED_BLOCK):
        block = rows[start : start + STORED_BLOCK]
        last = start + STORED_BLOCK >= len(rows)
        blocks.append(struct.pack("<BHH", last, len(block), len(block) ^ 0xFFFF) + block)
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", bytes(value for colour in palette for value in colour)),
        (b"IDAT", b"\x78\x01" + b"".join(blocks) + struct.pack(">I", zlib.adler32(rows))),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )


# Formats that are tried. Some others run programs (EPS calls Ghostscript), and pictures are untrusted data.
FORMATS = (
    "PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF", "HEIF", "JPEG2000", "ICO", "TGA", "QOI",
)  # fmt: skip


def decode_picture(data: bytes, origin: str, limits: MediaLimits | None = None) -> Image.Image:
    """An RGB picture, upright, transparency on white. Every pixel is read, so a truncated file is found here.

    One with more pixels than ``limits`` allow is refused by its header, before any of them is decoded.
    """
    if not data:
        raise MediaError(f"{origin}: the picture is empty (0 bytes). Restore the file or drop the row.")
    try:
        image: Image.Image = Image.open(BytesIO(data), formats=_formats())
        problem = (limits or MediaLimits()).refuse_pixels(*image.size, "a picture")
        if problem:
            raise MediaError(f"{origin}: {problem}")
        if getattr(image, "is_animated", False) and image.format != "MPO":
            frames = getattr(image, "n_frames", 0)
            raise MediaError(f"{origin}: an animation of {frames} frames is not one picture. Extract the frame you mean.")
        image.load()
        return _on_white(ImageOps.exif_transpose(image))
    except MediaError:
        raise
    except Image.DecompressionBombError as error:
        raise MediaError(f"{origin}: {error}. Shrink the picture or drop the row.") from error
    except UnidentifiedImageError as error:
        raise MediaError(f"{origin}: these {len(data)} bytes are no picture in a known format, or a broken one.") from error
    except Exception as error:  # Pillow's readers raise whatever a broken file provokes: OSError, SyntaxError, …
        raise MediaError(f"{origin}: cannot decode the picture: {error}. Restore the file or drop the row.") from error


@cache
def _formats() -> tuple[str, ...]:
    """Those of FORMATS that this Pillow has; it fails for others."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


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
    found = located(source, "picture", origin, folder)
    return read_bytes(found, "picture", origin) if isinstance(found, Path) else found

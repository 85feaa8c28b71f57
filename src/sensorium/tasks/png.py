"""Writing a PNG by hand. The bytes, and so the content hash, do not depend on a machine's compression library."""

import struct
import zlib
from collections.abc import Sequence

import numpy as np

STORED_BLOCK = 65535


def indexed_png(indices_HW: np.ndarray, palette: Sequence[tuple[int, int, int]]) -> bytes:
    """An uncompressed PNG of palette indices (at most 256 colours)."""
    height, width = indices_HW.shape
    assert indices_HW.dtype == np.uint8
    assert int(indices_HW.max()) < len(palette) <= 256
    rows = b"".join(b"\0" + row.tobytes() for row in indices_HW)
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    colours = bytes(value for colour in palette for value in colour)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(name, body)
        for name, body in ((b"IHDR", header), (b"PLTE", colours), (b"IDAT", _stored(rows)), (b"IEND", b""))
    )


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def _stored(data: bytes) -> bytes:
    """A zlib stream of stored (uncompressed) blocks."""
    blocks = []
    for start in range(0, len(data), STORED_BLOCK):
        block = data[start : start + STORED_BLOCK]
        last = start + STORED_BLOCK >= len(data)
        blocks.append(struct.pack("<BHH", last, len(block), len(block) ^ 0xFFFF) + block)
    return b"\x78\x01" + b"".join(blocks) + struct.pack(">I", zlib.adler32(data))

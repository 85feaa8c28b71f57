"""Pictures of grids in flat colours: a square of so many pixels for each place, smaller squares for what stands on it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sensorium.media.picture import encode_png

Colour = tuple[int, int, int]


class Mark(NamedTuple):
    """A smaller square on a place, ``inset`` pixels from each of its edges."""

    row: int
    column: int
    inset: int
    colour: Colour


def draw_tiles(colours: Sequence[Sequence[Colour]], marks: Sequence[Mark], cell: int) -> bytes:
    """PNG bytes of a grid: the colour of each place, then the marks in order."""
    pixels = np.array(colours, np.uint8).repeat(cell, axis=0).repeat(cell, axis=1)
    for mark in marks:
        top, left = mark.row * cell, mark.column * cell
        pixels[top + mark.inset : top + cell - mark.inset, left + mark.inset : left + cell - mark.inset] = mark.colour
    return encode_png(pixels)

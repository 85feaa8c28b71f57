"""Environments on grids: pictures in flat colours, and paths that a breadth-first search found."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from sensorium.data.pictures import encode_png

Colour = tuple[int, int, int]
Place = TypeVar("Place")
MAX_PIXELS_ACROSS = 4096


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


def path_to(end: Place, came: Mapping[Place, tuple[Place, int] | None]) -> tuple[int, ...]:
    """The actions that led to ``end``. ``came`` has the place before each place and the action; None for the first."""
    actions = []
    step = came[end]
    while step is not None:
        actions.append(step[1])
        step = came[step[0]]
    return tuple(actions[::-1])

"""How alike two pictures are, from 0 (no more than an empty canvas) to 1 (the same), by pixels and by edges."""

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
EDGE = 40.0
"""Grey levels between neighbouring pixels from which on there is an edge."""


def pixel_similarity(target: Pixels, drawn: Pixels) -> float:
    """1 less the difference of the pixels, as a share of all that both pictures put on the white canvas.

    So an empty drawing and one that is nowhere right earn nothing, however much of both is white.
    """
    wanted, found = target.astype(np.float64), drawn.astype(np.float64)
    ink = (255.0 - wanted).sum() + (255.0 - found).sum()
    return float(1.0 - np.abs(wanted - found).sum() / ink) if ink else 1.0


def structural_similarity(target: Pixels, drawn: Pixels) -> float:
    """The overlap of the edges: the harmonic mean of how many of each picture's lie within a pixel of the other's."""
    wanted, found = _edges(target), _edges(drawn)
    if not wanted.any() or not found.any():
        return float(wanted.any() == found.any())
    kept = (wanted & _widened(found)).sum() / wanted.sum()
    right = (found & _widened(wanted)).sum() / found.sum()
    return float(2 * kept * right / (kept + right)) if kept + right else 0.0


def _edges(picture: Pixels) -> NDArray[np.bool_]:
    grey = picture.astype(np.float64) @ np.array([0.299, 0.587, 0.114])
    edges = np.zeros(grey.shape, bool)
    edges[:, 1:] |= np.abs(np.diff(grey, axis=1)) > EDGE
    edges[1:, :] |= np.abs(np.diff(grey, axis=0)) > EDGE
    return edges


def _widened(edges: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Edges and the pixels beside them."""
    padded = np.pad(edges, 1)
    height, width = edges.shape
    wide = np.zeros_like(edges)
    for down in range(3):
        for right in range(3):
            wide |= padded[down : down + height, right : right + width]
    return wide

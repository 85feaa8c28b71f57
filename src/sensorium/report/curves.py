"""Curves made of characters: a braille chart for the terminal, and the smoothing that terminal and page share."""

from collections.abc import Sequence
from itertools import pairwise

BLOCKS = "▁▂▃▄▅▆▇█"
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def smooth(values: Sequence[float], span: int = 0) -> list[float]:
    """A running mean over about a twelfth of the curve, centred, shorter at both ends; short curves stay as they are."""
    reach = (span or len(values) // 12) // 2
    return [_mean(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]


def resample(values: Sequence[float], width: int) -> list[float]:
    """At most ``width`` values: means of equal stretches of the curve."""
    if len(values) <= width:
        return list(values)
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [_mean(values[a:b]) for a, b in pairwise(edges)]


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """A curve in one line of blocks."""
    points = resample(values, width)
    if not points:
        return ""
    low, high = min(points), max(points)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((point - low) * scale)] for point in points)


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """The range of an axis: 0 to 1 for shares, else the values' own with a little air."""
    low, high = min(values), max(values)
    if low >= 0 and high <= 1:
        return 0.0, 1.0
    air = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    return low - air, high + air


def chart(values: Sequence[float], width: int, height: int, low: float, high: float) -> list[str]:
    """A curve as ``height`` rows of braille, ``width`` characters wide: two by four dots a character, joined up."""
    cells = [[0] * width for _ in range(height)]
    points = resample(values, 2 * width)
    stretch = (2 * width - 1) / (len(points) - 1) if len(points) > 1 else 0.0
    rows = [_row(point, low, high, 4 * height) for point in points]
    for i, row in enumerate(rows):
        following = rows[i + 1] if i + 1 < len(rows) else row
        start, end = round(i * stretch), round((i + 1) * stretch) if i + 1 < len(rows) else round(i * stretch) + 1
        for x in range(start, min(end, 2 * width)):
            share = (x - start) / (end - start)
            here = round(row + (following - row) * share)
            there = round(row + (following - row) * min(1.0, share + 1 / (end - start)))
            for y in range(min(here, there), max(here, there) + 1):
                cells[y // 4][x // 2] |= DOTS[y % 4][x % 2]
    return ["".join(chr(0x2800 + cell) for cell in line) for line in cells]


def _row(value: float, low: float, high: float, rows: int) -> int:
    share = (value - low) / (high - low) if high > low else 0.5
    return round((1 - min(1.0, max(0.0, share))) * (rows - 1))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

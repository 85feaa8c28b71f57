"""Curves in braille and blocks for the console, and as inline SVG for the page: axes, smoothed lines, intervals."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise

BLOCKS = "▁▂▃▄▅▆▇█"
SMALL = 0.05  # shares below it would lie on the axis
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def smooth(values: Sequence[float], span: int = 0) -> list[float]:
    """A centred running mean over about a twelfth of the curve; short curves are unchanged."""
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
    """The range of an axis: 0 to 1 for shares, from 0 for what stays below 0.05, else that of the values with a margin."""
    low, high = min(values), max(values)
    if low >= 0 and high <= 1:
        return 0.0, high * 1.05 if 0 < high < SMALL else 1.0
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


POINTS = 600
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One curve in one of the page's colours; ``marks`` draws points (with intervals, if given), not a line.

    ``band`` is the area from low to high behind it, an edge pair a point.
    """

    name: str
    points: tuple[Point, ...]
    colour: int = 0
    marks: bool = False
    intervals: tuple[tuple[float, float] | None, ...] = ()
    band: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Axis:
    """The steps that all charts of a page show.

    ``divide`` is the last step of the warm start, ``forked`` the last one that the run's ancestor made, if any.
    """

    first: float
    last: float
    divide: float | None = None
    forked: float | None = None


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    axis: Axis | None = None,
    width: int = 640,
    height: int = 280,
    wide: bool = False,
) -> str:
    """A chart of curves over steps; the page's script adds a crosshair. A ``wide`` one fills the page if there is room."""
    series = [_thinned(one) for one in series if one.points]
    if not series:
        return ""
    sizes = [(1310, "chart roomy"), (width, "chart tight")] if wide else [(width, "chart")]
    drawn = "".join(_svg(title, series, axis, across, height, kind) for across, kind in sizes)
    keys = "".join(f'<span class="key c{one.colour}"><i></i>{escape(one.name)}</span>' for one in series)
    legend = f'<span class="legend">{keys}</span>' if len(series) > 1 else ""
    caption = f"<figcaption><b>{escape(title)}</b>{legend}</figcaption>"
    body = f'<div class="plot-body">{drawn}<div class="tip" hidden></div></div>'
    return f'<figure class="plot{" wide" if wide else ""}">{caption}{body}</figure>'


def _svg(title: str, series: Sequence[Series], axis: Axis | None, width: int, height: int, kind: str) -> str:
    frame, words = _Frame.around(series, axis, width, height), escape(_in_words(title, series))
    return "".join(
        [
            f'<svg class="{kind}" viewBox="0 0 {width} {height}" role="img" aria-label="{words}" '
            f'data-chart="{escape(json.dumps(_data(series, frame)))}">',
            *_axes(frame),
            *(_divider(axis.divide, frame, "SFT", "RL") if axis is not None and axis.divide is not None else ()),
            *(_divider(axis.forked, frame, "ancestor", "fork") if axis is not None and axis.forked is not None else ()),
            *(_band(one, frame) for one in series if one.band),
            *(_marks(one, frame) if one.marks else _curve(one, frame) for one in series),
            f'<g class="cross" visibility="hidden"><line y1="{frame.top}" y2="{frame.bottom}"/></g>',
            "</svg>",
        ]
    )


@dataclass(frozen=True)
class _Frame:
    """Positions of numbers in the picture."""

    left: float
    right: float
    top: float
    bottom: float
    first: float
    last: float
    low: float
    high: float

    @staticmethod
    def around(series: Sequence[Series], axis: Axis | None, width: int, height: int) -> "_Frame":
        steps = [x for one in series for x, _ in one.points] + ([axis.first, axis.last] if axis is not None else [])
        values = [y for one in series for _, y in one.points]
        values += [edge for one in series for interval in one.intervals if interval for edge in interval]
        values += [edge for one in series for edges in one.band for edge in edges]
        low, high = bounds(values)
        first, last = min(steps), max(steps)
        return _Frame(46, width - 14, 12, height - 30, first, last if last > first else first + 1, low, high)

    def x(self, step: float) -> float:
        return self.left + (step - self.first) / (self.last - self.first) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - (value - self.low) / (self.high - self.low) * (self.bottom - self.top)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers between two bounds, about ``count`` of them."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    start = math.ceil(low / step - 1e-9)
    digits = max(12, 2 - math.floor(math.log10(step)))
    return [round(n * step, digits) for n in range(start, math.floor(high / step + 1e-9) + 1)]


def _number(value: float) -> str:
    return f"{value:.4g}" if value == 0 or 0.001 <= abs(value) < 10_000 else f"{value:.2g}"


def _axes(frame: _Frame) -> list[str]:
    parts = []
    for value in ticks(frame.low, frame.high, 5):
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{frame.left}" x2="{frame.right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{frame.left - 8}" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>')
    whole = [step for step in ticks(frame.first, frame.last, 6) if step == int(step)]
    for i, step in enumerate(whole):
        x, words = frame.x(step), f"step {int(step)}" if i == 0 else f"{int(step)}"
        x, anchor = (frame.left, "start") if i == 0 and x < frame.left + 44 else (x, "middle")
        parts.append(f'<text class="tick" x="{x:.1f}" y="{frame.bottom + 20}" text-anchor="{anchor}">{words}</text>')
    return parts


def _divider(after: float, frame: _Frame, before: str, then: str) -> list[str]:
    x, names = frame.x(after), []
    if x - frame.left > 60:
        names.append(f'<text class="tick stage" x="{x - 6:.1f}" y="{frame.top + 6}" text-anchor="end">{before}</text>')
    names.append(f'<text class="tick stage" x="{x + 6:.1f}" y="{frame.top + 6}">{then}</text>')
    return [f'<line class="divide" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.top - 6}" y2="{frame.bottom}"/>', *names]


def _curve(series: Series, frame: _Frame) -> str:
    values = smooth([y for _, y in series.points])
    line = _path([(x, y) for (x, _), y in zip(series.points, values, strict=True)], frame)
    if len(series.points) == 1:
        x, y = series.points[0]
        return f'<circle class="c{series.colour} dot" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="4"/>'
    raw = "" if series.band else f'<path class="c{series.colour} raw" d="{_path(series.points, frame)}"/>'
    return f'{raw}<path class="c{series.colour} line" d="{line}"/>'


def _band(series: Series, frame: _Frame) -> str:
    """The area between the edges, smoothed as the curve is."""
    lows, highs = (list(edges) if series.marks else smooth(list(edges)) for edges in zip(*series.band, strict=True))
    steps = [x for x, _ in series.points]
    around = [*zip(steps, highs, strict=True), *reversed(list(zip(steps, lows, strict=True)))]
    return f'<path class="c{series.colour} band" d="{_path(around, frame)}Z"/>'


def _marks(series: Series, frame: _Frame) -> str:
    parts = [f'<path class="c{series.colour} join" d="{_path(series.points, frame)}"/>']
    intervals = series.intervals or (None,) * len(series.points)
    for (x, y), interval in zip(series.points, intervals, strict=True):
        at = frame.x(x)
        if interval:
            low, high = frame.y(interval[0]), frame.y(interval[1])
            parts.append(
                f'<line class="c{series.colour} whisker" x1="{at:.1f}" x2="{at:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
            )
        parts.append(f'<circle class="c{series.colour} dot" cx="{at:.1f}" cy="{frame.y(y):.1f}" r="4"/>')
    return "".join(parts)


def _path(points: Sequence[Point], frame: _Frame) -> str:
    return "M" + "L".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)


def _data(series: Sequence[Series], frame: _Frame) -> dict[str, object]:
    curves = [
        {
            "name": one.name,
            "colour": one.colour,
            "points": [[round(frame.x(x), 1), round(frame.y(y), 1), x, _number(y)] for x, y in one.points],
        }
        for one in series
    ]
    return {"left": frame.left, "right": frame.right, "series": curves}


def _in_words(title: str, series: Sequence[Series]) -> str:
    words = [
        f"{one.name} from {_number(one.points[0][1])} at step {one.points[0][0]:g} to {_number(one.points[-1][1])} at step "
        f"{one.points[-1][0]:g}"
        for one in series
    ]
    return f"{title}: " + "; ".join(words)


def _thinned(series: Series) -> Series:
    stride = -(-len(series.points) // POINTS)
    if stride <= 1:
        return series
    kept = [i for i in range(len(series.points)) if i % stride == 0 or i == len(series.points) - 1]
    points = tuple(series.points[i] for i in kept)
    intervals = tuple(series.intervals[i] for i in kept) if series.intervals else ()
    band = tuple(series.band[i] for i in kept) if series.band else ()
    return replace(series, points=points, intervals=intervals, band=band)

"""Pictures to draw again, made from seeds: flat shapes, each in a cell of its own of a grid.

Shapes never overlap and are listed cell by cell, so two different codes are two different pictures: a hash of the code
tells train from test. A seed may stand for

    <svg viewBox="0 0 96 96"><circle cx="16" cy="16" r="12" fill="red"/><rect x="68" y="36" …/></svg>

whose state is circle at (0, 0), rect at (1, 2): rows and columns of the grid from 0 at the top left.
"""

import random
import re
from collections.abc import Sequence
from functools import lru_cache
from xml.parsers import expat

from sensorium.envs.svg.checks import SvgRefused, checked, svg_in
from sensorium.media.store import MediaStore
from sensorium.recipe.names import build
from sensorium.vocabulary.errors import EnvironmentFailure
from sensorium.vocabulary.task import Task

COLOURS = ("red", "green", "blue", "orange", "purple", "black", "teal", "gold")
KINDS = ("circle", "rect", "ellipse", "polygon")
CELL = 32
RADII = (8, 10, 12, 14)

State = dict[str, frozenset[tuple[int, int]]]


@lru_cache(maxsize=4096)
def target_code(grid: int, shapes: int, seed: int) -> str:
    """The SVG code that a seed stands for: 1 to ``shapes`` shapes on a grid of ``grid`` x ``grid`` cells."""
    chance = random.Random(f"svg/{grid}/{shapes}/{seed}")
    cells = sorted(chance.sample(range(grid * grid), chance.randint(1, shapes)))
    drawn = "".join(_shape(chance, *divmod(cell, grid)) for cell in cells)
    return f'<svg viewBox="0 0 {grid * CELL} {grid * CELL}">{drawn}</svg>'


def row_code(data: str, split: str, column: str, seed: int) -> str:
    """The SVG code of the row of a data set that a seed stands for, chosen as VAGEN chooses it."""
    rows = _rows(data, split, column)
    number = random.Random(seed).randint(0, len(rows) - 1)
    code = svg_in(str(rows[number].answer or ""))
    if code is None:
        raise EnvironmentFailure(f"svg: row {number} of '{data}', split '{split}', has no SVG code in '{column}'.")
    return code


@lru_cache(maxsize=4)
def _rows(data: str, split: str, column: str) -> Sequence[Task]:
    rows: Sequence[Task] = build(
        "source",
        "hub",
        {"data": data, "split": split, "columns": {"answer": column}, "environment": {"name": "svg"}},
        "svg",
        store=MediaStore(),
    )
    return rows


def _shape(chance: random.Random, row: int, column: int) -> str:
    kind, colour = chance.choice(KINDS), chance.choice(COLOURS)
    x, y, wide, high = CELL * column + CELL // 2, CELL * row + CELL // 2, chance.choice(RADII), chance.choice(RADII)
    if kind == "circle":
        return f'<circle cx="{x}" cy="{y}" r="{wide}" fill="{colour}"/>'
    if kind == "rect":
        return f'<rect x="{x - wide}" y="{y - high}" width="{2 * wide}" height="{2 * high}" fill="{colour}"/>'
    if kind == "ellipse":
        high = RADII[(RADII.index(wide) + 1 + chance.randrange(len(RADII) - 1)) % len(RADII)]
        return f'<ellipse cx="{x}" cy="{y}" rx="{wide}" ry="{high}" fill="{colour}"/>'
    return f'<polygon points="{x},{y - high} {x + wide},{y + high} {x - wide},{y + high}" fill="{colour}"/>'


def state_of(code: str, grid: int) -> State:
    """Where the shapes of an SVG are: cells of a grid over its view box, by kind of shape. Groups are not followed."""
    shapes: dict[str, set[tuple[int, int]]] = {kind: set() for kind in KINDS}
    box = [0.0, 0.0, float(grid * CELL), float(grid * CELL)]

    def start(name: str, attributes: dict[str, str]) -> None:
        kind = name.rpartition(" ")[2]
        if kind == "svg":
            given = _numbers(attributes.get("viewBox", ""))
            sides = _numbers(attributes.get("width", "")) + _numbers(attributes.get("height", ""))
            box[:] = given if len(given) == 4 else [0.0, 0.0, *sides] if len(sides) == 2 else box
        elif kind in shapes and (centre := _centre(kind, attributes)) and box[2] > 0 and box[3] > 0:
            column, row = (int((at - low) / side * grid) for at, low, side in zip(centre, box[:2], box[2:], strict=True))
            if 0 <= row < grid and 0 <= column < grid:
                shapes[kind].add((row, column))

    parser = expat.ParserCreate(namespace_separator=" ")
    parser.StartElementHandler = start
    try:
        parser.Parse(checked(code).encode(), True)
    except (SvgRefused, expat.ExpatError, OverflowError, ValueError):
        return {}
    return {kind: frozenset(cells) for kind, cells in shapes.items() if cells}


def _centre(kind: str, attributes: dict[str, str]) -> tuple[float, float] | None:
    if kind == "polygon":
        points = _numbers(attributes.get("points", ""))
        xs, ys = points[::2], points[1::2]
        return ((min(xs) + max(xs)) / 2, (min(ys) + max(ys)) / 2) if xs and ys else None
    names = ("x", "y", "width", "height") if kind == "rect" else ("cx", "cy")
    values = [(_numbers(attributes.get(name, "0")) or [0.0])[0] for name in names]
    return (values[0] + values[2] / 2, values[1] + values[3] / 2) if kind == "rect" else (values[0], values[1])


def _numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"[-+]?(?:\d{1,9}\.?\d{0,9}|\.\d{1,9})", text[:10_000])]

"""The SVG environment: a picture is shown, and the answer is SVG code that draws it. It may be revised.

Generated shapes never overlap and are listed cell by cell, so two different codes are two different pictures, and a
hash of the code tells train from test. The picture of a seed may be

    <svg viewBox="0 0 96 96"><circle cx="16" cy="16" r="12" fill="red"/><rect x="68" y="36" …/></svg>

whose state is circle at (0, 0), rect at (1, 2): rows and columns of the grid from 0 at the top left.

SVG that a model wrote is checked before any renderer sees it, then drawn in child processes that can be killed. The
renderer reads local files that an ``<image>`` names, crashes on deep nesting and can be made to work for minutes. So
only listed elements pass, references go to ids of the same code, and copies by ``<use>`` are counted as if written out:

    <g id="a"><rect/><rect/></g><g id="b"><use href="#a"/><use href="#a"/></g>     counts 2 g + 2 rects + 2 x 4 = 12

Each further level doubles it, so a use-bomb of 30 lines is refused without being drawn. Whatever the code does,
``draw`` returns a picture or raises SvgRefused within ``DEADLINE_S`` (plus the start of a process).
"""

import importlib.util
import os
import random
import re
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, Unpack
from xml.parsers import expat

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sensorium.cluster.python_process import PipedProcess, ProcessLost
from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.envs.actions import (
    ActionTurn,
    PlayedTurn,
    State,
    TurnEnvironment,
    TurnOptions,
    describe,
    observation_of,
)
from sensorium.envs.protocol import Observation, StepResult, within
from sensorium.recipe.registry import build
from sensorium.vocabulary.content import Media, Message, system
from sensorium.vocabulary.errors import EnvironmentFailure, MediaError, RecipeError
from sensorium.vocabulary.task import Task

MAX_BYTES = 100_000
MAX_NODES = 5_000  # elements, those that are copied by reference included
MAX_DEPTH = 50
MAX_ATTRIBUTE_BYTES = 50_000

SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"

# The elements that pass. Filters are not among them: one line of them can keep a processor busy for minutes.
DRAWN = frozenset(
    [
        "svg", "g", "defs", "use", "symbol", "path", "rect", "circle", "ellipse", "line", "polyline", "polygon", "text",
        "tspan", "clipPath", "mask", "linearGradient", "radialGradient", "stop", "pattern", "marker", "title", "desc",
        "metadata", "style",
    ]
)  # fmt: skip

OUTSIDE = re.compile(r"url\(\s*(?![\"']?#)|@import|expression\s*\(|javascript:|data:|file:|https?:", re.IGNORECASE)
POINTED = re.compile(r"url\(\s*[\"']?#([^\"')\s]+)")

DEADLINE_S = 5.0
START_S = 60.0
MEMORY_MIB = 1024  # address space of a process: the interpreter takes a small part of it, a picture a few megabytes
MAX_PROCESSES = 4
MAX_REPLY = 64 << 20

Pixels = NDArray[np.uint8]

_idle: list["_Renderer"] = []
_free = threading.BoundedSemaphore(MAX_PROCESSES)
_lock = threading.Lock()


class SvgRefused(ValueError):
    """The code is no SVG that is drawn here; the message says why, to whoever wrote it."""


@dataclass
class _Element:
    depth: int
    inside: list["_Element"] = field(default_factory=list)
    refers: list[str] = field(default_factory=list)


def svg_in(text: str) -> str | None:
    """The last complete SVG in a text, None without one."""
    end = text.rfind("</svg>")
    if end < 0:
        found = re.findall(r"<svg\b[^<>]*/>", text[-MAX_BYTES:])
        return found[-1] if found else None
    start = text.find("<svg")
    return text[start : end + len("</svg>")] if 0 <= start < end else None


def checked(code: str) -> str:
    """The code as a renderer may have it, its namespaces declared; raises SvgRefused with the reason."""
    if len(code) > MAX_BYTES or len(code.encode("utf-8", "replace")) > MAX_BYTES:
        raise SvgRefused(f"it is longer than {MAX_BYTES:,} bytes")
    code = _with_namespaces(code.strip())
    reader = _Reader()
    try:
        reader.read(code.encode())
    except expat.ExpatError as error:
        raise SvgRefused(f"it is not well-formed XML ({error})") from error
    except UnicodeEncodeError as error:
        raise SvgRefused("it holds characters that are no text") from error
    reader.refuse_copies()
    return code


class _Reader:
    """Reads the elements once, and stops at the first thing that is not allowed."""

    def __init__(self) -> None:
        self.root: _Element | None = None
        self.by_id: dict[str, _Element] = {}
        self._open: list[_Element] = []
        self._count = 0
        self._in_style = 0

    def read(self, code: bytes) -> None:
        def refuse(what: str) -> None:
            raise SvgRefused(f"a {what} is not allowed in it")

        parser = expat.ParserCreate(namespace_separator=" ")
        parser.StartDoctypeDeclHandler = lambda *_: refuse("DOCTYPE")
        parser.ProcessingInstructionHandler = lambda *_: refuse("processing instruction")
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._text
        parser.buffer_text = True
        parser.Parse(code, True)

    def refuse_copies(self) -> None:
        """Count every element as often as it is drawn; refuse too many, and what refers to itself."""
        counts: dict[int, int] = {}
        assert self.root is not None
        stack: list[tuple[_Element, bool]] = [(self.root, False)]
        path: set[int] = set()
        while stack:
            element, visited = stack.pop()
            parts = element.inside + [self.by_id[id] for id in element.refers if id in self.by_id]
            if visited:
                path.discard(id(element))
                counts[id(element)] = 1 + sum(counts[id(part)] for part in parts)
                if counts[id(element)] > MAX_NODES:
                    raise SvgRefused(f"it draws more than {MAX_NODES:,} elements, copies included")
            elif id(element) not in counts and id(element) not in path:
                path.add(id(element))
                stack.append((element, True))
                for part in parts:
                    if id(part) in path:
                        raise SvgRefused("an element in it refers to itself")
                    if id(part) not in counts:
                        stack.append((part, False))

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        space, _, kind = name.rpartition(" ")
        if self.root is None and kind != "svg":
            raise SvgRefused(f"it begins with <{kind:.40}>, not <svg>")
        if space in ("", SVG) and kind not in DRAWN:
            raise SvgRefused(f"<{kind:.40}> is not allowed in it")
        self._count += 1
        if self._count > MAX_NODES:
            raise SvgRefused(f"it has more than {MAX_NODES:,} elements")
        element = _Element(len(self._open) + 1)
        if element.depth > MAX_DEPTH:
            raise SvgRefused(f"its elements are nested more than {MAX_DEPTH} deep")
        for key, value in attributes.items():
            self._attribute(element, key.rpartition(" ")[2], value)
        if self._open:
            self._open[-1].inside.append(element)
        self.root = self.root or element
        self._open.append(element)
        self._in_style += kind == "style"

    def _attribute(self, element: _Element, key: str, value: str) -> None:
        if len(value) > MAX_ATTRIBUTE_BYTES:
            raise SvgRefused(f"its attribute {key:.40} is longer than {MAX_ATTRIBUTE_BYTES:,} characters")
        if key.lower().startswith("on"):
            raise SvgRefused(f"{key:.40} is not allowed in it")
        if key == "id":
            self.by_id.setdefault(value, element)
        if key in ("href", "src"):
            if not value.strip().startswith("#"):
                raise SvgRefused(f"{key} may refer only to #id in it")
            element.refers.append(value.strip()[1:])
        elif _leads_outside(value):
            raise SvgRefused(f"its attribute {key:.40} refers to something outside")
        element.refers += POINTED.findall(value)

    def _end(self, name: str) -> None:
        self._open.pop()
        self._in_style -= name.rpartition(" ")[2] == "style"

    def _text(self, text: str) -> None:
        if self._in_style and (_leads_outside(text) or "url" in (text + _unescaped(text)).lower()):
            raise SvgRefused("a style sheet in it refers to something")


def _leads_outside(value: str) -> bool:
    """Whether an attribute or a style refers to anything but an id, with or without its escapes and comments."""
    return bool(OUTSIDE.search(value) or OUTSIDE.search(_unescaped(value)))


def _unescaped(value: str) -> str:
    """CSS without its escapes and comments, so that they hide nothing."""

    def character(found: re.Match[str]) -> str:
        number = int(found[1], 16)
        return chr(number) if 0 < number < 0x110000 and not 0xD800 <= number < 0xE000 else ""

    before, *comments = value.split("/*")
    plain = before + "".join(comment.partition("*/")[2] for comment in comments)
    return re.sub(r"\\([0-9a-fA-F]{1,6})\s?", character, plain).replace("\\", "")


def _with_namespaces(code: str) -> str:
    """The code with the usual namespaces declared on its root, which models forget."""
    head = re.match(r"(?:<\?xml\s[^<>]*\?>\s*)?<svg\b([^<>]*)", code)
    if head is None:
        return code
    missing = "" if re.search(r"\sxmlns\s*=", head[1]) else f' xmlns="{SVG}"'
    if "xlink:" in code and "xmlns:xlink" not in head[1]:
        missing += f' xmlns:xlink="{XLINK}"'
    at = head.start(1)
    return re.sub(r"^<\?xml\s[^<>]*\?>\s*", "", code[:at] + missing + code[at:])


def refuse_missing() -> None:
    """Say what to install where there is no renderer."""
    if importlib.util.find_spec("resvg_py") is None:
        raise RecipeError("svg: drawing needs the package resvg-py; install it with: pip install 'sensorium[svg]'.")


def draw(code: str, side: int) -> Pixels:
    """The picture of an SVG on white, uint8 of [side, side, 3]; one of another shape is centred. Raises SvgRefused."""
    return _drawn(checked(code), side)


def centred(picture: Image.Image, side: int) -> Pixels:
    """A picture in the middle of a white square."""
    canvas = Image.new("RGB", (side, side), "white")
    canvas.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
    return np.asarray(canvas)


@lru_cache(maxsize=64)
def _drawn(code: str, side: int) -> Pixels:
    with _free:
        process = _taken()
        try:
            failed, reply = process.ask(code, side)
        except ProcessLost as lost:
            process.end()
            raise SvgRefused(f"it could not be drawn ({lost})") from lost
        with _lock:
            _idle.append(process)
    if failed:
        raise SvgRefused(f"it could not be drawn ({reply.decode('utf-8', 'replace')[:200]})")
    picture = Image.open(BytesIO(reply), formats=["PNG"]).convert("RGB")
    pixels = centred(picture, side)
    pixels.flags.writeable = False
    return pixels


class _Renderer(PipedProcess):
    def __init__(self) -> None:
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PATH": os.environ.get("PATH", "")}
        script = str(Path(__file__).with_name("svg_render_child.py"))
        super().__init__([sys.executable, "-P", script, str(MEMORY_MIB)], variables, "/", silent=True)
        self._started = False

    def ask(self, code: str, side: int) -> tuple[bool, bytes]:
        """Whether drawing failed, and the PNG or the error; ProcessLost where no answer comes in time."""
        text = code.encode()
        until = time.monotonic() + DEADLINE_S + (0.0 if self._started else START_S)
        self.write(struct.pack(">II", side, len(text)) + text)
        try:
            failed, length = struct.unpack(">BI", self.read(5, until))
            if length > MAX_REPLY:
                raise ProcessLost("its picture is too large")
            self._started = True
            return bool(failed), self.read(length, until)
        except TimeoutError as error:
            raise ProcessLost(f"it takes longer than {DEADLINE_S:g} s") from error


def _taken() -> _Renderer:
    with _lock:
        while _idle:
            process = _idle.pop()
            if process.alive:
                return process
    return _Renderer()


NAME = "svg"
EDGE = 40.0  # grey levels between neighbouring pixels that make an edge
COLOURS = ("red", "green", "blue", "orange", "purple", "black", "teal", "gold")
KINDS = ("circle", "rect", "ellipse", "polygon")
CELL = 32
RADII = (8, 10, 12, 14)
DEFAULTS = {"grid": 3, "shapes": 4}
RULES = (
    "You are shown a picture. Write SVG code that draws it, as exactly as you can: shapes, colours, places. Text, filters, "
    "scripts and pictures from files are not drawn."
)


def pixel_similarity(target: Pixels, drawn: Pixels) -> float:
    """1 minus the difference of the pixels, as a share of all that both pictures put on the white canvas.

    So an empty drawing and one that is nowhere right score 0, however much of both is white.
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
    wide: NDArray[np.bool_] = np.lib.stride_tricks.sliding_window_view(np.pad(edges, 1), (3, 3)).max(axis=(2, 3))
    return wide


@lru_cache(maxsize=4096)
def target_code(grid: int, shapes: int, seed: int) -> str:
    """The SVG code of a seed: 1 to ``shapes`` shapes on a grid of ``grid`` x ``grid`` cells."""
    chance = random.Random(f"svg/{grid}/{shapes}/{seed}")
    cells = sorted(chance.sample(range(grid * grid), chance.randint(1, shapes)))
    drawn = "".join(_shape(chance, *divmod(cell, grid)) for cell in cells)
    return f'<svg viewBox="0 0 {grid * CELL} {grid * CELL}">{drawn}</svg>'


def row_code(data: str, split: str, column: str, seed: int) -> str:
    """The SVG code of the row of a data set that a seed chooses, as in VAGEN."""
    rows = _rows(data, split, column)
    number = random.Random(seed).randint(0, len(rows) - 1)
    code = svg_in(str(rows[number].answer or ""))
    if code is None:
        raise EnvironmentFailure(f"svg: row {number} of '{data}', split '{split}', has no SVG code in '{column}'.")
    return code


@lru_cache(maxsize=4)
def _rows(data: str, split: str, column: str) -> Sequence[Task]:
    options = {"data": data, "split": split, "columns": {"answer": column}, "environment": {"name": NAME}}
    rows: Sequence[Task] = build("source", "hub", options, NAME, store=MediaStore())
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


class SvgDrawing(TurnEnvironment):
    """One picture, drawn in up to ``max_turns`` attempts; after each the drawing is shown. An answer without SVG ends it.

    From seeds, pictures are 1 to ``shapes`` flat shapes on a grid. A row brings its own: its picture, or SVG code as its
    answer. Each attempt gets ``format_reward`` for code that is drawn, in the form asked for, and the similarity of the
    drawing, times a weight: ``pixel``, ``structural`` (edges), and with folders of vision models ``dino`` and
    ``dreamsim``. ``dataset`` (a hub id or a folder) has pictures as SVG code in ``dataset_column``; a seed chooses the row
    that it chooses in VAGEN.
    """

    instant = False
    recipe_only = ("dino_path", "dreamsim_path", "device", "dataset", "dataset_column")

    def __init__(
        self,
        store: MediaStore,
        task: Task | None = None,
        grid: int = 3,
        shapes: int = 4,
        side: int = 224,
        pixel_weight: float = 1.0,
        structural_weight: float = 1.0,
        dino_weight: float = 0.0,
        dreamsim_weight: float = 0.0,
        dino_path: str = "",
        dreamsim_path: str = "",
        device: str = "cpu",
        success_above: float = 0.9,
        dataset: str = "",
        dataset_split: str = "train",
        dataset_column: str = "Svg",
        **play: Unpack[TurnOptions],
    ) -> None:
        refuse_missing()
        within(NAME, "grid", grid, 1, 8)
        within(NAME, "shapes", shapes, 1, grid * grid)
        within(NAME, "side", side, 16, 1024)
        within(NAME, "success_above", success_above, 0.0, 1.0)
        self._paths = {"dino": dino_path, "dreamsim": dreamsim_path}
        weights = {"pixel": pixel_weight, "structural": structural_weight, "dino": dino_weight, "dreamsim": dreamsim_weight}
        self._weights = {term: weight for term, weight in weights.items() if weight}
        for term, weight in self._weights.items():
            if not self._paths.get(term, "none needed"):
                raise RecipeError(
                    f"svg: {term}_weight is {weight:g} without a model: set {term}_path, the folder of a vision model."
                )
        options: dict[str, Any] = {"max_turns": 2, **play}
        super().__init__(NAME, store, ["picture", "blank"], {"format": 0.0, **self._weights}, **options)
        self.side, self.device, self.success_above, self._kind, self._task = (
            side,
            device,
            success_above,
            (grid, shapes),
            task,
        )
        self._target: Pixels | None = None
        self._code = ""
        self._data = (dataset, dataset_split, dataset_column) if dataset else None
        if self._data:
            row_code(*self._data, 0)

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        """The code of a seed's picture. Different codes are different pictures."""
        if data := options.get("dataset"):
            return row_code(data, options.get("dataset_split", "train"), options.get("dataset_column", "Svg"), seed)
        return target_code(*(options.get(key, value) for key, value in DEFAULTS.items()), seed)

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        self._seed, self._turn = seed, 0
        self._code, self._target = self._chosen(seed)
        if self._rewards_descriptions and not self._code:
            raise EnvironmentFailure("svg: state_reward needs the SVG code of the picture, and the row has none as answer.")
        self._over = False
        return (system(self._rules()),), self._shown(self._target, self._form() if self.full else "")

    def step(self, response: str) -> StepResult:
        """Draw the code of the answer and compare."""
        self._refuse_over()
        parsed = self.format.parse(response)
        code = svg_in(response if parsed.answer is None else parsed.answer)
        drawn, problem = None, "There is no SVG code in the answer."
        if code is not None:
            try:
                drawn, problem = draw(code, self.side), ""
            except SvgRefused as refused:
                problem = f"The SVG code is refused: {refused}."
        scores = self._scores(drawn) if drawn is not None else {}
        worth = sum(self._weights.values())
        similarity = sum(self._weights[term] * score for term, score in scores.items()) / worth if worth else 0.0
        ended = drawn is None or self._turn + 1 >= self.max_turns
        success = bool(ended and scores and similarity >= self.success_above)
        info: dict[str, Any] = {"told": problem, "similarity": round(similarity, 6)}
        info |= {term: round(score, 6) for term, score in scores.items()}
        revise = f"Your drawing. {'Revise it.' if not self.full else 'Revise your code. ' + self._form()}"
        before, after = (state_of(text, self._kind[0]) for text in (self._code, code or ""))
        asked = ActionTurn((0,) if drawn is not None else (), parsed.sections, parsed.well_formed)
        played = PlayedTurn(1, ended, success, scores, info)
        return self._turn_result(asked, played, before, after, lambda: self._shown(drawn, revise))

    def demonstrate(self) -> str:
        self._refuse_over()
        if not self._code:
            raise EnvironmentFailure("svg: there is no SVG code of this picture to demonstrate.")
        state = describe(state_of(self._code, self._kind[0]))
        reason = "I draw each shape in its place."
        return self.format.write(self._code, think=reason, reasoning=reason, observation=state, prediction=state)

    def _chosen(self, seed: int) -> tuple[str, Pixels]:
        """The code (empty if unknown) and the pixels of the picture to draw: the row's, or the seed's."""
        task = self._task
        code = svg_in(task.answer) or "" if task is not None and isinstance(task.answer, str) else ""
        if task is not None and (shown := [item for message in task.messages for item in message.media]):
            return code, self._fitted(shown[0])
        code = code or (row_code(*self._data, seed) if self._data else target_code(*self._kind, seed))
        try:
            return code, draw(code, self.side)
        except SvgRefused as refused:
            where = f"task {task.id}" if task is not None else f"seed {seed}"
            raise EnvironmentFailure(f"svg: the SVG code of {where} cannot be drawn: {refused}.") from refused

    def _fitted(self, media: Media) -> Pixels:
        """A row's picture, within a white square."""
        if media.kind != "picture":
            raise EnvironmentFailure(f"svg: a {media.kind} cannot be drawn; the row needs a picture.")
        try:
            picture = self.store.picture(media).copy()
        except MediaError as error:
            raise EnvironmentFailure(str(error)) from error
        picture.thumbnail((self.side, self.side))
        return centred(picture, self.side)

    def _scores(self, drawn: Pixels) -> dict[str, float]:
        assert self._target is not None
        compared = {"pixel": pixel_similarity, "structural": structural_similarity}
        scores = {term: compared[term](self._target, drawn) for term in self._weights if term in compared}
        for term in self._weights:
            if term not in compared:
                model = build("similarity", term, {"path": self._paths[term], "device": self.device}, NAME)
                scores[term] = model.score(self._target, drawn)
        return scores

    def _shown(self, pixels: Pixels | None, words: str) -> Observation:
        assert pixels is not None
        if self.view == "blank":
            pixels = pixels * 0 + 255
        origin = f"svg seed {self._seed} turn {self._turn}"
        return observation_of(words, self.store.put(encode_png(pixels), "picture", origin))

    def _form(self) -> str:
        return f"Answer in this form:\n{self.format.shown('SVG code')}"

    def _rules(self) -> str:
        if not self.full:
            return "Draw this as SVG."
        grid = self._kind[0]
        states = ""
        if self._rewards_descriptions:
            states = (
                f"\nSay where shapes are (circle, rect, ellipse, polygon) by row and column of a grid of {grid} by {grid} "
                "over the picture, counted from 0 at the top left, as in: circle at (0, 1)."
            )
        example = '<svg viewBox="0 0 96 96"><circle cx="48" cy="48" r="12" fill="red"/></svg>'
        state, reason = "circle at (1, 1)", "There is one red circle in the middle."
        written = self.format.write(example, think=reason, reasoning=reason, observation=state, prediction=state)
        return f"{RULES}{states}\n{self._form()}\nFor example: {written}"

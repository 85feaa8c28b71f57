"""SVG that a model wrote: checked before any renderer sees it, then drawn in child processes that can be killed.

The renderer reads local files that an ``<image>`` names, crashes on deep nesting and can be made to work for minutes. So
only listed elements pass, references go to ids of the same code, and copies by ``<use>`` are counted as if written out:

    <g id="a"><rect/><rect/></g><g id="b"><use href="#a"/><use href="#a"/></g>     counts 2 g + 2 rects + 2 x 4 = 12

Each further level doubles it, so a use-bomb of 30 lines is refused without being drawn. Whatever the code does, ``draw``
returns a picture or raises SvgRefused within ``DEADLINE_S`` (plus the start of a process).
"""

import importlib.util
import os
import re
import struct
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from xml.parsers import expat

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sensorium.cluster.python_process import PipedProcess, ProcessLost
from sensorium.vocabulary.errors import RecipeError

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

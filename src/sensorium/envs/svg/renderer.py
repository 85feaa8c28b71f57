"""Draws SVG in child processes, which are killed when they take too long, and replaced when they crash.

Whatever the code does, ``draw`` returns a picture or raises SvgRefused within ``DEADLINE_S`` (and the start of a process).
"""

import importlib.util
import os
import struct
import sys
import threading
import time
from functools import lru_cache
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sensorium.envs.svg.checks import SvgRefused, checked
from sensorium.vocabulary.errors import RecipeError
from sensorium.workers.piped_process import PipedProcess, ProcessLost

DEADLINE_S = 5.0
START_S = 60.0
MEMORY_MIB = 1024
"""Address space of a process: the interpreter takes a small part of it, a picture a few megabytes."""
MOST_PROCESSES = 4
MOST_REPLY = 64 << 20

Pixels = NDArray[np.uint8]

_idle: list["_Renderer"] = []
_free = threading.BoundedSemaphore(MOST_PROCESSES)
_lock = threading.Lock()


def refuse_missing() -> None:
    """Say what to install where there is no renderer."""
    if importlib.util.find_spec("resvg_py") is None:
        raise RecipeError("svg: drawing needs the package resvg-py; install it with: pip install 'sensorium[svg]'.")


def draw(code: str, side: int) -> Pixels:
    """The picture of an SVG on white, uint8 of [side, side, 3]; one of another shape is centred. Raises SvgRefused."""
    return _drawn(checked(code), side)


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
    canvas = Image.new("RGB", (side, side), "white")
    canvas.paste(picture.crop((0, 0, side, side)), ((side - picture.width) // 2, (side - picture.height) // 2))
    pixels = np.asarray(canvas)
    pixels.flags.writeable = False
    return pixels


class _Renderer(PipedProcess):
    """A process that draws."""

    def __init__(self) -> None:
        surroundings = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PATH": os.environ.get("PATH", "")}
        script = str(Path(__file__).with_name("render_child.py"))
        super().__init__([sys.executable, "-P", script, str(MEMORY_MIB)], surroundings, "/", silent=True)
        self._started = False

    def ask(self, code: str, side: int) -> tuple[bool, bytes]:
        """Draw; raises ProcessLost where no answer comes in time, or none at all."""
        text = code.encode()
        until = time.monotonic() + DEADLINE_S + (0.0 if self._started else START_S)
        self.write(struct.pack(">II", side, len(text)) + text)
        try:
            failed, length = struct.unpack(">BI", self.read(5, until))
            if length > MOST_REPLY:
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
            process.end()
    return _Renderer()

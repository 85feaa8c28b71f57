"""Draws SVG in child processes, which are killed when they take too long, and replaced when they crash.

Whatever the code does, ``draw`` returns a picture or raises SvgRefused within ``DEADLINE_S`` (and the start of a process).
"""

import importlib.util
import os
import selectors
import struct
import subprocess
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

DEADLINE_S = 10.0
START_S = 60.0
MEMORY_MIB = 1024
"""Address space of a process: the interpreter takes a small part of it, a picture a few megabytes."""
MOST_PROCESSES = 4
MOST_REPLY = 64 << 20

Pixels = NDArray[np.uint8]

_idle: list["_Process"] = []
_free = threading.BoundedSemaphore(MOST_PROCESSES)
_lock = threading.Lock()


def refuse_missing() -> None:
    """Say what to install where there is no renderer."""
    if importlib.util.find_spec("resvg_py") is None:
        raise RecipeError("svg: drawing needs the package resvg-py; install it with: pip install 'sensorium[svg]'.")


def draw(code: str, side: int) -> Pixels:
    """The picture of an SVG on white, uint8 of [side, side, 3]; one of another shape is centred. Raises SvgRefused."""
    return _drawn(checked(code), side)


@lru_cache(maxsize=256)
def _drawn(code: str, side: int) -> Pixels:
    with _free:
        process = _taken()
        try:
            failed, reply = process.ask(code, side)
        except _Lost as lost:
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


class _Lost(Exception):
    """The process crashed or took too long."""


class _Process:
    """A process that draws, and its pipes."""

    def __init__(self) -> None:
        surroundings = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PATH": os.environ.get("PATH", "")}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("render_child.py")), str(MEMORY_MIB)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=surroundings,
            cwd="/",
        )
        self._started = False

    def ask(self, code: str, side: int) -> tuple[bool, bytes]:
        """Draw; raises _Lost where no answer comes in time, or none at all."""
        assert self._process.stdin is not None
        text = code.encode()
        until = time.monotonic() + DEADLINE_S + (0.0 if self._started else START_S)
        try:
            rest = memoryview(struct.pack(">II", side, len(text)) + text)
            while rest:
                rest = rest[self._process.stdin.write(rest) :]
            failed, length = struct.unpack(">BI", self._read(5, until))
            if length > MOST_REPLY:
                raise _Lost("its picture is too large")
            self._started = True
            return bool(failed), self._read(length, until)
        except OSError as error:
            raise _Lost(self._death()) from error

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def _read(self, count: int, until: float) -> bytes:
        assert self._process.stdout is not None
        data = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while len(data) < count:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise _Lost(f"it takes longer than {DEADLINE_S:g} s")
                read = os.read(self._process.stdout.fileno(), min(count - len(data), 1 << 20))
                if not read:
                    raise _Lost(self._death())
                data += read
        return bytes(data)

    def _death(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "the renderer closed its pipes"
        return f"the renderer died by signal {-code}" if code < 0 else f"the renderer ended with code {code}"


def _taken() -> _Process:
    with _lock:
        while _idle:
            process = _idle.pop()
            if process.alive:
                return process
            process.end()
    return _Process()

"""A child process that is asked over its pipes, with a deadline for every answer, and can be killed at any moment."""

import os
import selectors
import subprocess
import time
from collections.abc import Mapping, Sequence


class ProcessLost(Exception):
    """The process ended, or closed its pipes; the message says how."""


class PipedProcess:
    """``command`` with pipes to its standard input and output. With ``silent`` its standard error goes nowhere."""

    def __init__(
        self, command: Sequence[str], surroundings: Mapping[str, str], folder: str | None = None, *, silent: bool = False
    ) -> None:
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if silent else None,
            bufsize=0,
            env=dict(surroundings),
            cwd=folder,
        )

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def write(self, data: bytes) -> None:
        """Send everything; raises ProcessLost where it does not listen any more."""
        assert self._process.stdin is not None
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._process.stdin.write(rest) :]
        except OSError as error:
            raise ProcessLost(self._death()) from error

    def read(self, count: int, until: float) -> bytes:
        """So many bytes; raises TimeoutError when ``until`` (of time.monotonic) is past, ProcessLost where it ended."""
        assert self._process.stdout is not None
        data = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while len(data) < count:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise TimeoutError
                read = os.read(self._process.stdout.fileno(), min(count - len(data), 1 << 20))
                if not read:
                    raise ProcessLost(self._death())
                data += read
        return bytes(data)

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _death(self) -> str:
        """How it ended."""
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "its process closed its pipes"
        return f"its process died by signal {-code}" if code < 0 else f"its process ended with code {code}"

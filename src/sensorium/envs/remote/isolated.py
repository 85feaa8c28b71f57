"""IsolatedEnvironment: an environment in a child process with limits of time and memory.

For environments that crash, hang in C code or use too much memory: a thread cannot be stopped, a process can. A call that
overruns its deadline kills the process and fails the episode; so do a crash and too much memory. A process whose episode
ended normally is used again by the next one with the same limit. The process runs this module: it reads a frame after its
length from standard input, and writes a reply frame to standard output; what environments print goes to standard error.
"""

import os
import resource
import struct
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from sensorium.cluster.python_process import PipedProcess, ProcessLost
from sensorium.data.media_store import MediaStore
from sensorium.envs.protocol import Observation, StepResult, within
from sensorium.envs.remote.wire import (
    Json,
    WireError,
    bytes_of,
    keep,
    pack,
    reset_from_json,
    reset_to_json,
    step_from_json,
    step_to_json,
    unpack,
)
from sensorium.recipe.registry import build, resolve
from sensorium.vocabulary.content import Message
from sensorium.vocabulary.errors import EnvironmentFailure, SensoriumError
from sensorium.vocabulary.plain import words

NAME = "isolated"
START_S = 60.0
MAX_IDLE = 8

_idle: dict[int, list["_Child"]] = {}
_lock = threading.Lock()


class IsolatedEnvironment:
    """``environment`` with ``options``, in a process limited to ``memory_mib`` of memory and ``deadline_s`` a call."""

    instant = False
    stands_for = True
    recipe_only = ("environment", "memory_mib", "deadline_s")

    def __init__(
        self,
        store: MediaStore,
        environment: str,
        options: Mapping[str, Any] | None = None,
        memory_mib: int = 4096,
        deadline_s: float = 60.0,
    ) -> None:
        within(NAME, "memory_mib", memory_mib, 256, 2**20)
        within(NAME, "deadline_s", deadline_s, 0.001, 86_400)
        self.store, self.environment, self.memory_mib, self.deadline_s = store, environment, memory_mib, deadline_s
        self._named = {"environment": environment, "options": dict(options or {})}
        resolve("environment", environment, NAME)
        self._child: _Child | None = None

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        """The environment's own content key; computed in a process too, since making an environment may crash."""
        isolated = cls(MediaStore(), **options)
        isolated._child = _taken(isolated.memory_mib)
        try:
            return str(isolated._ask({"op": "content_key", "seed": seed, **isolated._named}, START_S))
        finally:
            isolated._give_back()

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        self.close()
        self._child = _taken(self.memory_mib)
        self._ask({"op": "build", **self._named}, START_S)
        return reset_from_json(self._ask({"op": "reset", "seed": seed}))

    def step(self, response: str) -> StepResult:
        return step_from_json(self._ask({"op": "step", "response": response}))

    def demonstrate(self) -> str:
        return str(self._ask({"op": "demonstrate"}))

    def close(self) -> None:
        """Close it, and keep the process for the next one."""
        if self._child is not None:
            self._ask({"op": "close"})
            self._give_back()

    def _give_back(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        with _lock:
            idle = _idle.setdefault(self.memory_mib, [])
            if len(idle) < MAX_IDLE:
                idle.append(child)
                return
        child.end()

    def _ask(self, operation: Json, deadline_s: float = 0.0) -> Any:
        child, name = self._child, f"isolated environment '{self.environment}'"
        if child is None:
            raise EnvironmentFailure(f"{name}: it has not begun, or is lost; reset it first.")
        try:
            body, media = child.ask(operation, deadline_s or self.deadline_s)
        except (ProcessLost, WireError) as gone:
            self._child = None
            child.end()
            raise EnvironmentFailure(f"{name} is lost in {operation['op']}: {gone}") from gone
        keep(media, self.store, name)
        if "error" in body:
            raise EnvironmentFailure(f"{name}: {body['error']}")
        return body["value"]


class _Child(PipedProcess):
    def __init__(self, memory_mib: int) -> None:
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}
        super().__init__([sys.executable, "-P", "-m", "sensorium.envs.remote.isolated", str(memory_mib)], variables)

    def ask(self, operation: Json, deadline_s: float) -> tuple[Json, dict[str, bytes]]:
        until = time.monotonic() + deadline_s
        self.write(_framed(pack(operation, {})))
        try:
            (length,) = struct.unpack(">Q", self.read(8, until))
            return unpack(self.read(length, until))
        except TimeoutError as error:
            raise ProcessLost(f"no answer within {deadline_s:g} s") from error


def _taken(memory_mib: int) -> _Child:
    with _lock:
        idle = _idle.get(memory_mib, [])
        while idle:
            child = idle.pop()
            if child.alive:
                return child
    return _Child(memory_mib)


def _framed(frame: bytes) -> bytes:
    return struct.pack(">Q", len(frame)) + frame


def main(memory_mib: int) -> None:
    """Answer until standard input closes."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (memory_mib << 20, memory_mib << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    host = _Host()
    while len(head := sys.stdin.buffer.read(8)) == 8:
        (length,) = struct.unpack(">Q", head)
        operation, _ = unpack(sys.stdin.buffer.read(length))
        try:
            body: Json = {"value": getattr(host, operation.pop("op"))(**operation)}
            reply = pack(body, bytes_of(body, host.store))
        except (Exception, SystemExit) as error:  # whatever the environment raises is the reply
            why = str(error) if isinstance(error, SensoriumError) else words(error)
            reply = pack({"error": why.encode("utf-8", "replace").decode()}, {})
        rest = memoryview(_framed(reply))
        while rest:
            rest = rest[replies.write(rest) :]


class _Host:
    """One environment at a time; each method is an operation."""

    def __init__(self) -> None:
        self.environment: Any = None
        self.store = MediaStore()

    def build(self, environment: str, options: Json) -> None:
        self.store = MediaStore()
        self.environment = build("environment", environment, options, f"environment '{environment}'", store=self.store)

    def content_key(self, environment: str, options: Json, seed: int) -> str:
        return str(resolve("environment", environment).content_key(seed, options))

    def reset(self, seed: int) -> Json:
        return reset_to_json(*self.environment.reset(seed))

    def step(self, response: str) -> Json:
        return step_to_json(self.environment.step(response))

    def demonstrate(self) -> Any:
        return self.environment.demonstrate()

    def close(self) -> None:
        environment, self.environment = self.environment, None
        if environment is not None:
            environment.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))

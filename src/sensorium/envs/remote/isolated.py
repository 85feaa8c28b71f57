"""IsolatedEnvironment: an environment in a child process with limits of time and memory.

For environments that crash, hang in C code or use too much memory: a thread cannot be stopped, a process can. A call that
overruns its deadline kills the process and fails the episode; so do a crash and too much memory. A process whose episode
ended normally is used again by the next one with the same limit. The process runs this module: it reads a frame after its
length from standard input, and writes a reply frame to standard output; what environments print goes to standard error.

When standard input is closed, because its work is over or who started it was killed, it closes its environment, ends all
processes that this has started (browsers, for example), and ends.
"""

import asyncio
import os
import resource
import select
import struct
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from inspect import isawaitable
from typing import Any

from sensorium.cluster.python_process import PipedProcess, ProcessLost, end_descendants
from sensorium.data.media_store import MediaStore
from sensorium.envs.protocol import Observation, StepResult, checked_reset, checked_step, within
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
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError, SensoriumError
from sensorium.vocabulary.plain import words

NAME = "isolated"
START_S = 60.0
CLOSE_S = 10.0  # for an environment to close itself before its process is killed
MAX_IDLE = 8

_idle: dict[int, list["EnvironmentProcess"]] = {}
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
        self._child: EnvironmentProcess | None = None

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


class EnvironmentProcess(PipedProcess):
    """A process that holds an environment, limited to so much memory; 0: not limited."""

    def __init__(self, memory_mib: int = 0) -> None:
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-P", "-m", "sensorium.envs.remote.isolated", str(memory_mib)]
        super().__init__(command, variables, own_group=True)

    def ask(self, operation: Json, deadline_s: float) -> tuple[Json, dict[str, bytes]]:
        until = time.monotonic() + deadline_s
        self.write(_framed(pack(operation, {})))
        try:
            (length,) = struct.unpack(">Q", self.read(8, until))
            return unpack(self.read(length, until))
        except TimeoutError as error:
            raise ProcessLost(f"no answer within {deadline_s:g} s") from error


def _taken(memory_mib: int) -> EnvironmentProcess:
    with _lock:
        idle = _idle.get(memory_mib, [])
        while idle:
            child = idle.pop()
            if child.alive:
                return child
    return EnvironmentProcess(memory_mib)


def _framed(frame: bytes) -> bytes:
    return struct.pack(">Q", len(frame)) + frame


def main(memory_mib: int) -> None:
    """Answer until standard input closes."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    if memory_mib:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mib << 20, memory_mib << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.Thread(target=_end_with_driver, name="driver", daemon=True).start()
    host = _Host()
    with suppress(BrokenPipeError):  # who asked is gone
        while len(head := sys.stdin.buffer.read(8)) == 8:
            (length,) = struct.unpack(">Q", head)
            operation, _ = unpack(sys.stdin.buffer.read(length))
            rest = memoryview(_framed(_reply(host, operation)))
            while rest:
                rest = rest[replies.write(rest) :]
    _reply(host, {"op": "close"})
    end_descendants()
    os._exit(0)  # threads that an environment left behind do not matter


def _reply(host: "_Host", operation: Json) -> bytes:
    try:
        body: Json = {"value": getattr(host, operation.pop("op"))(**operation)}
        return pack(body, bytes_of(body, host.store))
    except (Exception, SystemExit) as error:  # whatever the environment raises is the reply
        why = str(error) if isinstance(error, SensoriumError) else words(error)
        refused = isinstance(error, RecipeError)
        return pack({"error": why.encode("utf-8", "replace").decode()} | ({"refused": True} if refused else {}), {})


def _end_with_driver() -> None:
    """End all a while after standard input was closed, also if a call of the environment never returns."""
    closed = select.poll()
    closed.register(0, 0)  # reports only that the other end is closed
    closed.poll()
    time.sleep(CLOSE_S)
    end_descendants()
    os._exit(1)


class _Host:
    """One environment at a time, reset any number of times; each method is an operation."""

    def __init__(self) -> None:
        self.environment: Any = None
        self.name = ""
        self.store = MediaStore()
        self._lasting: set[str] = set()  # media that the environment put into the store when it was built
        self._runner: asyncio.Runner | None = None

    def build(self, environment: str, options: Json) -> None:
        self.store, self.name = MediaStore(), environment
        self.environment = build("environment", environment, options, f"environment '{environment}'", store=self.store)
        self._lasting = self.store.in_memory

    def content_key(self, environment: str, options: Json, seed: int) -> str:
        return str(resolve("environment", environment).content_key(seed, options))

    def reset(self, seed: int) -> Json:
        self.store.forget_others(self._lasting)
        return reset_to_json(*checked_reset(self._awaited(self.environment.reset(seed)), self.name))

    def step(self, response: str) -> Json:
        return step_to_json(checked_step(self._awaited(self.environment.step(response)), self.name))

    def demonstrate(self) -> Any:
        return self._awaited(self.environment.demonstrate())

    def close(self) -> None:
        environment, self.environment = self.environment, None
        if environment is not None:
            self._awaited(environment.close())

    def _awaited(self, value: Any) -> Any:
        """The value; what must be awaited is awaited in one event loop, in which connections live on between calls."""
        if not isawaitable(value):
            return value

        async def result() -> Any:
            return await value

        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(result())


if __name__ == "__main__":
    main(int(sys.argv[1]))

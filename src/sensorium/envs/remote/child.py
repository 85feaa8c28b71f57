"""The process of an isolated environment: frames on standard input, a reply frame to each on standard output.

What environments print goes to standard error. Memory is limited before anything is built.
"""

import os
import resource
import struct
import sys
from typing import Any

from sensorium.data.media_store import MediaStore
from sensorium.envs.remote.wire import Json, bytes_of, pack, reset_to_json, step_to_json, unpack
from sensorium.recipe.names import build, resolve
from sensorium.vocabulary.errors import SensoriumError
from sensorium.vocabulary.plain import words


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
        rest = memoryview(framed(reply))
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


def framed(frame: bytes) -> bytes:
    """A frame after its length."""
    return struct.pack(">Q", len(frame)) + frame


if __name__ == "__main__":
    main(int(sys.argv[1]))

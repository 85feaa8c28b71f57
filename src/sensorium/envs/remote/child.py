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

MIB = 1024 * 1024


def main(memory_mib: int) -> None:
    """Answer until standard input closes."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (memory_mib * MIB, memory_mib * MIB))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    host = _Host()
    while len(head := sys.stdin.buffer.read(8)) == 8:
        (length,) = struct.unpack(">Q", head)
        operation, _ = unpack(sys.stdin.buffer.read(length))
        try:
            body: Json = {"value": host.perform(operation)}
            reply = pack(body, bytes_of(body, host.store))
        except (Exception, SystemExit) as error:  # whatever the environment raises is the reply
            why = str(error) if isinstance(error, SensoriumError) else words(error)
            reply = pack({"error": why.encode("utf-8", "replace").decode()}, {})
        rest = memoryview(framed(reply))
        while rest:
            rest = rest[replies.write(rest) :]


class _Host:
    """One environment at a time."""

    def __init__(self) -> None:
        self.environment: Any = None
        self.store = MediaStore()

    def perform(self, operation: Json) -> Any:
        kind = operation["op"]
        if kind == "build":
            self.store = MediaStore()
            where = f"environment '{operation['environment']}'"
            self.environment = build("environment", operation["environment"], operation["options"], where, store=self.store)
            return None
        if kind == "content_key":
            kind_of_environment = resolve("environment", operation["environment"])
            return str(kind_of_environment.content_key(operation["seed"], operation["options"]))
        if kind == "reset":
            return reset_to_json(*self.environment.reset(operation["seed"]))
        if kind == "step":
            return step_to_json(self.environment.step(operation["response"]))
        if kind == "demonstrate":
            return self.environment.demonstrate()
        assert kind == "close", kind
        environment, self.environment = self.environment, None
        return environment.close() if environment is not None else None


def framed(frame: bytes) -> bytes:
    """A frame after its length."""
    return struct.pack(">Q", len(frame)) + frame


if __name__ == "__main__":
    main(int(sys.argv[1]))

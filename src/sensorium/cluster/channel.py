"""Messages between two processes of ours, one of which has started the other: a length of eight bytes, then a pickle."""

import pickle
import socket
import struct
from collections.abc import Mapping
from typing import Any, Protocol

from sensorium.vocabulary import errors

LENGTH = struct.Struct("!Q")

Message = dict[str, Any]


class Frames(Protocol):
    """Carries whole messages as bytes, in order."""

    def send(self, body: bytes, limit_s: float | None = None) -> None:
        """Send; OSError if the other end is gone, TimeoutError if it does not accept it in time."""

    def receive(self, limit_s: float | None = None) -> bytes:
        """The next one; EOFError if the other end is gone, TimeoutError if nothing comes in time."""

    def close(self) -> None:
        """Hang up: the other end reads an EOFError."""


class SocketFrames:
    """Frames over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, body: bytes, limit_s: float | None = None) -> None:
        self._connection.settimeout(limit_s)
        self._connection.sendall(LENGTH.pack(len(body)) + body)

    def receive(self, limit_s: float | None = None) -> bytes:
        """The next body."""
        self._connection.settimeout(limit_s)
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        return self._read(length)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def _read(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._connection.recv(min(count - len(parts), 1 << 20))
            if not part:
                raise EOFError("the other end has hung up")
            parts += part
        return bytes(parts)


class Channel:
    """One end of a connection. Not for several threads at once, unless no call has a limit."""

    def __init__(self, connection: socket.socket | Frames) -> None:
        self._frames = SocketFrames(connection) if isinstance(connection, socket.socket) else connection

    def send(self, message: Any, limit_s: float | None = None) -> None:
        """Send one message; OSError if the other end is gone, TimeoutError if it does not accept it in time."""
        self._frames.send(pickle.dumps(message, protocol=5), limit_s)

    def receive(self, limit_s: float | None = None) -> Any:
        """The next message; EOFError if the other end is gone, TimeoutError if nothing comes in time."""
        return pickle.loads(self._frames.receive(limit_s))

    def close(self) -> None:
        """Hang up: the other end reads an EOFError."""
        self._frames.close()


def own_address(toward: str) -> str:
    """This machine's address as seen from ``toward``; nothing is sent, only the interface is chosen."""
    with socket.socket(socket.AF_INET6 if ":" in toward else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((toward, 9))
        return str(probe.getsockname()[0])


def plain_error(error: BaseException) -> dict[str, str]:
    """An error by its class and text."""
    known = isinstance(error, errors.SensoriumError)
    return {"error": str(error) if known else repr(error), "kind": type(error).__name__}


def error_of(plain: Mapping[str, Any], otherwise: type[errors.SensoriumError], who: str) -> errors.SensoriumError:
    """The error that ``plain_error`` described; one of a foreign class becomes an ``otherwise``: ``who`` failed."""
    kind = getattr(errors, plain["kind"], None)
    if isinstance(kind, type) and issubclass(kind, errors.SensoriumError):
        return kind(plain["error"])
    return otherwise(f"{who} failed: {plain['error']}")

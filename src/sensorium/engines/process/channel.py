"""Messages over a socket: a length of eight bytes, then JSON. Numbers come out as they went in, to the last bit."""

import json
import socket
import struct
from typing import Any

LENGTH = struct.Struct("!Q")

Message = dict[str, Any]


class Channel:
    """One end of the connection. Not for several threads at once."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: Any, limit_s: float | None = None) -> None:
        """Send one message; OSError if the other end is gone, TimeoutError if it does not take it in time."""
        body = self.encode(message)
        self._connection.settimeout(limit_s)
        self._connection.sendall(LENGTH.pack(len(body)) + body)

    def receive(self, limit_s: float | None = None) -> Any:
        """The next message; EOFError if the other end is gone, TimeoutError if nothing comes in time."""
        self._connection.settimeout(limit_s)
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        return self.decode(self._read(length))

    def encode(self, message: Any) -> bytes:
        """A message as bytes."""
        return json.dumps(message, separators=(",", ":")).encode()

    def decode(self, data: bytes) -> Any:
        """The message that bytes stand for."""
        return json.loads(data)

    def close(self) -> None:
        """Hang up: the other end reads an EOFError."""
        self._connection.close()

    def _read(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._connection.recv(min(count - len(parts), 1 << 20))
            if not part:
                raise EOFError("the other end has hung up")
            parts += part
        return bytes(parts)

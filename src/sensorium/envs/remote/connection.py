"""A connection to an environment service: operations of many sessions over one WebSocket, in batches.

Invariants: everything runs in one event loop, that of the client's thread. An operation waits for its reply at most its
deadline. When the connection breaks, all operations that wait on it end with ConnectionLost; whether they were carried out
is not known, and who sent them may send them again: the server carries each out once.
"""

import asyncio
from contextlib import suppress
from typing import Any

from sensorium.envs.remote.wire import MOST_BYTES, Json, WireError, keep, pack, pictures_in, unpack
from sensorium.media.store import MediaStore
from sensorium.vocabulary.errors import MediaError
from sensorium.vocabulary.secrets import masked

NO_ENTRY = (401, 403)
"""Statuses of a server that takes no connection: the key is wrong, or it does not have the name it was asked by."""


class ConnectionLost(Exception):
    """There is no connection, or it broke before a reply came."""


class ServerRefusal(Exception):
    """The server's answer to an operation that it does not carry out: a status and why."""

    def __init__(self, status: int, why: str, retry_after_s: float) -> None:
        super().__init__(why)
        self.status, self.why, self.retry_after_s = status, why, retry_after_s


class Connection:
    """One WebSocket to one server. Pictures that arrive are put into the stores of those who wait."""

    def __init__(self, url: str, key: str, connect_s: float) -> None:
        self.url, self._key, self._connect_s = url, key, connect_s
        self._socket: Any = None
        self._opening = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting: dict[int, tuple[asyncio.Future[Json], MediaStore | None]] = {}
        self._outgoing: list[Json] = []
        self._wake = asyncio.Event()
        self._number = 0

    async def ask(self, operation: Json, deadline_s: float, store: MediaStore | None = None) -> Json:
        """Send an operation and wait for its reply."""
        await self._open()
        self._number += 1
        number, reply = self._number, asyncio.get_running_loop().create_future()
        self._waiting[number] = (reply, store)
        self._outgoing.append({**operation, "id": number})
        self._wake.set()
        try:
            async with asyncio.timeout(deadline_s):
                answer = await reply
        except TimeoutError as error:
            raise ConnectionLost(f"{self.url}: no reply within {deadline_s:g} s") from error
        finally:
            self._waiting.pop(number, None)
        if "value" in answer:
            value: Json = answer["value"]
            return value
        raise ServerRefusal(
            int(answer.get("status", 500)), str(answer.get("why", "")), float(answer.get("retry_after_s", 0))
        )

    async def close(self) -> None:
        """End it."""
        self._break("the connection was closed")

    async def _open(self) -> None:
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidStatus, WebSocketException

        async with self._opening:
            if self._socket is not None:
                return
            headers = {"X-API-Key": self._key} if self._key else {}
            try:
                async with asyncio.timeout(self._connect_s):
                    socket = await connect(self.url, max_size=MOST_BYTES, additional_headers=headers, compression=None)
            except InvalidStatus as error:
                why = (error.response.body or b"").decode("utf-8", "replace")
                told = f"no connection: {error} {why:.500}".rstrip()
                if error.response.status_code in NO_ENTRY:
                    raise ServerRefusal(error.response.status_code, told, 0.0) from error
                raise ConnectionLost(f"{self.url}: {told}") from error
            except (OSError, TimeoutError, WebSocketException) as error:
                raise ConnectionLost(f"{self.url}: no connection: {error}") from error
            self._socket = socket
            self._tasks = [asyncio.create_task(self._read(socket)), asyncio.create_task(self._write(socket))]

    async def _read(self, socket: Any) -> None:
        try:
            async for frame in socket:
                body, media = unpack(frame)
                for reply in body.get("replies", ()):
                    self._deliver(masked(reply, [self._key]), media)
            self._break("the server closed the connection")
        except (WireError, TypeError, MediaError) as error:
            self._break(f"it sent what cannot be read: {error}")
        except Exception as error:
            self._break(str(error) or type(error).__name__)

    async def _write(self, socket: Any) -> None:
        try:
            while True:
                await self._wake.wait()
                await asyncio.sleep(0)  # what is asked in the same moment goes out together
                self._wake.clear()
                outgoing, self._outgoing = self._outgoing, []
                if outgoing:
                    await socket.send(pack({"ops": outgoing}, {}))
        except Exception as error:
            self._break(str(error) or type(error).__name__)

    def _deliver(self, reply: Json, media: dict[str, bytes]) -> None:
        """Hand a reply to who waits for it, its pictures first."""
        waiting = self._waiting.get(reply.get("id", 0))
        if waiting is None or waiting[0].done():
            return
        answer, store = waiting
        if store is not None and media:
            keep({digest: media[digest] for digest in pictures_in(reply) if digest in media}, store, self.url)
        answer.set_result(reply)

    def _break(self, why: str) -> None:
        """Everybody who waits hears that the connection is lost."""
        socket, self._socket = self._socket, None
        tasks, self._tasks = self._tasks, []
        self._outgoing = []
        for reply, _ in self._waiting.values():
            if not reply.done():
                reply.set_exception(ConnectionLost(f"{self.url}: {why}"))
        current = None
        with suppress(RuntimeError):
            current = asyncio.current_task()
        for task in tasks:
            if task is not current:
                task.cancel()
        if socket is not None:
            socket.transport.abort()

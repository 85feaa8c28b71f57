"""The client of environment services: several servers, one connection each, sessions that stay where they began.

Invariants:
- Everything runs in one event loop, in the client's thread. An operation waits for its reply at most its deadline. When the
  connection breaks, all operations that wait on it end with ConnectionLost. They may have been carried out, and may be sent
  again: the server carries out each once.
- Opening goes to the server with the fewest sessions, and to the next one if it is full or gone; a server is asked again
  under the same id, so that no session is opened twice.
- A lost step is requested again, at the same server under the same number, so it acts once. If nothing listens there any
  more, or for ``retry_s`` nothing answers, or the server no longer knows the session, that is a ServerLost: the rollout
  waits until a server answers (``available``) and plays the episode again.
- A server that is known to be ``gone`` for good (a worker of the run that died) is not waited for: EnvironmentLost. The
  same holds for an environment whose process was lost at a server.
"""

import asyncio
import errno
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

from sensorium.cluster.event_loop import LoopThread
from sensorium.data.media_store import MediaStore
from sensorium.envs.protocol import Observation, StepResult, within
from sensorium.envs.remote.wire import (
    MOST_BYTES,
    Json,
    WireError,
    keep,
    pack,
    pictures_in,
    reset_from_json,
    step_from_json,
    unpack,
)
from sensorium.vocabulary.content import Message
from sensorium.vocabulary.errors import (
    EnvironmentFailure,
    EnvironmentLost,
    MediaError,
    RecipeError,
    ServerLost,
    WorkersLost,
)
from sensorium.vocabulary.secrets import holds_key, masked

KEY = "SENSORIUM_SERVICE_KEY"
NO_ENTRY = (401, 403)  # statuses of a refused connection: the key is wrong, or the server does not have that name
DOWN_S = 2.0  # how long a server that could not be reached is asked last
PLACED_RETRY_S = 60.0  # how long a lost reply of a worker that may be alive is requested again
PROBE_S = 0.5  # between looks at servers of which none answers
UNKNOWN = 404  # status of a session that a server does not know: it was started again
LOST = 502  # status of a session whose environment's process was lost there

_clients: dict[tuple[tuple[str, ...], str], "EnvironmentClient"] = {}
_lock = threading.Lock()


class ConnectionLost(Exception):
    """There is no connection, or it broke before a reply came. ``refused``: nothing listens at the address."""

    def __init__(self, why: str, *, refused: bool = False) -> None:
        super().__init__(why)
        self.refused = refused


class ServerRefusal(Exception):
    """The server's answer to an operation that it does not carry out: a status and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


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
        await self.open()
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
        if "value" not in answer:
            raise ServerRefusal(int(answer.get("status", 500)), str(answer.get("why", "")))
        value: Json = answer["value"]
        return value

    async def close(self) -> None:
        self._break("the connection was closed")

    async def open(self) -> None:
        """Connect, unless there is a connection."""
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
                body = (error.response.body or b"").decode("utf-8", "replace")
                why = f"no connection: {error} {body:.500}".rstrip()
                if error.response.status_code in NO_ENTRY:
                    raise ServerRefusal(error.response.status_code, why) from error
                raise ConnectionLost(f"{self.url}: {why}") from error
            except (OSError, TimeoutError, WebSocketException) as error:
                refused = f"[Errno {errno.ECONNREFUSED}]" in str(error)  # also where a name has several addresses
                raise ConnectionLost(f"{self.url}: no connection: {error}", refused=refused) from error
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
                await asyncio.sleep(0)  # operations of the same moment are sent together
                self._wake.clear()
                outgoing, self._outgoing = self._outgoing, []
                if outgoing:
                    await socket.send(pack({"ops": outgoing}, {}))
        except Exception as error:
            self._break(str(error) or type(error).__name__)

    def _deliver(self, reply: Json, media: dict[str, bytes]) -> None:
        """Pass a reply to who waits for it, its pictures first."""
        waiting = self._waiting.get(reply.get("id", 0))
        if waiting is None or waiting[0].done():
            return
        answer, store = waiting
        if store is not None and media:
            keep({digest: media[digest] for digest in pictures_in(reply) if digest in media}, store, self.url)
        answer.set_result(reply)

    def _break(self, why: str) -> None:
        """End the connection, and every operation that waits on it with ConnectionLost."""
        socket, self._socket = self._socket, None
        tasks, self._tasks = self._tasks, []
        self._outgoing = []
        for reply, _ in self._waiting.values():
            if not reply.done():
                reply.set_exception(ConnectionLost(f"{self.url}: {why}"))
        for task in tasks:
            if task is not asyncio.current_task():
                task.cancel()
        if socket is not None:
            socket.transport.abort()


def shared_client(servers: Sequence[str], key: str) -> "EnvironmentClient":
    """The client of these servers in this process."""
    addresses = tuple(map(socket_address, servers))
    with _lock:
        client = _clients.get((addresses, key))
        if client is None:
            client = _clients[addresses, key] = EnvironmentClient(addresses, key)
        return client


def socket_address(server: str) -> str:
    """The WebSocket of a server given as http://host:port."""
    url = re.sub(r"^http(s?)://", r"ws\1://", server)
    if not url.startswith(("ws://", "wss://")):
        raise RecipeError(f"remote: '{server}' is no address of a server; it is like http://127.0.0.1:8300.")
    if holds_key(url):
        raise RecipeError(
            "remote: an address of servers has a user, a password or a query (?…). A key does not belong into a recipe: "
            f"leave it out and set the environment variable {KEY}."
        )
    return f"{url.rstrip('/').removesuffix('/v1/ws')}/v1/ws"


class Server:
    """A server, how many sessions are open there, and until when it counts as down; ``gone``: for ever.

    Of one that others started (``waited_for``), its absence and its return are printed once each while others answer, which
    would hide them. ``away`` says why it does not answer; ``answered``: it has at least once.
    """

    def __init__(self, connection: Connection, *, waited_for: bool = True) -> None:
        self.connection, self.sessions, self.down_until, self.gone = connection, 0, 0.0, False
        self.waited_for, self.away, self.answered = waited_for, "", False

    def is_away(self, why: str, others: int) -> None:
        """It could not be reached, or refuses the connection; so many others answer."""
        if self.waited_for and not self.away:
            self.away = why
            if others:
                notice = f"remote environment: {why}. Is it running? It is asked again; servers beside it: {others}."
                print(notice, file=sys.stderr, flush=True)

    def answers(self, others: int) -> None:
        """It has answered; so many others answer."""
        self.answered = True
        if self.away:
            self.away = ""
            if others:
                print(f"remote environment: {self.connection.url} answers again.", file=sys.stderr, flush=True)

    def rank(self) -> tuple[bool, int]:
        """Servers of lower rank are asked first."""
        return time.monotonic() < self.down_until, self.sessions


class EnvironmentClient:
    """Talks to the servers from a thread of its own; ``run`` waits for it from any other thread."""

    def __init__(self, addresses: Sequence[str], key: str = "", connect_s: float = 10.0) -> None:
        self._given = key, connect_s
        self.servers = [Server(Connection(address, key, connect_s)) for address in addresses]
        self._thread = LoopThread("environment-client")
        self._loop = self._thread.loop
        self._closing: set[asyncio.Task[None]] = set()
        self._probing: asyncio.Task[None] | None = None
        self.lost_at: float | None = None  # since when no server answers
        self.announced = False

    def missed(self, server: Server, error: ConnectionLost) -> None:
        """A server could not be reached. If no other answers, look for them from now on."""
        server.is_away(str(error), self._others(server))
        if self.lost_at is None and self.servers and all(one.away for one in self.servers):
            self.lost_at = time.monotonic()
            if self._probing is None or self._probing.done():
                self._probing = self._loop.create_task(self._probe())

    def found(self, server: Server) -> None:
        """A server has answered."""
        server.answers(self._others(server))
        self.lost_at = None

    async def answers(self, wait_s: float, noted: Callable[[str], None]) -> None:
        """Wait, in any event loop, while no server answers; ``noted`` gets when that begins and ends.

        WorkersLost where none does within ``wait_s`` of the loss, and at once where none ever did.
        """
        since = self.lost_at
        if since is None:
            return
        addresses = " and ".join(server.connection.url for server in self.servers)
        why = "; ".join(server.away for server in self.servers)
        if not any(server.answered for server in self.servers):
            self.lost_at = None  # whoever asks next looks again
            raise WorkersLost(
                f"no environment server answers at {addresses} ({why}). Start it there (sensorium serve env …), or correct "
                "the option servers of the environment 'remote'."
            )
        if not self.announced:
            self.announced = True
            noted(
                f"the environment server at {addresses} is lost ({why}). It is waited for, {wait_s:g} s at most "
                "(wait_s of the environment 'remote'): start it again there. Its episodes are then rolled again with the "
                "same random numbers."
            )
        while self.lost_at is not None:
            if time.monotonic() > self.lost_at + wait_s:
                self.lost_at, self.announced = None, False
                raise WorkersLost(
                    f"the environment server at {addresses} did not answer for {wait_s:g} s (wait_s of the environment "
                    f"'remote'): {why}. Start it again, then go on with --resume."
                )
            await asyncio.sleep(PROBE_S / 2)
        if self.announced:
            self.announced = False
            noted(f"the environment server at {addresses} answers again, after {time.monotonic() - since:.0f} s.")

    def _others(self, server: Server) -> int:
        return sum(not one.away for one in self.servers if one is not server)

    async def _probe(self) -> None:
        """Look at the servers until one takes a connection, or refuses it with a status."""
        while self.lost_at is not None:
            for server in tuple(self.servers):
                try:
                    await server.connection.open()
                except ConnectionLost as error:
                    server.away = str(error)
                    continue
                except ServerRefusal:
                    pass
                self.found(server)
            await asyncio.sleep(PROBE_S)

    def add(self, address: str) -> "Server":
        """Use this server, a worker of the run, too from now on; who started it reports its end."""
        server = Server(Connection(socket_address(address), *self._given), waited_for=False)
        self._loop.call_soon_threadsafe(self.servers.append, server)
        return server

    def drop(self, server: "Server") -> None:
        """A server is gone for good."""
        server.gone = True
        self._loop.call_soon_threadsafe(self.servers.remove, server)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The outcome of a coroutine in the client's thread. Its waits are bounded by its own deadlines."""
        return self._thread.submit(work).result()

    async def open(
        self,
        environment: str,
        options: Json,
        seed: int,
        store: MediaStore,
        deadline_s: float,
        waiting: Callable[[str], None] = lambda why: None,
    ) -> tuple["RemoteSession", Json]:
        """Open a session at some server; returns it and the reply to its reset. ``waiting`` gets the reasons of waits."""
        until, pause, why = time.monotonic() + deadline_s, 0.05, ""
        operation = {"op": "open", "environment": environment, "options": options, "seed": seed}
        sessions: dict[Server, RemoteSession] = {}
        doubtful: set[RemoteSession] = set()
        try:
            while True:
                if not self.servers:
                    raise EnvironmentLost("all servers of environments are gone")
                denied = unreached = refused = 0
                for server in sorted(self.servers, key=Server.rank):
                    session = sessions.setdefault(server, RemoteSession(self, server, str(uuid4()), store))
                    server.sessions += 1  # before it is open: sessions that open at the same moment go to other servers
                    try:
                        reply = await session.ask(operation, max(0.001, until - time.monotonic()))
                        doubtful.discard(session)
                        self.found(server)
                        session.counted = True
                        return session, reply
                    except ConnectionLost as error:
                        doubtful.add(session)  # it may have been opened
                        why, unreached, refused = str(error), unreached + 1, refused + error.refused
                        self.missed(server, error)
                    except ServerRefusal as refusal:
                        why = f"{server.connection.url}: {refusal.why}"
                        if refusal.status == 503:
                            continue
                        _refuse_lost(refusal, why)
                        if refusal.status not in NO_ENTRY:
                            raise EnvironmentFailure(why) from refusal
                        denied += 1
                        server.is_away(why, self._others(server))
                    finally:
                        server.sessions -= not session.counted
                    server.down_until = time.monotonic() + DOWN_S
                if denied and denied == len(self.servers):
                    raise EnvironmentFailure(why)
                waiting(why)
                over = time.monotonic() + pause > until
                if self.lost_at is not None and (over or refused == len(self.servers)):
                    raise ServerLost(f"no environment server answers: {why}")
                if over:
                    raise EnvironmentFailure(f"no session could be opened within {deadline_s:g} s: {why}")
                await asyncio.sleep(pause * (0.5 + random.random()))
                pause = min(2 * pause, 2.0)
        finally:
            for session in doubtful:
                closing = self._loop.create_task(session.close(DOWN_S))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    async def content_keys(self, environment: str, options: Json, seeds: Sequence[int], deadline_s: float) -> list[str]:
        """What seeds lead to, by a server's own environment."""
        why = ""
        for server in sorted(self.servers, key=Server.rank):
            operation = {"op": "content_keys", "environment": environment, "options": options, "seeds": list(seeds)}
            try:
                found: list[str] = (await server.connection.ask(operation, deadline_s))["keys"]
                self.found(server)
                return found
            except ConnectionLost as error:
                why = str(error)
                self.missed(server, error)
            except ServerRefusal as refusal:
                raise RecipeError(f"remote: {refusal.why}") from refusal
        raise RecipeError(f"remote: no server answers: {why}")

    def close(self) -> None:
        try:
            for server in self.servers:
                self.run(server.connection.close())
        finally:
            self._thread.close()


class RemoteSession:
    """A session at one server. Steps are numbered here, so that the server recognises a repeated one."""

    def __init__(self, client: EnvironmentClient, server: Server, id: str, store: MediaStore) -> None:
        self.client, self.server, self.id, self.store, self.number = client, server, id, store, 0
        self.counted = False  # among the server's sessions

    async def ask(self, operation: Json, deadline_s: float) -> Json:
        return await self.server.connection.ask({**operation, "session": self.id}, deadline_s, self.store)

    async def step(self, response: str, deadline_s: float, retry_s: float) -> Json:
        """Act, once: a lost reply is requested again for ``retry_s``."""
        self.number += 1
        operation = {"op": "step", "number": self.number, "response": response}
        until, pause = time.monotonic() + deadline_s, 0.05
        lost_at: float | None = None
        while True:
            try:
                return await self.ask(operation, max(0.001, until - time.monotonic()))
            except ConnectionLost as error:
                self._refuse_gone(error)
                self.client.missed(self.server, error)
                now = time.monotonic()
                lost_at = now if lost_at is None else lost_at
                over = now + pause > min(until, lost_at + retry_s)
                if self.server.waited_for and (error.refused or over):
                    raise ServerLost(f"step {self.number} is lost: {error}") from error
                if over:
                    raise EnvironmentFailure(f"step {self.number} is lost: {error}") from error
            except ServerRefusal as refusal:
                self._refuse_unknown(refusal)
                raise EnvironmentFailure(f"{self.server.connection.url}: {refusal.why}") from refusal
            await asyncio.sleep(pause * (0.5 + random.random()))
            pause = min(2 * pause, 1.0)

    async def demonstrate(self, deadline_s: float) -> str:
        try:
            return str((await self.ask({"op": "demonstrate"}, deadline_s))["response"])
        except ConnectionLost as error:
            self._refuse_gone(error)
            self.client.missed(self.server, error)
            kind = ServerLost if self.server.waited_for else EnvironmentFailure
            raise kind(f"{self.server.connection.url}: {error}") from error
        except ServerRefusal as refusal:
            self._refuse_unknown(refusal)
            raise EnvironmentFailure(f"{self.server.connection.url}: {refusal}") from refusal

    async def close(self, deadline_s: float) -> None:
        """Close it; a server that cannot be asked closes it when its lease is over."""
        self.server.sessions -= self.counted
        self.counted = False
        with suppress(ConnectionLost, ServerRefusal):
            await self.ask({"op": "close"}, deadline_s)

    def _refuse_unknown(self, refusal: ServerRefusal) -> None:
        """Raise if the server does not know the session, since it was started again, or lost the environment's process."""
        self._refuse_gone(refusal)
        _refuse_lost(refusal, f"{self.server.connection.url}: {refusal.why}")
        if refusal.status == UNKNOWN and self.server.waited_for:
            raise ServerLost(f"{self.server.connection.url} was started again: {refusal.why}") from refusal

    def _refuse_gone(self, error: Exception) -> None:
        if self.server.gone:
            raise EnvironmentLost(f"step {self.number} is lost: {error}") from error


def _refuse_lost(refusal: ServerRefusal, why: str) -> None:
    if refusal.status == LOST:
        raise EnvironmentLost(why) from refusal


class RemoteEnvironment:
    """``environment`` with ``options`` at one of ``servers`` (addresses). The key is read from SENSORIUM_SERVICE_KEY.

    A call takes at most ``deadline_s``; a lost reply is requested again for ``retry_s``, and never acts twice. Where no
    server answers any more, the run waits for one for ``wait_s``, and plays the lost episodes again.
    """

    instant = False
    stands_for = True
    recipe_only = ("servers",)

    def __init__(
        self,
        store: MediaStore,
        servers: str | Sequence[str],
        environment: str,
        options: Mapping[str, Any] | None = None,
        deadline_s: float = 60.0,
        retry_s: float = 10.0,
        wait_s: float = 300.0,
    ) -> None:
        within("remote", "deadline_s", deadline_s, 0.001, 86_400)
        within("remote", "retry_s", retry_s, 0.0, 86_400)
        within("remote", "wait_s", wait_s, 0.0, 86_400)
        self.store, self.environment, self.options = store, environment, dict(options or {})
        self.deadline_s, self.retry_s, self.wait_s = deadline_s, retry_s, wait_s
        self._client = shared_client([servers] if isinstance(servers, str) else servers, os.environ.get(KEY, ""))
        self._session: RemoteSession | None = None
        self._closed = 0
        self.waits_for = ""

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        """What a seed leads to, by the server's own environment."""
        remote = cls(MediaStore(), **options)
        asked = remote._client.content_keys(remote.environment, remote.options, [seed], remote.deadline_s)
        return str(remote._client.run(asked)[0])

    @classmethod
    async def available(cls, options: Mapping[str, Any], noted: Callable[[str], None]) -> None:
        """Wait while none of the servers answers."""
        remote = cls(MediaStore(), **options)
        await remote._client.answers(remote.wait_s, noted)

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        """Open a session by the seed. If this is closed meanwhile, from another thread, it is closed when it opens."""
        self.close()
        closed = self._closed
        opening = self._client.open(self.environment, self.options, seed, self.store, self.deadline_s, self._wait)
        session, reply = self._client.run(opening)
        self._session, self.waits_for = session, ""
        if self._closed != closed:
            self.close()
            raise EnvironmentFailure(f"remote environment '{self.environment}': it was closed before it began.")
        return reset_from_json(reply)

    def step(self, response: str) -> StepResult:
        return step_from_json(self._client.run(self._known().step(response, self.deadline_s, self.retry_s)))

    def demonstrate(self) -> str:
        return str(self._client.run(self._known().demonstrate(self.deadline_s)))

    def close(self) -> None:
        self._closed += 1
        session, self._session = self._session, None
        if session is not None:
            self._client.run(session.close(self.deadline_s))

    def _wait(self, why: str) -> None:
        self.waits_for = why

    def _known(self) -> RemoteSession:
        if self._session is None:
            raise EnvironmentFailure(f"remote environment '{self.environment}': it has not begun; reset it first.")
        return self._session


class PlacedEnvironment(RemoteEnvironment):
    """``environment`` with ``options`` at one of a client's servers. Its worker's death is an EnvironmentLost."""

    def __init__(
        self, store: MediaStore, client: EnvironmentClient, environment: str, options: Mapping[str, Any], deadline_s: float
    ) -> None:
        self.store, self.environment, self.options = store, environment, dict(options)
        self.deadline_s, self.retry_s = deadline_s, PLACED_RETRY_S
        self._client = client
        self._session, self._closed, self.waits_for = None, 0, ""

"""The environment service: sessions over HTTP, and the same operations in batches over one WebSocket.

    PUT    /v1/sessions/{id}            {"environment": "sokoban", "options": {}, "seed": 7}; gives the first observation
    POST   /v1/sessions/{id}/steps/{n}  {"response": "…"}; acts, once for each n
    POST   /v1/sessions/{id}/lease      keeps it
    DELETE /v1/sessions/{id}            closes it
    GET    /v1/media/{hash}             a picture that was referred to
    WS     /v1/ws                       frames of many operations (``envs/remote/wire.py``), with the pictures in them

Statuses: 401 no key, 404 no such session or environment, 409 a step out of turn, 410 the episode has failed, 422 a wrong
request, 502 the process of its environment was lost, which is not the episode's fault, 503 full (with Retry-After).

``python -m sensorium.services.environment_service FD`` is a worker of a run: it serves the run's driver alone, on a free
port. ``cluster/placed_workers.py`` has the rest.
"""

import asyncio
import pathlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any

from fastapi import FastAPI, Path, Response, WebSocket, WebSocketDisconnect
from pydantic import BaseModel, ConfigDict, Field

from sensorium import __version__
from sensorium.cluster.placed_workers import Answer, serve
from sensorium.cluster.python_process import own_address
from sensorium.data.media_store import MediaStore
from sensorium.envs.remote.instances import InstancePool
from sensorium.envs.remote.wire import MOST_BYTES, Json, WireError, bytes_of, pack, unpack
from sensorium.recipe.registry import resolve, wrong_options
from sensorium.recipe.registry import table as names_of
from sensorium.services.application import BodyLimit, Refusal, Whole, make_application, sweep
from sensorium.services.sessions import MAX_ID, Offers, SessionTable, seed_of
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.errors import MediaError, RecipeError

REAP_S = 5.0
WORKER_CAPACITY, WORKER_LEASE_S = 65536, 86_400.0
LOOPBACK = "127.0.0.1"
MOST_OPERATIONS = 4096
MOST_WAITING = 2 * MOST_OPERATIONS  # operations of a connection under way or with waiting replies; beyond, reading pauses
MOST_BODY = 64 * 1024 * 1024
MOST_SEED = 2**53 - 1  # the largest whole number that every reader of JSON reads exactly

STATUSES = {
    400: "the body cannot be read",
    401: "the key is missing or wrong",
    404: "there is no such session, environment or medium",
    409: "a step out of turn, or another session has this id",
    410: "the episode has ended or failed",
    413: "the body is too large",
    422: "the request is wrong",
    502: "the process of the environment was lost; open another session for the episode",
    503: "the server is full; try again after Retry-After seconds",
}

SessionId = Annotated[str, Path(min_length=1, max_length=MAX_ID)]


class OpenRequest(BaseModel):
    """The environment to open."""

    model_config = ConfigDict(strict=True, extra="forbid")
    environment: str
    options: dict[str, Any] = Field(default_factory=dict)
    seed: Whole = Field(0, ge=0, le=MOST_SEED)


class StepRequest(BaseModel):
    """What the model wrote."""

    model_config = ConfigDict(strict=True, extra="forbid")
    response: str


def make_app(table: SessionTable, key: str = "", hosts: Sequence[str] = ()) -> FastAPI:
    """The service. ``key`` must come with every request but /health, where it is not empty; ``hosts``: further names."""

    async def reap() -> None:
        while True:
            await asyncio.sleep(min(REAP_S, table.lease_s))
            table.reap()
            await asyncio.to_thread(sweep, table.store.folder, 2 * table.lease_s)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        reaper = asyncio.create_task(reap())
        yield
        reaper.cancel()
        await table.shut()

    app, declared = make_application("Sensorium environment service", key, lifespan, STATUSES, hosts=hosts)
    app.add_middleware(BodyLimit, most=MOST_BODY)

    @app.get("/health")
    async def health() -> Json:
        """Our own keys, and those that VAGEN's clients look for, legacy and current."""
        theirs = {"message": "environment service", "registered_envs": sorted(table.offers.offers), "active_services": 1}
        today = {"ok": True, "service": "gym-env-service", "max_inflight": "unlimited"}
        count = len(table.sessions)
        return {"status": "ok", "version": __version__, **table.counts(), **theirs, "active_environments": count, **today}

    @app.put("/v1/sessions/{id}", **declared)
    async def open_session(id: SessionId, asked: OpenRequest) -> Json:
        return await table.open(id, asked.environment, asked.options, asked.seed)

    @app.post("/v1/sessions/{id}/steps/{number}", **declared)
    async def step_session(id: SessionId, number: Annotated[int, Path(ge=1, le=MOST_SEED)], asked: StepRequest) -> Json:
        return await table.step(id, number, asked.response)

    @app.post("/v1/sessions/{id}/lease", **declared)
    async def renew_lease(id: SessionId) -> Json:
        return table.renew(id)

    @app.delete("/v1/sessions/{id}", **declared)
    async def close_session(id: SessionId) -> Json:
        return await table.close(id)

    @app.get("/v1/media/{digest}", response_class=Response, **declared)
    async def medium(digest: Annotated[str, Path(pattern="^[0-9a-f]{64}$")]) -> Response:
        try:
            data = table.store.bytes_of(Media("picture", digest))
        except MediaError as error:
            raise Refusal(404, "there is no such medium") from error
        return Response(data, media_type="image/png" if data.startswith(b"\x89PNG") else "application/octet-stream")

    @app.websocket("/v1/ws")
    async def operations(socket: WebSocket) -> None:
        await socket.accept()
        await _Exchange(socket, table).serve()

    for name in names_of("environment_routes"):
        app.include_router(resolve("environment_routes", name)(table))
    return app


class _Exchange:
    """One WebSocket: operations come in batches, replies go out in batches as they are ready, each with its id."""

    def __init__(self, socket: WebSocket, table: SessionTable) -> None:
        self.socket, self.table = socket, table
        self._ready: list[Json] = []
        self._wake = asyncio.Event()
        self._gone = False
        self._at_work: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        writer = asyncio.create_task(self._write())
        try:
            while True:
                self._take(await self.socket.receive_bytes())
                while len(self._ready) + len(self._at_work) > MOST_WAITING:  # it asks faster than it reads
                    await asyncio.sleep(0.05)
        except (WebSocketDisconnect, RuntimeError, KeyError):  # it is gone, or sent text; its sessions have their lease
            pass
        except WireError as error:
            with suppress(RuntimeError):
                await self.socket.close(4400, str(error)[:100])
        finally:
            writer.cancel()
            self._gone = True
            self.table.abandon(self)

    def _take(self, frame: bytes) -> None:
        body, _ = unpack(frame)
        listed = body.get("ops")
        if not isinstance(listed, list) or len(listed) > MOST_OPERATIONS:
            raise WireError(f"a frame holds up to {MOST_OPERATIONS} 'ops'")
        for operation in listed:
            if not isinstance(operation, dict) or not isinstance(operation.get("id"), int):
                raise WireError("an operation has an id")
            task = asyncio.create_task(self._perform(operation))
            self._at_work.add(task)
            task.add_done_callback(self._at_work.discard)

    async def _perform(self, operation: Json) -> None:
        reply: Json = {"id": operation["id"]}
        try:
            reply["value"] = await perform(self.table, operation)
        except Refusal as refusal:
            reply |= {"status": refusal.status, "why": refusal.why, "retry_after_s": refusal.retry_after_s}
        self.table.asked_by(self, operation.get("session"), self._gone)
        self._ready.append(reply)
        self._wake.set()

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(0)  # replies of the same moment are sent together
            self._wake.clear()
            ready, self._ready = self._ready, []
            try:
                await self.socket.send_bytes(pack({"replies": ready}, bytes_of(ready, self.table.store)))
            except (RuntimeError, WebSocketDisconnect):
                return


async def perform(table: SessionTable, operation: Json) -> Json:
    """One operation of a frame: ``op`` and its fields."""

    def open_session(id: str, environment: str, options: Json, seed: int) -> Any:
        return table.open(id, environment, options, seed_of(seed))

    async def content_keys(environment: str, options: Json, seeds: list[Any]) -> Json:
        if len(seeds) > 1000:
            raise Refusal(422, "up to 1000 seeds")
        return {"keys": await table.content_keys(environment, options, [seed_of(seed) for seed in seeds])}

    wanted: dict[str, tuple[Callable[..., Any], dict[str, type]]] = {
        "open": (open_session, {"session": str, "environment": str, "options": dict, "seed": int}),
        "step": (table.step, {"session": str, "number": int, "response": str}),
        "demonstrate": (table.demonstrate, {"session": str}),
        "lease": (table.renew, {"session": str}),
        "close": (table.close, {"session": str}),
        "content_keys": (content_keys, {"environment": str, "options": dict, "seeds": list}),
    }
    if str(operation.get("op")) not in wanted:
        raise Refusal(422, f"there is no operation '{operation.get('op')!s:.40}'; there is {', '.join(wanted)}")
    method, fields = wanted[str(operation["op"])]
    for key, kind in fields.items():
        given = operation.get(key)
        if not isinstance(given, kind) or (isinstance(given, bool) and kind is int):
            raise Refusal(422, f"the operation needs '{key}'")
    outcome = method(*(operation[key] for key in fields))
    value: Json = await outcome if asyncio.iscoroutine(outcome) else outcome
    return value


class OwnOffers(Offers):
    """Whatever the run's recipe names, with any options: the driver is trusted, and has the key."""

    def __init__(self) -> None:
        self.offers = {}

    def chosen(self, name: Any, options: Any) -> tuple[str, dict[str, Any]]:
        _, problem = wrong_options("environment", name, options)
        if problem:
            raise RecipeError(problem)
        return name, dict(options)


def open_work(settings: Mapping[str, Any], folder: pathlib.Path) -> tuple[str, Answer]:
    """Serve a run's driver; returns the address. ``toward`` is an address of the driver; empty: it is on this machine.

    With ``pool`` instances are kept; the driver sees to it that all workers together have no more episodes.
    """
    import uvicorn

    host = own_address(settings["toward"]) if settings["toward"] else LOOPBACK
    listening = socket.create_server((host, 0), backlog=1024)
    pool = InstancePool(settings["pool"], settings["deadline_s"]) if settings["pool"] else None
    given = WORKER_CAPACITY, WORKER_LEASE_S, settings["deadline_s"]
    table = SessionTable(OwnOffers(), MediaStore(folder), *given, pool=pool)
    config = uvicorn.Config(make_app(table, settings["key"]), log_level="warning", ws_max_size=MOST_BYTES)
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, args=([listening],), name="service", daemon=True).start()
    return f"http://{host}:{listening.getsockname()[1]}", lambda question: table.counts()


if __name__ == "__main__":
    serve(open_work)

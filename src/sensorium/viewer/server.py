"""The page that ``sensorium view`` serves: its address has a token, and it answers this machine's browsers alone.

Refused before anything is read: a Host that is not loopback's (a rebound name), an Origin or Sec-Fetch-Site of another
site, a path that does not begin with the token (as any unknown path: 404), any method but GET. Every name in a
query is looked up among the runs and their indexed episodes, so no path is made of what was sent. Under the content
security policy of all that is served, markup of an episode could run and load nothing, should it ever reach the page as
such.
"""

import asyncio
import hashlib
import hmac
import json
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal
from weakref import WeakSet

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from pydantic_core import to_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sensorium.services.application import BodyLimit, foreign
from sensorium.viewer.episode import RunMedia, episode_page, medium_of
from sensorium.viewer.index import EpisodeIndex, Search
from sensorium.viewer.runs import COLOURS, RescoredSort, ViewedRun, charts, find_runs, recipe_differences
from sensorium.viewer.what_if import MOST_BODY, WhatIf, what_if_routes
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.errors import SensoriumError

EVERY_S = 1.0  # between looks at a run that is followed
GLANCE_S = 0.2  # in which a stream notices that the viewer ends
BEAT_S = 15.0  # between lines of a stream on which nothing happens, so that a closed page is noticed
MOST_STREAMS, MOST_DECODINGS, MOST_OPEN = 32, 2, 4
INDEX_NICE = 5  # of the thread that indexes; at 19 it would keep others from the interpreter while it waits for a core
LONGEST_LIST = 40  # metrics of a request for charts
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
KEPT = {"Cache-Control": "private, no-cache"}  # kept with its tag: a new run in the same folder has other media
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
FILMS = {"gif": "image/gif", "mp4": "video/mp4"}
ASSETS = ("viewer", "report")
POSTED = "api/what_if/"  # the only requests that are not GET

Json = dict[str, Any]


class _Asked(Search, frozen=True, extra="forbid"):
    """A search, and the run that it is of."""

    run: str


class Gate:
    """Refuses what does not come from this page, and removes the token from the path of what does."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # a WebSocket is closed before it is accepted
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        headers, bound = Headers(scope=scope), str((scope.get("server") or ("",))[0])

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    given.setdefault(name, value)
            await send(message)

        _, given, rest = (*scope["path"].split("/", 2), "", "")[:3]
        site, mode = headers.get("sec-fetch-site", "none"), headers.get("sec-fetch-mode", "navigate")
        refusal: Response | None = None
        if foreign(headers.getlist("host"), headers.getlist("origin"), bound, "", ()) or not headers.getlist("host"):
            refusal = PlainTextResponse("The Host or the Origin is not this page's.\n", 403)
        elif site not in ("none", "same-origin") and mode != "navigate":
            refusal = PlainTextResponse("Another site asks.\n", 403)
        elif not hmac.compare_digest(given.encode(), self.token.encode()):
            refusal = PlainTextResponse("Nothing is here. The address that 'sensorium view' printed has a token.\n", 404)
        elif scope["method"] == "POST" and rest.startswith(POSTED):
            kind = headers.get("content-type", "").partition(";")[0].strip()
            if headers.get("sec-fetch-site", "same-origin") != "same-origin":
                refusal = PlainTextResponse("Another site asks.\n", 403)
            elif kind != "application/json":  # which no form of a page can send
                refusal = PlainTextResponse("A request is JSON.\n", 415)
        elif scope["method"] != "GET":
            refusal = PlainTextResponse("Only GET.\n", 405, {"Allow": "GET"})
        if refusal is not None:
            await refusal(scope, receive, guarded)
            return
        inner: Scope = {**scope, "path": f"/{rest}", "raw_path": f"/{rest}".encode()}
        await self.app(inner, receive, guarded)


class Viewer:
    """The runs that are served, what is open of them, and one thread that indexes."""

    def __init__(self, places: list[Path]) -> None:
        self.places = places
        self.runs: dict[str, ViewedRun] = {}
        self.streams: WeakSet[AsyncIterator[str]] = WeakSet()  # those that are being sent
        self.closed = threading.Event()
        self._media: dict[str, RunMedia] = {}
        self._lock = threading.Lock()
        self._waiting: set[str] = set()
        self._indexing = ThreadPoolExecutor(1, thread_name_prefix="index", initializer=_lower_priority)
        self.look()

    def look(self) -> list[ViewedRun]:
        """The runs that there are now, the last written first."""
        found = {run.id: run for run in find_runs(self.places)}
        with self._lock:
            self.runs = {id: self.runs.get(id, run) for id, run in found.items()}
            return list(self.runs.values())

    def run(self, id: str) -> ViewedRun:
        run = self.runs.get(id)
        if run is None:
            raise HTTPException(404, "there is no such run here (any more)")
        return run

    def several(self, ids: str) -> list[ViewedRun]:
        """The runs of a list of ids, as many as a chart has colours."""
        return [self.run(id) for id in dict.fromkeys(ids.split(","))][: len(COLOURS)]

    def index(self, run: ViewedRun) -> EpisodeIndex:
        """A run's index, which is brought up to date by the thread that indexes."""
        left = run.index_s_left
        with self._lock:
            if left > 0 and run.id not in self._waiting and not self.closed.is_set():
                self._waiting.add(run.id)
                self._indexing.submit(self._indexed, run, left)
        return run.index

    def facets(self, run: ViewedRun) -> Json:
        """What can be asked for of a run's episodes. Where there is no index, why: the rest of the run is shown."""
        index = self.index(run)
        try:
            found = index.facets()
        except SensoriumError as error:
            return dict.fromkeys(("log", "category", "status", "fate", "terms"), ()) | {
                "steps": [None, None], "count": 0, "problems": [str(error)],
            }  # fmt: skip
        return found | {"problems": [*found["problems"], *filter(None, [index.problem])]}

    def _indexed(self, run: ViewedRun, left: float) -> None:
        began = time.thread_time()
        try:
            run.index.update(lambda: self.closed.is_set() or time.thread_time() - began > left)
        except Exception as error:  # the page shows it: nobody waits for what this thread returns
            known = isinstance(error, SensoriumError)
            run.index.problem = str(error) if known else f"Indexing the episodes failed: {type(error).__name__}: {error}"
        finally:
            if left < math.inf:
                run.index_s += time.thread_time() - began
            with self._lock:
                self._waiting.discard(run.id)

    def row(self, run: str, file: str, id: str) -> tuple[ViewedRun, Json]:
        """A run and the log row of one of its episodes."""
        found = self.run(run)
        row = found.index.row(file, id)
        if row is None:
            if found.index.behind:
                raise HTTPException(404, "this run's episodes are being indexed: open it again in a moment")
            raise HTTPException(404, "there is no such episode (any more): the run may keep only a part of its logs")
        return found, row

    def media(self, run: ViewedRun) -> RunMedia:
        """The media of a run; those of a few runs are open at once."""
        with self._lock:
            if run.id not in self._media:
                if not run.directory.media.is_dir():
                    raise HTTPException(404, "the run has no media")
                while len(self._media) >= MOST_OPEN:
                    self._media.pop(next(iter(self._media)))  # not closed: a request may use it
                self._media[run.id] = RunMedia(run.directory)
            return self._media[run.id]

    def close(self) -> None:
        """End indexing, between two batches, and decoding."""
        self.closed.set()
        self._indexing.shutdown(cancel_futures=True)
        for media in self._media.values():
            media.close()


def _lower_priority() -> None:
    """Let everything else on this machine go first: runs may train here."""
    if sys.platform == "linux":  # elsewhere it would be the priority of the whole process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), INDEX_NICE)


def new_token() -> str:
    """A token that nobody guesses."""
    return secrets.token_urlsafe(24)


def _reply(data: Json, status: int = 200) -> Response:
    return Response(to_json(data, inf_nan_mode="strings", fallback=str), status, media_type="application/json")


def make_view(places: Iterable[Path], token: str, every_s: float = EVERY_S, device: str = "auto") -> FastAPI:
    """The application, which answers below ``/TOKEN/``; ``device`` is that of models that are asked what if."""
    viewer, decoding = Viewer(list(places)), threading.BoundedSemaphore(MOST_DECODINGS)
    what_if = WhatIf(device, lambda: any(run.glance()["alive"] for run in viewer.look()))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            what_if.close()
            viewer.close()

    app = FastAPI(title="Sensorium view", lifespan=lifespan, openapi_url=None)
    app.state.viewer = viewer
    app.include_router(what_if_routes(what_if, viewer.row))
    app.add_middleware(BodyLimit, most=MOST_BODY)
    app.add_middleware(Gate, token=token)
    assets = {
        f"{folder}/{file.name}": file for folder in ASSETS for file in (files("sensorium") / "assets" / folder).iterdir()
    }

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return _reply({"problem": str(error.detail)}, error.status_code)

    @app.exception_handler(SensoriumError)
    async def failed(request: Request, error: SensoriumError) -> Response:
        return _reply({"problem": str(error)}, 422)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return _reply({"problem": f"{'.'.join(map(str, first['loc'][1:]))}: {first['msg']}"}, 400)

    @app.get("/")
    def page() -> Response:
        return asset("viewer/index.html")

    @app.get("/assets/{folder}/{name}")
    def stored(folder: str, name: str) -> Response:
        return asset(f"{folder}/{name}")

    def asset(name: str) -> Response:
        found, kind = assets.get(name), TYPES.get(Path(name).suffix)
        if found is None or kind is None:
            raise HTTPException(404, "there is no such file")
        return Response(found.read_bytes(), media_type=kind)

    @app.get("/api/runs")
    def runs() -> Response:
        found = [run.summary() for run in viewer.look()]
        return _reply({"runs": sorted(found, key=lambda run: -run["written"]), "places": [str(p) for p in viewer.places]})

    @app.get("/api/run")
    def one_run(run: str) -> Response:
        found = viewer.run(run)
        return _reply(found.details() | {"episodes": viewer.facets(found)})

    @app.get("/api/charts")
    def drawn(runs: str, metrics: str) -> Response:
        return _reply({"charts": charts(viewer.several(runs), metrics.split(",")[:LONGEST_LIST])})

    @app.get("/api/differences")
    def compared(runs: str) -> Response:
        found = viewer.several(runs)
        return _reply({"runs": [run.name for run in found], "keys": recipe_differences(found)})

    def indexing(run: ViewedRun) -> Json:
        """Whether episodes are indexed just now, or wait for their turn beside the run that goes on."""
        return {"busy": run.index.busy, "waits": run.index_s_left <= 0 and run.index.behind}

    @app.get("/api/episodes")
    def episodes(asked: Annotated[_Asked, Query()]) -> Response:
        found = viewer.run(asked.run)
        viewer.index(found)
        return _reply(found.index.search(Search(**asked.model_dump(exclude={"run"}))) | indexing(found))

    @app.get("/api/episode")
    def episode(run: str, file: str, id: str) -> Response:
        found, row = viewer.row(run, file, id)
        attempts, others = found.index.related(file, id)
        again = [(one.name, one.row(id, row["step"])) for one in found.rescorings()]
        rescored = [{"rescoring": name, **row} for name, row in again if row is not None]
        related = {"file": file, "attempts": attempts, "others": others, "rescored": rescored}
        return _reply(episode_page(found.directory, row) | related)

    @app.get("/api/rescorings")
    def rescorings(run: str) -> Response:
        return _reply({"rescorings": [one.overview() for one in viewer.run(run).rescorings()]})

    @app.get("/api/rescored")
    def rescored(
        run: str,
        name: str,
        sort: RescoredSort = "change",
        turned: bool = False,
        offset: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
    ) -> Response:
        found = viewer.run(run)
        one = next((one for one in found.rescorings() if one.name == name), None)
        if one is None:
            raise HTTPException(404, "there is no such rescoring beside the run (any more)")
        count, rows = one.rows(sort, turned=turned, offset=offset, limit=limit)
        logs = viewer.index(found).logs_of([row["name"] for row in rows])
        return _reply(
            {"count": count, "episodes": [{**row, "file": logs.get((row["name"], row["step"]), "")} for row in rows]}
        )

    @app.get("/api/thumb")
    def thumb(request: Request, run: str, file: str, id: str) -> Response:
        found = viewer.run(run)
        digest = found.index.picture(file, id)
        if not digest:
            raise HTTPException(404, "the episode showed no picture")
        return decoded(request, digest, lambda: viewer.media(found).picture(Media("picture", digest), 96))

    @app.get("/api/medium")
    def medium(request: Request, run: str, file: str, id: str, n: int) -> Response:
        found, row = viewer.row(run, file, id)
        media, opened = medium_of(row, n), viewer.media(found)
        if media.kind == "picture":
            return decoded(request, media, lambda: opened.picture(media))
        path, kind = opened.file_of(media.hash, media.kind)
        if kind.partition("/")[0] not in ("image", "video", "audio"):
            raise HTTPException(415, f"a file of type {kind} is not shown")
        return FileResponse(path, media_type=kind, headers=KEPT)

    @app.get("/api/given")
    def given(run: str, file: str, id: str, n: int) -> Response:
        found, row = viewer.row(run, file, id)
        with decoding:
            return _reply({"parts": viewer.media(found).given(medium_of(row, n))})

    @app.get("/api/strip")
    def strip(request: Request, run: str, file: str, id: str, n: int) -> Response:
        found, row = viewer.row(run, file, id)
        media = medium_of(row, n)
        return decoded(request, media, lambda: (viewer.media(found).strip(media), "image/jpeg"))

    @app.get("/api/heard")
    def heard(request: Request, run: str, file: str, id: str, n: int) -> Response:
        found, row = viewer.row(run, file, id)
        media = medium_of(row, n)
        return decoded(request, media, lambda: (viewer.media(found).heard(media), "audio/wav"))

    @app.get("/api/film")
    def film(request: Request, run: str, file: str, id: str, kind: Literal["gif", "mp4"] = "gif") -> Response:
        found, row = viewer.row(run, file, id)
        name = "".join(c if c.isalnum() else "_" for c in id)[:80]
        return decoded(request, row, lambda: (viewer.media(found).film(row, kind), FILMS[kind]), f"{name}.{kind}")

    def decoded(request: Request, of: object, made: Callable[[], tuple[bytes, str]], name: str = "") -> Response:
        """What is made of this, or that the browser has it."""
        headers = KEPT | {"ETag": f'"{hashlib.sha256(repr(of).encode()).hexdigest()[:32]}"'}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        with decoding:
            content, kind = made()
        if name:
            headers["Content-Disposition"] = f'attachment; filename="{name}"'
        return Response(content, media_type=kind, headers=headers)

    @app.get("/api/events")
    async def events(run: str = "") -> Response:
        """Server-sent events: of a run when it has written something, or its index grew; of all runs without one."""
        followed = viewer.run(run) if run else None
        pause = every_s if run else 3 * every_s
        if len(viewer.streams) >= MOST_STREAMS:
            raise HTTPException(503, f"{MOST_STREAMS} pages follow runs already: close some")

        def glance() -> Json:
            if followed is None:
                return {"runs": [{"id": one.id, **one.glance()} for one in viewer.look()]}
            index = viewer.index(followed)
            try:
                indexed = index.indexed()
            except SensoriumError:
                indexed = 0  # the page asks for the run, and shows the problem
            return followed.glance() | {"indexed": indexed, "problem": index.problem, **indexing(followed)}

        async def lines() -> AsyncIterator[str]:
            try:
                before, waited = None, 0.0
                while not viewer.closed.is_set():
                    now = await asyncio.to_thread(glance)
                    if now != before:
                        yield f"data: {json.dumps(now)}\n\n"
                        before, waited = now, 0.0
                    elif waited >= BEAT_S:
                        yield ": nothing new\n\n"
                        waited = 0.0
                    until = time.monotonic() + pause
                    while (left := until - time.monotonic()) > 0 and not viewer.closed.is_set():
                        await asyncio.sleep(min(left, GLANCE_S))
                    waited += pause
            finally:
                viewer.streams.discard(stream)

        stream = lines()
        viewer.streams.add(stream)
        return StreamingResponse(stream, media_type="text/event-stream")

    return app

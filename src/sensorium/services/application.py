"""What all services have in common, and who may use them: programs on loopback, and with the key anywhere.

A service without a key stays on loopback. Web pages may not use it: a browser on this machine reaches loopback for any page
it shows, and sends where the page came from:

    Host: 127.0.0.1:8300, no Origin                        a program: served
    Host: 127.0.0.1:8300, Origin: http://127.0.0.1:8300    a page of this service itself: served
    Host: 127.0.0.1:8300, Origin: https://evil.example     a page of another site: refused
    Host: evil.example:8300, Origin: the same              a site whose name was rebound to this machine: refused
"""

import asyncio
import functools
import hmac
import ipaddress
import os
import re
import socket
import time
import traceback
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BeforeValidator
from starlette.datastructures import Headers, QueryParams
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sensorium import __version__
from sensorium.cluster.event_loop import run_async
from sensorium.data.media_store import MediaStore
from sensorium.vocabulary.errors import RecipeError, SensoriumError

ENVIRONMENT_VARIABLE = "SENSORIUM_SERVICE_KEY"
HOST = re.compile(r"(?:\[([^\]/@]+)\]|([^\[\]:/@\s]+))(?::(\d*))?")
OPEN = re.compile(r"/health|/openenv/[^/]+/(health|schema)")  # paths that need no key
NO_KEY = "the key is missing or wrong (headers Authorization: Bearer KEY or X-API-Key: KEY, or ?token=KEY in the address)"
FOREIGN = "the Host is not a name of this service, or a web page of another site asks"
MIB = 1 << 20
MAX_PORT = 65535
SWEEP_S = 30.0

Json = dict[str, Any]


def refuse_open(host: str, key: str) -> None:
    """Refuse to listen beyond this machine without a key, and a key that no header can hold."""
    if not re.fullmatch(r"[!-~]*", key):
        raise RecipeError(
            f"{ENVIRONMENT_VARIABLE} has a character that cannot be sent, such as a line's end or a letter beyond ASCII. "
            "Use letters, digits and signs without spaces, here and at the clients."
        )
    if not key and not is_loopback(host):
        raise RecipeError(
            f"host {host} can be reached from other machines, and there is no key. Set {ENVIRONMENT_VARIABLE} to a long "
            "random text here and at the clients (for a client that sends no headers, such as CapRL's: ?token=KEY in its "
            "address), or listen on 127.0.0.1."
        )


def is_loopback(host: str) -> bool:
    """Whether an address reaches this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def allowed(key: str, headers: Mapping[str, str], query: Mapping[str, str]) -> bool:
    """Whether a request carries the key: as ``Authorization: Bearer``, ``X-API-Key``, or ``?token=`` in its address.

    The last is for clients that send no headers, such as VAGEN's and CapRL's.
    """
    if not key:
        return True
    bearer = re.sub(r"(?i)^bearer +", "", headers.get("authorization", ""))
    given = headers.get("x-api-key") or bearer or query.get("token", "")
    return hmac.compare_digest(given.encode("utf-8", "replace"), key.encode())


def foreign(hosts: Sequence[str], origins: Sequence[str], bound: str, key: str, names: Collection[str]) -> str:
    """Why the Host or Origin headers of a request are refused as a web page's; empty where they are in order.

    A service has loopback's names, the address ``bound`` that the connection came to, and ``names``. With a key it has also
    the machine's own names, and any IP address (of a container's host, say): a name can be rebound, an address cannot.
    """
    for host in hosts:
        name, _ = _split(host, "http")
        if not (_is_local(name, bound, key != "") or name in names or (key and name in machine_names())):
            return (
                f"'{host:.100}' is not a name of this service: a web page may have sent this. Use its IP address or "
                f"localhost; if it has this name, behind a proxy say, start it with --allowed-host {name or 'NAME':.100}"
            )
    for origin in origins:
        scheme, _, place = origin.partition("://")
        asked = _split(place, scheme)
        if asked[0] not in names and (not asked[0] or any(asked != _split(host, scheme) for host in hosts or [""])):
            return (
                f"the web page of '{origin:.100}' may not use this service; if it should, start the service with "
                f"--allowed-host {asked[0] or 'NAME':.100}"
            )
    return ""


@functools.cache
def machine_names() -> frozenset[str]:
    """What this machine calls itself: its name, that without the domain, and the full one."""
    name = socket.gethostname().lower()
    return frozenset({name, name.partition(".")[0], socket.getfqdn().lower()} - {""})


def _split(place: str, scheme: str) -> tuple[str, int]:
    """Name and port of ``name:port``; the name is empty where it cannot be read."""
    found = HOST.fullmatch(place)
    if found is None or scheme not in ("http", "https"):
        return "", 0
    port = int(found[3]) if found[3] else {"http": 80, "https": 443}[scheme]
    return (found[1] or found[2]).lower().rstrip("."), port


def _is_local(name: str, bound: str, any_address: bool) -> bool:
    """Whether a name is loopback's, or the address that is listened on (with ``any_address``, any)."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost"
    return any_address or address.is_loopback or address.is_unspecified or name == bound.lower()


class Refusal(Exception):
    """A request is not carried out: an HTTP status and why."""

    def __init__(self, status: int, why: str, retry_after_s: float = 0.0) -> None:
        super().__init__(why)
        self.status, self.why, self.retry_after_s = status, why, retry_after_s


def whole(value: Any) -> Any:
    """JSON has one kind of number: 7.0 is whole, as 7 is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(whole)]


def make_application(
    title: str,
    key: str,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None,
    statuses: dict[int, str],
    error_body: Callable[[int, str], Json] | None = None,
    hosts: Sequence[str] = (),
) -> tuple[FastAPI, Json]:
    """An application that refuses as all services do, and what its routes are declared with.

    ``error_body`` makes the body of a refusal from status and reason; by default ``{"detail": reason}``. ``hosts`` are
    further names by which clients may ask. The OpenAPI description is behind the key; the framework's pages that show it
    are left out, since they load scripts from elsewhere.
    """
    app = FastAPI(title=title, version=__version__, lifespan=lifespan, openapi_url=None)

    def reply(status: int, why: str, headers: dict[str, str] | None = None) -> JSONResponse:
        return JSONResponse(error_body(status, why) if error_body else {"detail": why}, status, headers=headers)

    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal) -> JSONResponse:
        again = refusal.retry_after_s
        return reply(refusal.status, refusal.why, {"Retry-After": f"{again:g}"} if again else None)

    @app.exception_handler(405)
    async def other_methods(request: Request, error: Exception) -> JSONResponse:
        """All methods of a path; the framework names only those of the first route."""
        found = [route for route in app.routes if route.matches(request.scope)[0] != Match.NONE]
        methods = {method for route in found for method in getattr(route, "methods", None) or ()}
        return reply(405, "Method Not Allowed", {"Allow": ", ".join(sorted(methods))})

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        """What is wrong and where, without what was sent: JSON may be unable to hold that, such as 1e400."""
        found = [{key: problem[key] for key in ("type", "loc", "msg")} for problem in error.errors()]
        if error_body is None:
            return JSONResponse({"detail": found}, 422)
        return reply(400, f"{'.'.join(map(str, found[0]['loc']))}: {found[0]['msg']}")

    if error_body is not None:

        @app.exception_handler(AnyHTTPException)
        async def http_error(request: Request, error: AnyHTTPException) -> JSONResponse:
            return reply(error.status_code, str(error.detail))

    app.add_middleware(Door, key=key, names=frozenset(name.lower().rstrip(".") for name in hosts), reply=reply)

    @app.get("/openapi.json", include_in_schema=False)
    async def description() -> Json:
        return app.openapi()

    return app, {"responses": {status: {"description": text} for status, text in ({403: FOREIGN} | statuses).items()}}


class Door:
    """Refuses requests of other sites' web pages (``foreign``), and those without the key, before a body is read."""

    def __init__(self, app: ASGIApp, key: str, names: frozenset[str], reply: Callable[[int, str], JSONResponse]) -> None:
        self.app, self.key, self.names, self.reply = app, key, names, reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            headers, bound = Headers(scope=scope), str((scope.get("server") or ("",))[0])
            status, why = 403, foreign(headers.getlist("host"), headers.getlist("origin"), bound, self.key, self.names)
            keyless = OPEN.fullmatch(scope["path"]) is not None
            if not why and not keyless and not allowed(self.key, headers, QueryParams(scope["query_string"])):
                status, why = 403 if scope["type"] == "websocket" else 401, NO_KEY
            if why:
                await self.reply(status, why)(scope, receive, send)
                await asyncio.sleep(0)  # or uvicorn logs an error: it sees only then that a refused WebSocket is closed
                return
        await self.app(scope, receive, send)


class BodyLimit:
    """Refuses bodies of more than ``most`` bytes, before they are held in memory."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app, self.most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.most:
                raise HTTPException(413, f"the body has more than {self.most / MIB:g} MiB")
            return message

        await self.app(scope, counted, send)


class Counters:
    """Numbers by name for /metrics: counters (``…_total``), and gauges that are read when they are requested."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._helps: dict[str, str] = {}
        self._sums: dict[str, float] = {}
        self._gauges: dict[str, Callable[[], float]] = {}

    def declare(self, **helps: str) -> None:
        """Add counters that start at 0, with what they count."""
        self._helps |= helps
        self._sums |= dict.fromkeys(helps, 0.0)

    def measure(self, name: str, text: str, read: Callable[[], float]) -> None:
        self._helps[name], self._gauges[name] = text, read

    def add(self, name: str, amount: float = 1) -> None:
        self._sums[name] += amount

    def __getitem__(self, name: str) -> float:
        return self._sums[name] if name in self._sums else self._gauges[name]()

    def page(self) -> PlainTextResponse:
        """All of them in Prometheus' text format."""
        lines = []
        for name, text in self._helps.items():
            end, kind = ("_total", "counter") if name in self._sums else ("", "gauge")
            full = f"{self.prefix}_{name}{end}"
            lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full} {self[name]:.10g}"]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


async def until_gone(request: Request) -> None:
    """Return when the client has closed its connection. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def listen(host: str, port: int) -> tuple[socket.socket, str]:
    """A listening socket, and the service's key from the environment; without a key only on loopback."""
    key = os.environ.get(ENVIRONMENT_VARIABLE, "")
    refuse_open(host, key)
    if not is_loopback(host):
        machine_names()  # looked up now: a slow name server must not keep the first requests waiting
    return listen_on(host, port), key


def listen_on(host: str, port: int) -> socket.socket:
    """A listening socket."""
    refuse_port(port, "--port")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except socket.gaierror as error:
        raise RecipeError(f"cannot listen on '{host}': {error.strerror}; choose another --host.") from error
    except OSError as error:
        raise RecipeError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port.") from error


def refuse_port(port: int, option: str) -> None:
    """Refuse an invalid port number; ``option`` is where it was given. 0 stands for any free port."""
    if not 0 <= port <= MAX_PORT:
        raise RecipeError(f"{option}: there is no port {port}; ports have numbers up to {MAX_PORT}, and 0 is any free one.")


def serve_until_stopped(
    app: FastAPI, listening: socket.socket, what: str, key: str, drain_s: float | None = None, **options: Any
) -> None:
    """Serve until interrupted; requests under way then are finished, for at most ``drain_s``."""
    import uvicorn

    failure: SensoriumError | None = None

    async def reporting(scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the call; keep a startup failure that a user can mend, and report it without a traceback."""
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        nonlocal failure
        failed = "lifespan.startup.failed"

        async def unless_failed(message: Message) -> None:
            if message["type"] != failed:
                await send(message)

        try:
            await app(scope, receive, unless_failed)
        except SensoriumError as error:
            failure = error
            await send({"type": failed})
        except BaseException as error:
            await send({"type": failed, "message": "".join(traceback.format_exception(error))})
            raise

    drain = None if drain_s is None else max(1, round(drain_s))
    config = uvicorn.Config(reporting, log_level="warning", timeout_graceful_shutdown=drain, **options)
    host, port = listening.getsockname()[:2]
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        print(f"serving {what} on http://{place} ({'with' if key else 'without'} a key)", flush=True)
        run_async(uvicorn.Server(config).serve(sockets=[listening]))
    finally:
        listening.close()
        if failure is not None:
            raise failure


def sweep(folder: Path | None, older_s: float) -> int:
    """Delete media older than so many seconds: nobody needs them any more. Returns how many."""
    if folder is None:
        return 0
    oldest, deleted = time.time() - older_s, 0
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):  # it is gone already, or not ours to delete
                if entry.stat().st_mtime < oldest:
                    os.unlink(entry.path)
                    deleted += 1
    return deleted


@asynccontextmanager
async def sweeping(store: MediaStore, older_s: float) -> AsyncIterator[None]:
    """Keep a store's folder small for as long as a service runs."""

    async def go_on() -> None:
        while True:
            await asyncio.sleep(min(SWEEP_S, older_s))
            await asyncio.to_thread(sweep, store.folder, older_s)

    task = asyncio.create_task(go_on())
    try:
        yield
    finally:
        task.cancel()

"""Tools of an MCP server, by the official client: a command that is started (stdio), or an address (streamable HTTP).

Invariants: a server is started once per process and shared by all episodes. It lives in an event loop of its own thread, so
its tools can be called from any. Every wait has a deadline. A tool that fails or takes too long gives a result that says
so; a server that is gone raises EnvironmentLost (the episode is played again), is forgotten, and is started again for the
next call. Calls that a loop still holds when its server ends are cancelled, and no call is passed to it from then on, so
nobody waits forever.
"""

import asyncio
import atexit
import base64
import json
import os
import sys
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as Overdue
from contextlib import AsyncExitStack, suppress
from inspect import signature
from typing import Any, TextIO

from sensorium.envs.tool_use import ToolContext, ToolResult, ToolSpec
from sensorium.vocabulary.content import Block, Text
from sensorium.vocabulary.errors import EnvironmentLost, MediaError, RecipeError, nearest
from sensorium.vocabulary.plain import printable, words

OPTIONS = ("command", "args", "env", "cwd", "url", "headers", "only", "deadline_s", "start_s")
MAX_BYTES = 64 * 1024 * 1024
START_S, CALL_S, PING_S = 60.0, 30.0, 5.0

_servers: dict[str, "McpServer"] = {}
_lock = threading.Lock()


def server_tools(options: Any, where: str) -> list["McpTool"]:
    """The tools of the server that these options describe; ``only`` names those to take."""
    if not isinstance(options, Mapping) or not ({"command", "url"} & set(options)):
        raise RecipeError(
            f"{where}: an MCP server is {{command: [program, argument…]}} or {{url: …}}, not {options!r:.60}."
        )
    for key in options:
        if key not in OPTIONS:
            raise RecipeError(f"{where}: an MCP server has no option '{key}'{nearest(str(key), list(OPTIONS))}")
    server = _shared(options, where)
    deadline_s = float(options.get("deadline_s", CALL_S))
    names = [spec.name for spec in server.specs]
    only = options.get("only")
    for name in only or ():
        if name not in names:
            raise RecipeError(f"{where}: the server has no tool '{name}'{nearest(name, names)}")
    return [McpTool(server, spec, deadline_s) for spec in server.specs if only is None or spec.name in only]


class McpTool:
    """One tool of a server. It has its own deadline, so that a call needs no further thread.

    ``changes``: the server says that it does not only read, so it is not called to see whether it answers.
    """

    instant = False
    own_deadline = True

    def __init__(self, server: "McpServer", spec: ToolSpec, deadline_s: float) -> None:
        self.server, self.spec, self.deadline_s = server, spec, deadline_s
        self.changes = spec.name in server.changing

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        reply = self.server.call(self.spec.name, dict(arguments), self.deadline_s)
        if isinstance(reply, str):
            return ToolResult.error(reply)
        blocks = [_block(item, context, f"{self.spec.name} of an MCP server") for item in reply.get("content") or ()]
        if not blocks and reply.get("structuredContent") is not None:
            blocks = [Text(json.dumps(reply["structuredContent"], ensure_ascii=False))]
        return ToolResult(tuple(blocks), bool(reply.get("isError")))

    def close(self) -> None:
        """Nothing to do: the server is shared."""


class McpServer:
    """A connection, kept open by one task in a loop of its own thread."""

    def __init__(self, options: Mapping[str, Any], where: str) -> None:
        self.options, self.where = options, where
        self.specs: list[ToolSpec] = []
        self.changing: set[str] = set()
        self._session: Any = None
        self._failure: BaseException | None = None
        self._ready, self._ended = threading.Event(), threading.Event()
        self._handing_over = threading.Lock()  # the loop does not end while it is handed a call
        self._written: deque[str] = deque(maxlen=20)
        self._reader: threading.Thread | None = None
        self._open: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._serve, name="mcp", daemon=True).start()
        if not self._ready.wait(float(options.get("start_s", START_S))):
            self.close()
            raise RecipeError(
                f"{where}: the MCP server {self.name} did not begin within its time (start_s).{self._last_written()}"
            )
        if self._failure is not None:
            why = _first_cause(self._failure)
            raise RecipeError(f"{where}: the MCP server {self.name} cannot be used: {why}.{self._last_written()}")

    @property
    def name(self) -> str:
        return str(self.options.get("url") or self.options.get("command"))

    def call(self, tool: str, arguments: dict[str, Any], deadline_s: float) -> dict[str, Any] | str:
        """What a tool replied, as on the wire; or a text that says why there is no reply."""
        with self._handing_over:
            if self._ended.is_set():
                raise self._lost("it has ended")
            asked = asyncio.run_coroutine_threadsafe(self._call(tool, arguments, deadline_s), self._loop)
        try:
            return asked.result(deadline_s + 2 * PING_S)
        except Overdue as error:
            raise self._lost("it does not answer") from error
        except CancelledError as error:
            raise self._lost("it has ended") from error

    def close(self) -> None:
        """End it; a server that was started here is ended too."""
        self._let_go()
        self._ended.wait(PING_S)

    async def _call(self, tool: str, arguments: dict[str, Any], deadline_s: float) -> dict[str, Any] | str:
        try:
            async with asyncio.timeout(deadline_s):
                reply = await self._session.call_tool(tool, arguments)
            wire: dict[str, Any] = reply.model_dump(by_alias=True, mode="json")
            return wire
        except TimeoutError:
            return f"the tool '{tool}' did not answer within {deadline_s:g} s."
        except Exception as error:
            try:
                async with asyncio.timeout(PING_S):
                    await self._session.send_ping()
            except Exception:  # it does not even answer a ping
                raise self._lost(_first_cause(error)) from error
            return f"the tool '{tool}' failed: {_first_cause(error)}"

    def _lost(self, why: str) -> EnvironmentLost:
        self._let_go()
        return EnvironmentLost(f"the MCP server {self.name} is lost: {why}.{self._last_written()}")

    def _let_go(self) -> None:
        """Use it no more, and end it without waiting for that."""
        for key, known in list(_servers.items()):
            if known is self:
                _servers.pop(key, None)
        if self._open is not None:
            with suppress(RuntimeError):  # the loop has ended already
                self._loop.call_soon_threadsafe(self._open.cancel)

    def _serve(self) -> None:
        async def cancel_the_rest() -> None:  # calls that were passed to the loop before have become tasks
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

        asyncio.set_event_loop(self._loop)
        self._open = self._loop.create_task(self._connected())
        try:
            self._loop.run_until_complete(self._open)
        except BaseException as error:  # whatever ends the connection is reported to who waits for it
            self._failure = error
        finally:
            with self._handing_over:
                self._ended.set()
            self._ready.set()
            self._loop.run_until_complete(cancel_the_rest())
            self._loop.close()

    def _errors(self) -> TextIO:
        """Where a program that is started writes its errors: the last lines are kept for when it fails."""

        def read() -> None:
            with os.fdopen(reading, errors="replace") as lines:
                for line in lines:
                    self._written.append(line.strip()[:500])
                    if self._ready.is_set():  # before, its failure reports what it wrote
                        sys.stderr.write(line)

        reading, writing = os.pipe()
        self._reader = threading.Thread(target=read, name="mcp errors", daemon=True)
        self._reader.start()
        return os.fdopen(writing, "w")

    def _last_written(self) -> str:
        """The last line that it wrote to its errors, and what it may lack."""
        if self._reader is not None and self._ended.is_set():
            self._reader.join(1.0)  # it has ended, so its lines arrive at once
        lines = [line for line in self._written if line]
        if not lines:
            return ""
        lacks = " It is given few of this process's variables; name others in env." if "No module" in lines[-1] else ""
        return f" It last wrote '{printable(lines[-1])}'.{lacks}"

    async def _connected(self) -> None:
        from mcp import ClientSession

        async with AsyncExitStack() as stack:
            streams = await stack.enter_async_context(self._transport(stack))
            self._session = await stack.enter_async_context(ClientSession(streams[0], streams[1]))
            await self._session.initialize()
            self.specs = await self._list()
            self._ready.set()
            await asyncio.Event().wait()  # until it is cancelled

    def _transport(self, stack: AsyncExitStack) -> Any:
        options = self.options
        if "url" in options:
            from mcp.client.streamable_http import streamable_http_client

            given: dict[str, Any] = {}
            if options.get("headers"):
                given["http_client"] = _http_client(options["headers"])
            if "max_sse_event_size" in signature(streamable_http_client).parameters:
                given["max_sse_event_size"] = MAX_BYTES  # by default a picture of a megabyte would be refused
            return streamable_http_client(options["url"], **given)
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        command = options["command"]
        words_of_command = [*(command if isinstance(command, list) else [command]), *(options.get("args") or ())]
        program, *arguments = map(str, words_of_command)
        started = StdioServerParameters(command=program, args=arguments, env=options.get("env"), cwd=options.get("cwd"))
        return stdio_client(started, errlog=stack.enter_context(self._errors()))

    async def _list(self) -> list[ToolSpec]:
        from mcp.types import PaginatedRequestParams

        found, cursor = [], None
        while True:
            page = await self._session.list_tools(params=PaginatedRequestParams(cursor=cursor) if cursor else None)
            wire = page.model_dump(by_alias=True, mode="json")
            for tool in wire["tools"]:
                hints = tool.get("annotations") or {}
                if hints.get("readOnlyHint") is False or hints.get("destructiveHint") is True:
                    self.changing.add(tool["name"])
                found.append(ToolSpec(tool["name"], tool.get("description") or "", tool.get("inputSchema") or {}))
            cursor = wire.get("nextCursor")
            if not cursor:
                return found


def _shared(options: Mapping[str, Any], where: str) -> McpServer:
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise RecipeError(f"{where}: tools of an MCP server need the package mcp: pip install 'sensorium[mcp]'.") from error
    kept = {key: value for key, value in options.items() if key not in ("only", "deadline_s")}
    key = json.dumps(kept, sort_keys=True, default=str)
    with _lock:
        known = _servers.get(key)
        if known is not None and not known._ended.is_set():
            return known
        server = _servers[key] = McpServer(options, where)
        return server


@atexit.register
def close_servers() -> None:
    """End every server of this process."""
    for server in list(_servers.values()):
        server.close()


def _http_client(headers: Mapping[str, str]) -> Any:
    try:
        from mcp.shared._httpx_utils import create_mcp_http_client
    except ImportError as error:
        raise RecipeError("this version of mcp takes no headers; put the key into the url, or use another.") from error
    return create_mcp_http_client(headers=dict(headers))


def _block(item: Mapping[str, Any], context: ToolContext, origin: str) -> Block:
    """A content block of the wire; what cannot be shown here is named."""
    kind = item.get("type")
    if kind == "text":
        return Text(str(item.get("text", "")))
    if kind == "image":
        try:
            return context.store.put_picture(base64.b64decode(item.get("data", ""), validate=True), origin)
        except ValueError as error:
            raise MediaError(f"{origin}: its picture is not base64") from error
    if kind == "resource" and "text" in (item.get("resource") or {}):
        return Text(str(item["resource"]["text"]))
    where = (item.get("resource") or item).get("uri") or item.get("mimeType") or ""
    return Text(f"[{kind} {where} is not shown]")


def _first_cause(error: BaseException) -> str:
    """The first cause among those that a task group raised together."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return words(error)

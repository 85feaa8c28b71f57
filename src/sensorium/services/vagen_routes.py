"""Today's VAGEN: ``/connect`` and ``/call``, multipart both ways, so that its RemoteEnv plays our environments."""

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from sensorium.envs.remote.wire import Json
from sensorium.recipe.vagen_settings import environment_of
from sensorium.services.application import Refusal
from sensorium.services.sessions import SessionTable, seed_of
from sensorium.services.shown import paid, pictures, with_images
from sensorium.vocabulary.errors import RecipeError

MOST_BODY = 64 * 1024 * 1024
MOST_PARTS = 1000
PREFIX = "vagen-"
STATUSES = {status: status for status in (400, 404, 409, 413, 503)}
"""Statuses of its service, and ours for a step out of turn and a large body; everything else is its 500."""


def vagen_routes(table: SessionTable) -> APIRouter:
    """The routes. Bodies are read raw, so they are not in the OpenAPI description."""
    router = APIRouter(include_in_schema=False)
    calls = _Calls(table)

    async def answered(request: Request, method: Any) -> Response:
        try:
            body, shown = await method(read_form(await _body(request), request.headers.get("content-type", "")))
        except Refusal as refusal:
            again = {"Retry-After": f"{refusal.retry_after_s:g}"} if refusal.retry_after_s else None
            return JSONResponse({"detail": refusal.why}, STATUSES.get(refusal.status, 500), again)
        except (ValueError, RecipeError) as error:
            return JSONResponse({"detail": str(error)}, 500)
        boundary = f"gym_env_{secrets.token_hex(16)}"
        return Response(
            write_form(body, shown, boundary), headers={"content-type": f'multipart/mixed; boundary="{boundary}"'}
        )

    @router.post("/connect")
    async def connect(request: Request) -> Response:
        return await answered(request, calls.connect)

    @router.post("/call")
    async def call(request: Request) -> Response:
        return await answered(request, calls.call)

    return router


class _Calls:
    """The methods of VAGEN's environments, each on a session of ours."""

    def __init__(self, table: SessionTable) -> None:
        self.table = table

    async def connect(self, asked: Json) -> tuple[Json, list[bytes]]:
        wish = environment_of({"env_config": asked.get("env_config")}, self.table.offers.environments, current=True)
        self.table.offers.chosen(*wish)
        seed, id = asked.get("seed"), uuid4().hex
        self.table.reserve({PREFIX + id: wish})
        if seed is None:
            return {"session_id": id}, []
        try:
            body, shown = await self._reset(id, seed)
        except Refusal:
            await self.table.close(PREFIX + id)  # nothing is left behind of a session that did not begin
            raise
        return {"session_id": id, **body}, shown

    async def call(self, asked: Json) -> tuple[Json, list[bytes]]:
        id, method, params = asked.get("session_id"), asked.get("method"), asked.get("params") or {}
        if not isinstance(id, str) or not isinstance(method, str):
            raise Refusal(400, f"{'session_id' if not isinstance(id, str) else 'method'} missing")
        session = self.table.sessions.get(PREFIX + id)
        if session is None:
            raise Refusal(404, "unknown session")
        session.wanted()
        if not isinstance(params, dict):
            raise ValueError("params must be an object")
        if method == "reset":
            return await self._reset(id, params.get("seed", 0))
        if method == "step":
            return await self._step(id, params.get("action_str"))
        if method == "system_prompt":
            if session.head is None:
                raise ValueError("system_prompt before the first reset")
            return {"obs": with_images(session.head)}, pictures(session.head, self.table.store)
        if method == "close":
            await self.table.close(PREFIX + id)
            return {"closed": True}, []
        raise ValueError(f"unknown method {method:.60}")

    async def _reset(self, id: str, seed: Any) -> tuple[Json, list[bytes]]:
        first = await self.table.reset(PREFIX + id, seed_of(seed))
        return {"obs": with_images(first["observation"]), "info": {}}, pictures(first["observation"], self.table.store)

    async def _step(self, id: str, action: Any) -> tuple[Json, list[bytes]]:
        if not isinstance(action, str):
            raise ValueError("step needs action_str")
        outcome = await self.table.act(PREFIX + id, action)
        shown = outcome["observation"] or []
        metrics = {"turn_metrics": outcome["info"], "traj_metrics": {"success": bool(outcome["success"])}}
        info = {"success": bool(outcome["success"]), "metrics": metrics}
        reply = {"obs": with_images(shown), "reward": paid(outcome) or 0.0, "done": outcome["done"], "info": info}
        return reply, pictures(shown, self.table.store)


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MOST_BODY:
            raise Refusal(413, "the body is too large")
    return bytes(body)


def read_form(body: bytes, content_type: str) -> Json:
    """The JSON object of a multipart body; as VAGEN does, a part is known by its type and not by its name."""
    found = re.search(r'boundary="?([^";,\s]{1,200})"?', content_type)
    if not content_type.lower().startswith("multipart/") or found is None:
        raise ValueError("the Content-Type must be multipart with a boundary")
    for part in body.split(b"--" + found[1].encode("utf-8", "replace"), MOST_PARTS):
        head, separator, content = part.partition(b"\r\n\r\n")
        if separator and re.search(rb"content-type:\s*application/json", head, re.IGNORECASE):
            try:
                asked = json.loads(content.removesuffix(b"\r\n").decode())
            except (ValueError, RecursionError) as error:
                raise ValueError(f"the JSON part cannot be read: {error}") from error
            if not isinstance(asked, dict):
                raise ValueError("the JSON part must be an object")
            return asked
    raise ValueError("there is no part of type application/json")


def write_form(body: Json, shown: Sequence[bytes], boundary: str) -> bytes:
    """A JSON object and pictures, as VAGEN's client reads them."""
    mark = f"--{boundary}\r\n".encode()
    text = json.dumps(body, ensure_ascii=False).encode()
    head = b'Content-Disposition: form-data; name="data"\r\nContent-Type: application/json; charset=utf-8\r\n\r\n'
    parts = [mark, head, text, b"\r\n"]
    for number, data in enumerate(shown):
        named = f'Content-Disposition: form-data; name="images"; filename="{number}.png"\r\nContent-Type: image/png\r\n\r\n'
        parts += [mark, named.encode(), data, b"\r\n"]
    return b"".join([*parts, f"--{boundary}--\r\n".encode()])

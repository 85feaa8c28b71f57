"""VAGEN's protocols. The legacy replies match its Flask service byte for byte: sorted keys, ASCII, no spaces, a newline.

Steps have no id, so a step that is sent twice acts twice, as in VAGEN; use our own protocol where that matters.
"""

import base64
import json
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from sensorium.envs.remote.wire import Json
from sensorium.services.application import Refusal
from sensorium.services.sessions import Session, SessionTable, paid, pictures, seed_of, text_of_messages, with_images
from sensorium.systems.vagen.settings import environment_of
from sensorium.vocabulary.errors import RecipeError

LEGACY_PREFIX = "vagen-legacy-"
PAGES = {
    400: ("Bad Request", "The request could not be understood."),
    415: ("Unsupported Media Type", "The request's Content-Type was not 'application/json'."),
    500: (
        "Internal Server Error",
        "The request could not be completed: an id is not known, or a value is of the wrong type.",
    ),
}


def legacy_routes(table: SessionTable) -> APIRouter:
    """The legacy routes; bodies are read raw, so they are not in the OpenAPI description."""
    router = APIRouter(include_in_schema=False)
    served = _Environments(table)

    def add(path: str, methods: list[str], field: str, work: Callable[..., Awaitable[Json]]) -> None:
        """A route with the path's id and one field of a JSON body (no body where ``field`` is empty) as arguments."""

        async def answer(request: Request) -> Response:
            arguments: list[Any] = list(request.path_params.values())
            try:
                if field:
                    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
                    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
                        return _html(415)
                    try:
                        body = json.loads(await request.body())
                    except (ValueError, RecursionError):
                        return _html(400)
                    if not isinstance(body, dict) or field not in body:
                        return flask({"error": f"Missing required parameter: {field}"}, 400)
                    arguments.append(body[field])
                return flask(await work(*arguments))
            except Refusal as refusal:  # too many environments, or a bad seed: VAGEN's service fails these calls, too
                again = {"Retry-After": f"{refusal.retry_after_s:g}"} if refusal.retry_after_s else None
                return flask({"error": refusal.why}, 400 if refusal.status == 422 else refusal.status, again)
            except (KeyError, AttributeError, TypeError):  # an unknown id or a wrong type is VAGEN's error 500
                return _html(500)

        router.add_api_route(path, answer, methods=methods)

    add("/environments", ["POST"], "ids2configs", served.create)
    add("/batch/reset", ["POST"], "ids2seeds", served.reset_many)
    add("/batch/step", ["POST"], "ids2actions", served.step_many)
    add("/batch/reward", ["POST"], "env_ids", served.reward_many)
    add("/batch/system_prompt", ["POST"], "env_ids", served.prompt_many)
    add("/batch/close", ["POST"], "env_ids", served.close_many)
    add("/reset/{id}", ["POST"], "seed", served.reset_one)
    add("/step/{id}", ["POST"], "action", served.step_one)
    add("/reward/{id}", ["GET"], "", served.reward_one)
    add("/system_prompt/{id}", ["GET"], "", served.prompt_one)
    add("/close/{id}", ["DELETE"], "", served.close_one)
    return router


class _Environments:
    """Reserved sessions under the client's ids. One that could not be created reports it later, as in VAGEN."""

    def __init__(self, table: SessionTable) -> None:
        self.table = table

    async def create(self, wishes: dict[str, Any]) -> Json:
        """Reserve them all, or none if the capacity does not suffice."""
        found: dict[str, tuple[str, Json] | str] = {}
        for id, wish in wishes.items():
            try:
                name, options = environment_of(wish, self.table.offers.environments)
                self.table.offers.chosen(name, options)
                found[LEGACY_PREFIX + id] = (name, options)
            except RecipeError as error:
                found[LEGACY_PREFIX + id] = str(error)
        self.table.reserve(found)
        return {"success": True}

    async def reset(self, id: str, seed: int) -> tuple[Json, Json]:
        self._held(id)
        try:
            first = await self.table.reset(LEGACY_PREFIX + id, seed)
        except Refusal as refusal:
            return {}, {"error": refusal.why}
        return self._seen(first["observation"]), {}

    async def step(self, id: str, action: Any) -> tuple[Json, float, bool, Json]:
        self._held(id)
        try:
            outcome = await self.table.act(LEGACY_PREFIX + id, str(action))
        except Refusal as refusal:
            return {}, 0.0, True, {"error": refusal.why}
        success = bool(outcome["success"])
        metrics = {
            "turn_metrics": {"action_is_valid": outcome["info"].get("valid", True), "action_is_effective": True},
            "traj_metrics": {"success": success},
        }
        info = {**outcome["info"], "metrics": metrics, "success": success}
        return self._seen(outcome["observation"] or []), float(paid(outcome) or 0.0), outcome["done"], info

    async def reset_many(self, seeds: dict[str, Any]) -> Json:
        read = {id: seed_of(seed) for id, seed in seeds.items()}  # before any of them is reset
        return {"results": {id: await self.reset(id, seed) for id, seed in read.items()}}

    async def step_many(self, actions: dict[str, Any]) -> Json:
        return {"results": {id: await self.step(id, action) for id, action in actions.items()}}

    async def reward_many(self, ids: list[str]) -> Json:
        return {"rewards": {id: (await self.reward_one(id))["reward"] for id in ids}}

    async def prompt_many(self, ids: list[str]) -> Json:
        return {"system_prompts": {id: (await self.prompt_one(id))["system_prompt"] for id in ids}}

    async def close_many(self, ids: list[str]) -> Json:
        for id in ids:
            await self.close_one(id)
        return {"status": "success"}

    async def reset_one(self, id: str, seed: Any) -> Json:
        observation, info = await self.reset(id, seed_of(seed))
        return {"observation": observation, "info": info}

    async def step_one(self, id: str, action: Any) -> Json:
        return dict(zip(("observation", "reward", "done", "info"), await self.step(id, action), strict=True))

    async def reward_one(self, id: str) -> Json:
        """The steps hold all reward; there is none at the end."""
        self._held(id)
        return {"reward": 0.0}

    async def prompt_one(self, id: str) -> Json:
        if self._held(id).head is None:
            await self.reset(id, 0)
        return {"system_prompt": text_of_messages(self._held(id).head or [])}

    async def close_one(self, id: str) -> Json:
        self._held(id)
        await self.table.close(LEGACY_PREFIX + id)
        return {"status": "success"}

    def _held(self, id: str) -> Session:
        """A session by the client's id, with its lease renewed; KeyError where there is none."""
        session = self.table.sessions[LEGACY_PREFIX + id]
        session.wanted()
        return session

    def _seen(self, messages: list[Json]) -> Json:
        images = [{"__pil_image__": base64.b64encode(data).decode()} for data in pictures(messages, self.table.store)]
        return {"obs_str": with_images(messages)} | ({"multi_modal_data": {"<image>": images}} if images else {})


def flask(body: Json, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON as Flask writes it."""
    text = json.dumps(body, sort_keys=True, ensure_ascii=True, separators=(",", ":")) + "\n"
    return Response(text, status, headers, "application/json")


def _html(status: int) -> Response:
    title, text = PAGES[status]
    page = f"<!doctype html>\n<html lang=en>\n<title>{status} {title}</title>\n<h1>{title}</h1>\n<p>{text}</p>\n"
    return Response(page, status, media_type="text/html")


MOST_BODY = 64 * 1024 * 1024
MOST_PARTS = 1000
PREFIX = "vagen-"
STATUSES = (400, 404, 409, 413, 503)  # VAGEN's, and ours for a step out of turn and a large body; all others are 500


def vagen_routes(table: SessionTable) -> APIRouter:
    """The routes. Bodies are read raw, so they are not in the OpenAPI description."""
    router = APIRouter(include_in_schema=False)
    calls = _Calls(table)

    def add(path: str, method: Callable[[Json], Awaitable[tuple[Json, list[bytes]]]]) -> None:
        async def answer(request: Request) -> Response:
            try:
                body, shown = await method(read_form(await _body(request), request.headers.get("content-type", "")))
            except Refusal as refusal:
                again = {"Retry-After": f"{refusal.retry_after_s:g}"} if refusal.retry_after_s else None
                status = refusal.status if refusal.status in STATUSES else 500
                return JSONResponse({"detail": refusal.why}, status, again)
            except (ValueError, RecipeError) as error:
                return JSONResponse({"detail": str(error)}, 500)
            boundary = f"gym_env_{secrets.token_hex(16)}"
            headers = {"content-type": f'multipart/mixed; boundary="{boundary}"'}
            return Response(write_form(body, shown, boundary), headers=headers)

        router.add_api_route(path, answer, methods=["POST"])

    add("/connect", calls.connect)
    add("/call", calls.call)
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
            await self.table.close(PREFIX + id)  # a session that did not begin leaves nothing behind
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
    """The JSON object of a multipart body; as in VAGEN, a part is recognised by its type, not by its name."""
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

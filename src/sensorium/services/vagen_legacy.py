"""The legacy VAGEN routes, byte for byte as its Flask service answers: sorted keys, ASCII, no spaces, a newline at the end.

Its steps have no id, so a step that is sent again acts again, as there; use our own protocol where that matters.
"""

import base64
import json
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request, Response

from sensorium.envs.remote.wire import Json
from sensorium.recipe.vagen_settings import environment_of
from sensorium.services.access import allowed
from sensorium.services.application import Refusal
from sensorium.services.sessions import SessionTable
from sensorium.services.shown import paid, pictures, text_of_messages, with_images
from sensorium.vocabulary.errors import RecipeError

PREFIX = "vagen-legacy-"
PAGES = {
    400: ("Bad Request", "The request could not be understood."),
    401: ("Unauthorized", "The key is missing or wrong."),
    415: ("Unsupported Media Type", "The request's Content-Type was not 'application/json'."),
    500: (
        "Internal Server Error",
        "The request could not be completed: an id is not known, or a value is of the wrong type.",
    ),
}


class _Page(Exception):
    """An HTML page of an error."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def legacy_routes(table: SessionTable, key: str) -> APIRouter:
    """The routes; bodies are read raw, so they are not in the OpenAPI description."""
    router = APIRouter(include_in_schema=False)
    served = _Environments(table)

    def add(path: str, methods: list[str], field: str, work: Callable[[Any], Awaitable[Json]]) -> None:
        """A route that takes one field of a JSON body (or no body, where ``field`` is empty)."""

        async def answer(request: Request) -> Response:
            try:
                if not allowed(key, request.headers, request.query_params):
                    raise _Page(401)
                given: Any = request.path_params.get("id")
                if field:
                    body = await _json(request)
                    if not isinstance(body, dict) or field not in body:
                        return flask({"error": f"Missing required parameter: {field}"}, 400)
                    given = body[field] if given is None else (given, body[field])
                return flask(await work(given))
            except _Page as page:
                return _html(page.status)
            except (KeyError, AttributeError, TypeError):  # as theirs: an unknown id or a wrong type is its error 500
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
    """Environments under ids that the client chose. One that could not be made shows that later, as there."""

    def __init__(self, table: SessionTable) -> None:
        self.table = table
        self.known: dict[str, tuple[str, Json] | str] = {}
        self.prompts: dict[str, str] = {}

    async def create(self, wishes: dict[str, Any]) -> Json:
        for id, wish in wishes.items():
            if id not in self.known and len(self.known) >= self.table.capacity:
                self.known[id] = "the server is full"
                break
            try:
                name, options = environment_of(wish, self.table.offers.environments)
                self.table.offers.chosen(name, options)
                self.known[id] = (name, options)
            except RecipeError as error:
                self.known[id] = str(error)
        return {"success": True}

    async def reset(self, id: str, seed: Any) -> tuple[Json, Json]:
        held = self.known[id]
        if isinstance(held, str):
            return {}, {"error": held}
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= 2**62:
            seed = 0
        await self.table.close(PREFIX + id)
        try:
            first = await self.table.open(PREFIX + id, *held, seed)
        except Refusal as refusal:
            return {}, {"error": refusal.why}
        self.prompts[id] = text_of_messages(first["head"])
        return self._seen(first["observation"]), {}

    async def step(self, id: str, action: Any) -> tuple[Json, float, bool, Json]:
        held, session = self.known[id], self.table.sessions.get(PREFIX + id)
        if isinstance(held, str) or session is None:
            return {}, 0.0, True, {"error": held if isinstance(held, str) else "it was not reset, or has ended"}
        try:
            outcome = await self.table.step(PREFIX + id, session.number + 1, str(action))
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
        return {"results": {id: await self.reset(id, seed) for id, seed in seeds.items()}}

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

    async def reset_one(self, asked: tuple[str, Any]) -> Json:
        observation, info = await self.reset(*asked)
        return {"observation": observation, "info": info}

    async def step_one(self, asked: tuple[str, Any]) -> Json:
        observation, reward, done, info = await self.step(*asked)
        return {"observation": observation, "reward": reward, "done": done, "info": info}

    async def reward_one(self, id: str) -> Json:
        """All pay is in the steps; there is none beside it at the end."""
        self.known[id]
        return {"reward": 0.0}

    async def prompt_one(self, id: str) -> Json:
        self.known[id]
        if id not in self.prompts:
            await self.reset(id, 0)
        return {"system_prompt": self.prompts.get(id, "")}

    async def close_one(self, id: str) -> Json:
        del self.known[id]
        self.prompts.pop(id, None)
        await self.table.close(PREFIX + id)
        return {"status": "success"}

    def _seen(self, messages: list[Json]) -> Json:
        images = [{"__pil_image__": base64.b64encode(data).decode()} for data in pictures(messages, self.table.store)]
        return {"obs_str": with_images(messages)} | ({"multi_modal_data": {"<image>": images}} if images else {})


def flask(body: Json, status: int = 200) -> Response:
    """JSON as Flask writes it."""
    text = json.dumps(body, sort_keys=True, ensure_ascii=True, separators=(",", ":")) + "\n"
    return Response(text, status, media_type="application/json")


async def _json(request: Request) -> Any:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise _Page(415)
    try:
        return json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise _Page(400) from error


def _html(status: int) -> Response:
    title, told = PAGES[status]
    page = f"<!doctype html>\n<html lang=en>\n<title>{status} {title}</title>\n<h1>{title}</h1>\n<p>{told}</p>\n"
    return Response(page, status, media_type="text/html")

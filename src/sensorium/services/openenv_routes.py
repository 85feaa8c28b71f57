"""OpenEnv's WebSocket, so that its stock client plays our environments: ``/openenv/{name}/ws``, one a connection.

An action is ``{"response": text}``, an observation ``{"text": …, "images": [PNG as base64]}``; the first one after a reset
also has ``system``. Keys of a reset beside ``seed`` and ``episode_id`` are options of the environment. The metadata has
the parts of a reward; their sum is the reward.
"""

import base64
import json
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from sensorium.envs.remote.wire import Json
from sensorium.services.application import Refusal
from sensorium.services.sessions import SessionTable, paid, pictures, seed_of, text_of_messages

ACTION = {
    "type": "object",
    "properties": {"response": {"type": "string"}, "metadata": {"type": "object"}},
    "required": ["response"],
    "additionalProperties": False,
}
OBSERVATION = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "images": {"type": "array", "items": {"type": "string", "contentEncoding": "base64"}},
        "system": {"type": "string"},
        "metadata": {"type": "object"},
    },
}


def openenv_routes(table: SessionTable) -> APIRouter:
    """The routes of every environment that is offered."""
    router = APIRouter(prefix="/openenv")

    @router.get("/{name}/health")
    async def health(name: str) -> Json:
        return {"status": "healthy"}

    @router.get("/{name}/schema")
    async def schema(name: str) -> Json:
        return {"action": ACTION, "observation": OBSERVATION, "reset_observation": OBSERVATION, "state": {"type": "object"}}

    @router.websocket("/{name}/ws")
    async def play(socket: WebSocket, name: str) -> None:
        await socket.accept()
        await _Player(socket, table, name).serve()

    return router


class _Player:
    """One connection: one environment at a time, closed when the connection ends."""

    def __init__(self, socket: WebSocket, table: SessionTable, name: str) -> None:
        self.socket, self.table, self.name = socket, table, name
        self.session, self.episode, self.steps = "", "", 0

    async def serve(self) -> None:
        try:
            if len(self.table.sessions) >= self.table.capacity:
                await self._full()
                return
            while await self._frame(await self.socket.receive()):
                pass
        except (WebSocketDisconnect, RuntimeError):
            pass
        finally:
            await self.table.close(self.session)

    async def _frame(self, received: Any) -> bool:
        """Answer one frame; False ends the connection."""
        if received["type"] == "websocket.disconnect":
            return False
        text = received.get("text")
        try:
            frame = json.loads(text) if text is not None else None
        except (ValueError, RecursionError) as error:
            await self._error("INVALID_JSON", f"Invalid JSON: {error}")
            return True
        if not isinstance(frame, dict):
            await self._error("SESSION_ERROR", "a frame is one JSON object, as text")
        if not isinstance(frame, dict) or frame.get("type") == "close":
            await self.socket.close()
            return False
        data, kind = frame.get("data") or {}, frame.get("type")
        if not isinstance(data, dict):
            await self._invalid("data", "an object is needed")
        elif kind == "reset":
            return await self._reset(data)
        elif kind == "step":
            await self._step(data)
        elif kind == "state":
            await self._send("state", {"episode_id": self.episode, "step_count": self.steps})
        else:
            await self._error("UNKNOWN_TYPE", f"Unknown message type: {kind!s:.60}")
        return True

    async def _reset(self, data: Json) -> bool:
        try:
            seed = 0 if data.get("seed") is None else seed_of(data["seed"])
        except Refusal as refusal:
            await self._invalid("seed", refusal.why)
            return True
        options = {name: value for name, value in data.items() if name not in ("seed", "episode_id")}
        await self.table.close(self.session)
        self.session, self.episode, self.steps = f"openenv/{uuid4()}", str(data.get("episode_id") or uuid4()), 0
        try:
            first = await self.table.open(self.session, self.name, options, seed)
        except Refusal as refusal:
            if refusal.status == 503:
                await self._full()
                return False
            code = "VALIDATION_ERROR" if refusal.status in (404, 422) else "EXECUTION_ERROR"
            await self._error(code, refusal.why)
            return True
        seen = self._seen(first["observation"], {}) | {"system": text_of_messages(first["head"])}
        await self._send("observation", {"observation": seen, "reward": None, "done": False})
        return True

    async def _step(self, data: Json) -> None:
        if not isinstance(data.get("response"), str):
            await self._invalid("response", "Field required")
            return
        if extra := [name for name in data if name not in ("response", "metadata")]:
            await self._invalid(extra[0][:60], "Extra inputs are not permitted")
            return
        try:
            outcome = await self.table.step(self.session, self.steps + 1, data["response"])
        except Refusal as refusal:
            await self._error("EXECUTION_ERROR", refusal.why)
            return
        self.steps += 1
        info = {**outcome["info"], "truncated": outcome["truncated"], "success": outcome["success"]}
        if isinstance(outcome["reward"], dict):
            info["parts"] = outcome["reward"]
        seen = self._seen(outcome["observation"] or [], info)
        reply: Json = {"observation": seen, "reward": paid(outcome), "done": outcome["done"], "metadata": info}
        await self._send("observation", reply)

    def _seen(self, messages: list[Json], metadata: Json) -> Json:
        shown = [base64.b64encode(data).decode() for data in pictures(messages, self.table.store)]
        return {"metadata": metadata, "text": text_of_messages(messages), "images": shown}

    async def _full(self) -> None:
        active, most = len(self.table.sessions), self.table.capacity
        why = f"Server at capacity: {active}/{most} sessions active. Try again later."
        await self._error("CAPACITY_REACHED", why, active_sessions=active, max_sessions=most)
        await self.socket.close()

    async def _invalid(self, field: str, why: str) -> None:
        problem = {"type": "value_error", "loc": [field], "msg": why}
        await self._error("VALIDATION_ERROR", "Invalid message", errors=[problem])

    async def _error(self, code: str, message: str, **more: Any) -> None:
        await self._send("error", {"message": message, "code": code, **more})

    async def _send(self, kind: str, data: Json) -> None:
        await self.socket.send_text(json.dumps({"type": kind, "data": data}))

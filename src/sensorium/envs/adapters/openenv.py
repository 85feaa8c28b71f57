"""An environment behind an OpenEnv server, over its WebSocket.

Steps of OpenEnv have no id, so a step is sent once and never again: a new connection would be another environment that was
never reset. A missing reply, or a server that ends the connection, fails the episode. Where the server itself is gone, that
is a ServerLost: the rollout waits until it answers (``available``) and plays the episode again. Connecting is tried again
while the server is full: nothing has acted by then.
"""

import asyncio
import json
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar
from urllib.parse import urlsplit

from sensorium.data.media_store import MediaStore
from sensorium.envs.adapters.content import byte_array, key_of, picture, text_form
from sensorium.envs.protocol import Observation, StepResult, within
from sensorium.envs.responses import ResponseFormat
from sensorium.vocabulary.content import Message, Text, system, user
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError, ServerLost, WorkersLost

NAME = "openenv"
MAX_BYTES = 100 * 1024 * 1024
FULL = "CAPACITY_REACHED"
PROBE_S = 0.5  # between looks for a lost server
RESTARTING = (1001, 1012)  # by which a server closes connections because it ends


class Presence:
    """Whether the server at an address answers; shared by the environments of this process."""

    known: ClassVar[dict[str, "Presence"]] = {}

    def __init__(self, address: str) -> None:
        self.address = address
        self.answered = self.announced = False
        self.away, self.since, self.returned = "", 0.0, 0.0

    @classmethod
    def of(cls, address: str) -> "Presence":
        return cls.known.setdefault(address, cls(address))

    def here(self) -> None:
        self.answered, self.away = True, ""

    def lost(self, why: str, connected: float = float("inf")) -> ServerLost:
        """The error of a loss; that of a connection made before the server came back is no other loss."""
        if connected >= self.returned:
            self.since = self.since if self.away else time.monotonic()
            self.away = why
        return ServerLost(f"{self.address}: the OpenEnv server is lost: {why}")

    async def answers(self, wait_s: float, noted: Callable[[str], None]) -> None:
        """Wait while the server is away; ``noted`` gets when that begins and ends."""
        if not self.away:
            return
        since, why = self.since, self.away
        if not self.answered:
            self.away = ""  # whoever asks next looks again
            raise WorkersLost(f"no OpenEnv server answers at {self.address} ({why}). Start it, or correct the option url.")
        if not self.announced:
            self.announced = True
            noted(
                f"the OpenEnv server at {self.address} is lost ({why}). It is waited for, {wait_s:g} s at most (wait_s of "
                "the environment 'openenv'): start it again. Its episodes are then rolled again with the same random "
                "numbers."
            )
        while self.away:
            if await self._takes_connections():
                self.away, self.returned = "", time.monotonic()
            elif time.monotonic() > since + wait_s:
                self.away, self.announced = "", False
                raise WorkersLost(
                    f"the OpenEnv server at {self.address} did not answer for {wait_s:g} s (wait_s of the environment "
                    f"'openenv'): {why}. Start it again, then go on with --resume."
                )
            else:
                await asyncio.sleep(PROBE_S)
        if self.announced:
            self.announced = False
            noted(f"the OpenEnv server at {self.address} answers again, after {time.monotonic() - since:.0f} s.")

    async def _takes_connections(self) -> bool:
        at = urlsplit(self.address)
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(PROBE_S * 4):
                _, writer = await asyncio.open_connection(at.hostname, at.port or (443 if at.scheme == "wss" else 80))
            writer.close()
            return True
        return False


class OpenEnvironment:
    """``url`` of the server. A response's answer goes into ``field`` of the action (``arguments.message`` is a field within
    another), or names one of ``actions``.

    Without ``response_format`` the whole response is the answer. ``text`` names the fields of the observation to show, by
    default all that are no pictures. ``reset`` are further keys for the server's reset. An episode is a success if it ends
    with a reward above ``success_above``. ``media`` {field: form} names the fields that are pictures:

        {"screenshot": "base64"}        PNG or JPEG as base64, or a list of them
        {"screenshot": "pixels"}        nested whole numbers, [height][width][3]
        {"screen": "screen_shape"}      flat whole numbers, and the field that holds their shape
        {"result": "mcp"}               content blocks of a tool's result, of which the images are taken
    """

    instant = False
    demonstrates = False
    recipe_only = ("url", "headers")

    def __init__(
        self,
        store: MediaStore,
        url: str,
        field: str = "",
        actions: Mapping[str, Mapping[str, Any]] | None = None,
        action: Mapping[str, Any] | None = None,
        media: Mapping[str, Any] | None = None,
        text: Sequence[str] | None = None,
        reset: Mapping[str, Any] | None = None,
        rules: str = "",
        response_format: str = "",
        max_turns: int = 50,
        success_above: float = 0.0,
        deadline_s: float = 60.0,
        connect_s: float = 30.0,
        wait_s: float = 300.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        within(NAME, "max_turns", max_turns, 1, 10**6)
        within(NAME, "deadline_s", deadline_s, 0.001, 86_400)
        within(NAME, "connect_s", connect_s, 0.001, 86_400)
        within(NAME, "wait_s", wait_s, 0.0, 86_400)
        if not field and not actions:
            raise RecipeError(f"{NAME}: set where an answer goes: field: message, or actions: {{left: {{move: l}}}}.")
        self.store, self.url, self.field, self.headers = store, _address(url), field, dict(headers or {})
        self.actions = {name.lower(): dict(held) for name, held in (actions or {}).items()}
        self.action, self.media, self.text, self.keys = dict(action or {}), dict(media or {}), text, dict(reset or {})
        self.format = ResponseFormat(response_format) if response_format else None
        self.rules, self.max_turns, self.success_above = rules, max_turns, success_above
        self.deadline_s, self.connect_s, self.wait_s = deadline_s, connect_s, wait_s
        self._presence = Presence.of(self.url)
        self._connection: Any = None
        self._connected = 0.0
        self._seed = self._turn = 0
        self._over = True

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        """A hash of what the environment shows first."""
        environment = cls(MediaStore(), **options)
        try:
            return key_of(environment.reset(seed)[1].messages)
        finally:
            environment.close()

    @classmethod
    async def available(cls, options: Mapping[str, Any], noted: Callable[[str], None]) -> None:
        """Wait while the server does not answer."""
        environment = cls(MediaStore(), **options)
        await environment._presence.answers(environment.wait_s, noted)

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        self.close()
        self._seed, self._turn, self._over = seed, 0, False
        reply = self._connect({"seed": seed, **self.keys})
        names = ", ".join(self.actions)
        if self.format is None:
            form = f"Answer with one of: {names}." if names else ""
        else:
            form = f"Answer in this form:\n{self.format.shown()}" + (f"\nAnswers: {names}." if names else "")
        rules = "\n".join(filter(None, (self.rules, form)))
        return ((system(rules),) if rules else ()), self._shown(reply)

    def step(self, response: str) -> StepResult:
        """Send the action that a response stands for, once."""
        if self._over or self._connection is None:
            raise EnvironmentFailure(f"{self.url}: it is over (or has not begun); reset it first.")
        self._turn += 1
        action, well_formed = self._action(response)
        if action is None:
            return self._refused(f"Not an action: {', '.join(self.actions)}.", well_formed)
        reply = self._ask({"type": "step", "data": action})
        if reply.get("type") == "error":
            return self._refused(f"The action was refused: {_problems(reply)}", well_formed)
        data = reply["data"]
        reward, done = data.get("reward"), bool(data.get("done"))
        truncated = not done and self._turn >= self.max_turns
        self._over = done or truncated
        success = done and reward is not None and reward > self.success_above
        info = {"valid": True, "format": well_formed, "success": success}
        shown = None if self._over else self._shown(reply)
        return StepResult(shown, reward, self._over, truncated, success if self._over else None, info)

    def demonstrate(self) -> str:
        raise EnvironmentFailure(f"{self.url}: there is no demonstration; warm start from rows that have one.")

    def close(self) -> None:
        connection, self._connection = self._connection, None
        self._over = True
        if connection is not None:
            connection.close()

    def _refused(self, why: str, well_formed: bool) -> StepResult:
        """Nothing was done: the model is shown why, and the turn is spent."""
        self._over = self._turn >= self.max_turns
        shown = None if self._over else Observation((user(why),))
        info = {"valid": False, "format": well_formed, "success": False}
        return StepResult(shown, 0.0, self._over, self._over, False if self._over else None, info)

    def _action(self, response: str) -> tuple[dict[str, Any] | None, bool]:
        """The action of a response, None if it names none; and whether it has the form asked for."""
        parsed = self.format.parse(response) if self.format is not None else None
        answer = response if parsed is None else parsed.answer
        well_formed = parsed is None or parsed.well_formed
        if self.actions:
            named = self.actions.get((answer or "").strip().lower())
            return (None if named is None else {**self.action, **named}), well_formed
        return (None if answer is None else _with(self.action, self.field.split("."), answer)), well_formed

    def _connect(self, keys: dict[str, Any]) -> dict[str, Any]:
        """Connect and reset. A full server is asked again until the time is up."""
        from websockets.exceptions import InvalidStatus, WebSocketException
        from websockets.sync.client import connect

        until, pause = time.monotonic() + self.connect_s, 0.1
        while True:
            try:
                self._connection = connect(
                    self.url, open_timeout=self.connect_s, max_size=MAX_BYTES, additional_headers=self.headers
                )
            except InvalidStatus as error:  # it answers, and takes no connection
                raise EnvironmentFailure(f"{self.url}: no connection to the OpenEnv server: {error}") from error
            except (OSError, TimeoutError, WebSocketException) as error:
                raise self._presence.lost(f"no connection: {error}") from error
            self._connected = time.monotonic()
            reply = self._ask({"type": "reset", "data": keys})
            self._presence.here()
            if reply.get("type") != "error":
                return reply
            code = reply["data"].get("code")
            self._connection.close()
            if code != FULL or time.monotonic() + pause > until:
                self._connection = None
                raise EnvironmentFailure(f"{self.url}: the OpenEnv server refused to reset: {_problems(reply)}")
            time.sleep(pause * (0.5 + random.random()))
            pause = min(2 * pause, 2.0)

    def _ask(self, frame: dict[str, Any]) -> dict[str, Any]:
        """Send a frame and wait for its reply."""
        from websockets.exceptions import WebSocketException

        try:
            self._connection.send(json.dumps(frame))
        except (OSError, WebSocketException) as error:
            if frame["type"] != "reset":
                raise self._lost(error) from error
        try:  # a full server says so and closes without being asked: read that although nothing could be sent
            reply = json.loads(self._connection.recv(timeout=self.deadline_s))
        except (OSError, TimeoutError, WebSocketException, ValueError) as error:
            raise self._lost(error) from error
        if not isinstance(reply, dict) or not isinstance(reply.get("data"), dict):
            raise self._lost(ValueError(f"the reply {reply!r:.60} is no frame"))
        if reply.get("type") == "error" and reply["data"].get("code") not in ("VALIDATION_ERROR", FULL):
            raise self._lost(RuntimeError(_problems(reply)))
        return reply

    def _lost(self, error: Exception) -> EnvironmentFailure:
        connection, self._connection = self._connection, None
        self._over = True
        if connection is not None:
            connection.close_socket()
        if _is_gone(error):
            return self._presence.lost(f"turn {self._turn}: {error}", self._connected)
        why = f"no reply within {self.deadline_s:g} s" if isinstance(error, TimeoutError) else str(error)
        return EnvironmentFailure(f"{self.url}, turn {self._turn}: the episode is lost: {why}. A step is never sent again.")

    def _shown(self, reply: dict[str, Any]) -> Observation:
        """The fields of an observation: texts one a line, then pictures."""
        observation = reply["data"].get("observation")
        fields = observation if isinstance(observation, Mapping) else {"observation": observation}
        where = f"{self.url} seed {self._seed} turn {self._turn}"
        found, used = pictures_of(fields, self.media, where)
        texts = {key: value for key, value in fields.items() if self.text is not None and key in self.text}
        if self.text is None:
            hidden = {*used, "metadata"}
            texts = {key: value for key, value in fields.items() if key not in hidden and value is not None}
        lone = len(texts) == 1
        lines = "\n".join(text_form(value) if lone else f"{key}: {text_form(value)}" for key, value in texts.items())
        blocks = [Text(lines)] if lines else []
        shown = tuple(picture(self.store, item, where) for item in found)
        return Observation((Message("user", (*blocks, *shown) or (Text("(nothing is shown)"),)),))


def pictures_of(fields: Mapping[str, Any], media: Mapping[str, Any], where: str) -> tuple[list[Any], set[str]]:
    """The pictures that an observation's fields hold, in the order of ``media``, and the fields that hold only these."""
    found: list[Any] = []
    used: set[str] = set()
    for field, form in media.items():
        value = fields.get(field)
        if value is None:
            continue
        if form == "mcp":
            blocks = value.get("content") if isinstance(value, Mapping) else value
            items = [block for block in (blocks if isinstance(blocks, list) else []) if isinstance(block, Mapping)]
            found += [block["data"] for block in items if block.get("type") == "image" and "data" in block]
            continue
        used.add(field)
        if form in ("base64", "pixels"):
            found += value if form == "base64" and isinstance(value, list) else [value]
        elif form in fields:
            used.add(form)
            found.append(byte_array(value, where, fields[form]))
        else:
            raise EnvironmentFailure(f"{where}: '{field}' is a picture of form '{form}', and there is no field '{form}'.")
    return found, used


def _is_gone(error: Exception) -> bool:
    """True where the server itself is gone: the connection ended without a word, or since the server ends."""
    from websockets.exceptions import ConnectionClosed

    if isinstance(error, ConnectionClosed):
        return error.rcvd is None or error.rcvd.code in RESTARTING
    return isinstance(error, OSError) and not isinstance(error, TimeoutError)


def _with(action: Mapping[str, Any], path: Sequence[str], answer: str) -> dict[str, Any]:
    """An action with the answer at the end of a path of keys."""
    first, *rest = path
    inner = action.get(first)
    return {**action, first: _with(inner if isinstance(inner, Mapping) else {}, rest, answer) if rest else answer}


def _address(url: str) -> str:
    socket = re.sub(r"^http(s?)://", r"ws\1://", url)
    if not socket.startswith(("ws://", "wss://")):
        raise RecipeError(f"{NAME}: '{url}' is no address of a server; it is like ws://127.0.0.1:8000/ws.")
    return socket if socket.rstrip("/").endswith("/ws") else f"{socket.rstrip('/')}/ws"


def _problems(reply: Mapping[str, Any]) -> str:
    data = reply["data"]
    errors = [error for error in data.get("errors") or () if isinstance(error, Mapping)]
    details = [f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg')}" for error in errors]
    return "; ".join([str(data.get("message") or data.get("code")), *details])[:1000]

"""Endpoints of judges, and one call of one through the openai client, which itself never retries.

Endpoints are those of the recipe, or of a JSON file ``{model: {…} or [{…}, …]}``. The file is that of
``judges.config``, else the one that ``M3_API_CONFIG`` names, else, where the recipe has no endpoints,
``configs/api_config.json``, as in TaskMem. Keys are read from the environment or a file when an endpoint is first
called and held in a ``Secret``: they reach no log, no recipe dump, no error and no cache.
"""

import asyncio
import base64
import email.utils
import os
import sqlite3
import ssl
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from pydantic import ValidationError

from sensorium.data.decoder import decode
from sensorium.data.media_files import mime_type
from sensorium.data.media_store import MediaStore
from sensorium.data.sound import DecodedAudio, encode_wav
from sensorium.data.video import DecodedVideo
from sensorium.recipe.schema import JudgeEndpointSection, JudgesSection
from sensorium.rewards.judges.answer_forms import strict
from sensorium.runs.durable import database_errors
from sensorium.vocabulary.content import Block, Message, Text
from sensorium.vocabulary.decoding import VideoParameters
from sensorium.vocabulary.errors import MediaError, RecipeError, RecordError, SensoriumError, UnknownJudge
from sensorium.vocabulary.plain import printable, strict_json, words
from sensorium.vocabulary.secrets import Secret, masked

CONFIG_VARIABLE = "M3_API_CONFIG"
DEFAULT_CONFIG = Path("configs/api_config.json")
FIELDS = ("azure_endpoint", "api_version", "api_key", "base_url", "model", "api_key_env", "api_key_file")


@dataclass(frozen=True)
class Endpoint:
    """The endpoint of one model, with the key where a file of endpoints holds it."""

    model: str
    section: JudgeEndpointSection
    key: Secret | None = field(default=None, repr=False, compare=False)

    @property
    def place(self) -> str:
        """The address, for errors and counts; never the key."""
        return self.section.base_url or self.section.azure_endpoint

    @property
    def key_source(self) -> str:
        if self.section.api_key_env:
            return f"the environment variable {self.section.api_key_env}"
        file = self.section.api_key_file
        return f"the file '{file}'" if file else "the file of endpoints" if self.key else "nowhere"

    def secret(self) -> Secret | None:
        """The key, read now; None where there is none. UnknownJudge says where it should have been."""
        subject = f"judges: the key of '{self.model}' at {self.place}"
        found, variable, file = self.key, self.section.api_key_env, self.section.api_key_file
        if variable:
            found = Secret(os.environ.get(variable, "").strip())
            if not found.reveal():
                raise UnknownJudge(
                    f"{subject} should be in the environment variable {variable}, which is not set. Set it where the run "
                    "is started."
                )
        elif file is not None:
            try:
                found = Secret(file.expanduser().read_text().strip())
            except (OSError, UnicodeDecodeError) as error:
                problem = error.strerror if isinstance(error, OSError) else "it is no text"
                raise UnknownJudge(f"{subject} should be in '{file}', which cannot be read: {problem}.") from None
        if found is not None and not (found.reveal().isascii() and found.reveal().isprintable()):
            raise UnknownJudge(
                f"{subject}, from {self.key_source}, has a character that no key can have: a line break, a tab or one "
                "beyond ASCII. Put the key alone there."
            )
        return found


def endpoints_of(section: JudgesSection) -> dict[str, tuple[Endpoint, ...]]:
    """All endpoints by model name: the recipe's, then those of the file."""
    found = {
        model: tuple(Endpoint(model, one) for one in several) for model, several in section.endpoints.items() if several
    }
    named = section.config or (Path(os.environ[CONFIG_VARIABLE]) if os.environ.get(CONFIG_VARIABLE) else None)
    if named is None and not found and DEFAULT_CONFIG.is_file():
        named = DEFAULT_CONFIG
    if named is not None:
        for model, several in read_config(named).items():
            found[model] = (*found.get(model, ()), *several)
    return found


def read_config(path: Path) -> dict[str, tuple[Endpoint, ...]]:
    """The endpoints of an ``api_config.json``: each model has one object or a list of them."""
    where = f"judges.config: '{path}'"
    try:
        rows = strict_json(path.expanduser().read_text())
    except OSError as error:
        raise RecipeError(f"{where} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{where} is no JSON: {str(error).split(':')[0]}.") from None  # its text may hold a key
    if not isinstance(rows, dict):
        raise RecipeError(f"{where} must be an object of endpoints by model name.")
    comments = {model for model, given in rows.items() if model.startswith("_") and isinstance(given, str)}
    return {model: _of_rows(f"{where}: '{model}'", model, given) for model, given in rows.items() if model not in comments}


def _of_rows(where: str, model: str, given: Any) -> tuple[Endpoint, ...]:
    rows = given if isinstance(given, list) else [given]
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise RecipeError(f"{where} must be an endpoint (an object) or a list of them.")
    found = []
    for row in rows:
        if strange := [key for key in row if key not in FIELDS]:
            raise RecipeError(f"{where}: unknown key '{strange[0]}'. Known: {', '.join(FIELDS)}.")
        if not all(isinstance(value, str) for value in row.values()):
            raise RecipeError(f"{where}: the values of an endpoint are texts.")
        rest = {key: value for key, value in row.items() if key != "api_key"}
        try:
            section = JudgeEndpointSection(**rest)
        except ValidationError as error:
            raise RecipeError(f"{where}: {error.errors()[0]['msg']}.") from None
        found.append(Endpoint(model, section, Secret(row["api_key"]) if row.get("api_key") else None))
    return tuple(found)


LONGEST_REST_S = 60.0
NOTED_FAILURES = 3  # in a row, after which one of several endpoints is named: the others would hide it
DOUBLINGS = 10  # more would rest longer than LONGEST_REST_S anyway, and overflow after a thousand failures


@dataclass
class EndpointHealth:
    """How an endpoint is doing: calls open now, failures in a row, when it may be asked again, calls it was given."""

    endpoint: Endpoint
    open: int = 0
    failures: int = 0
    rests_until: float = 0.0
    calls: int = 0
    refused_key: str = ""


class EndpointPool:
    """Chooses among the endpoints of a model. Used from one event loop only.

    An endpoint that fails rests: 1 s, 2 s, 4 s … up to a minute, or as long as its Retry-After says. One that refuses the
    key is not asked again. Example: a has 2 calls open, b 1, so b is next; b answers 503 and rests 1 s, so the next calls
    go to a, even if it is busier; when both rest, the caller waits for the first to be back.
    """

    def __init__(self, endpoints: tuple[Endpoint, ...]) -> None:
        self.members = [EndpointHealth(endpoint) for endpoint in endpoints]

    def next(self) -> tuple[EndpointHealth | None, float]:
        """The endpoint to ask now; or None, and the seconds until one may be asked (infinite: none will be)."""
        now = time.monotonic()
        usable = [member for member in self.members if not member.refused_key]
        ready = [member for member in usable if member.rests_until <= now]
        if ready:
            return min(ready, key=lambda member: (member.open, member.calls)), 0.0
        return None, min((member.rests_until - now for member in usable), default=float("inf"))

    def begin(self, member: EndpointHealth) -> None:
        """Count a call that starts."""
        member.open += 1
        member.calls += 1

    def answered(self, member: EndpointHealth) -> None:
        """A call was answered: the endpoint is healthy."""
        member.open -= 1
        member.failures = 0

    def failed(self, member: EndpointHealth, rest_s: float | None) -> None:
        """A call failed; the endpoint rests as long as it asked for, or longer with every failure."""
        member.open -= 1
        member.failures += 1
        if member.failures == NOTED_FAILURES and len(self.members) > 1:
            print(
                f"judge '{member.endpoint.model}': {member.endpoint.place} failed {member.failures} times in a row and "
                f"is asked less often; {len(self.members) - 1} other endpoints take its questions. Is it running?",
                file=sys.stderr,
                flush=True,
            )
        usual = min(LONGEST_REST_S, 2.0 ** min(member.failures - 1, DOUBLINGS))
        if len(self.members) == 1 and rest_s is None:
            usual = 0.0  # there is no other to ask, and the caller waits by itself
        member.rests_until = time.monotonic() + (usual if rest_s is None else rest_s)

    def refused(self, member: EndpointHealth, reason: str = "") -> None:
        """A call was refused: for what was asked, or, with a reason, for the key."""
        member.open -= 1
        member.refused_key = reason


SCHEMA = "CREATE TABLE IF NOT EXISTS buckets (name TEXT PRIMARY KEY, level REAL NOT NULL, at REAL NOT NULL)"
BURST_S = 6.0
CLOCKS_DIFFER_S = 3600.0  # between machines. A bucket fills by the clock that is ahead: each of its seconds counts once


class SharedLimits:
    """The limits of every model, shared by processes; ``take`` returns how long to wait before a call is made.

    Each limit is a bucket that fills at its rate and holds a tenth of a minute's worth (at least one request). A caller
    takes at once and waits until the level is back at 0: with 60 requests a minute, and 6 in the bucket, the 8th call
    waits 2 s and the 9th 3 s, in whichever processes. Tokens are taken as estimated, and corrected by the answer's count.
    """

    def __init__(self, path: Path, requests: Mapping[str, float], tokens: Mapping[str, float]) -> None:
        self.path = path
        self._rates = {f"requests/{model}": rate / 60 for model, rate in requests.items()}
        self._rates |= {f"tokens/{model}": rate / 60 for model, rate in tokens.items()}
        if any(rate <= 0 for rate in self._rates.values()):
            raise RecordError("judges: limits are above 0 requests or tokens a minute; leave out those that do not hold.")

    def take(self, model: str, tokens: int) -> float:
        """Take one request and so many tokens; the seconds to wait before the call."""
        return max(self._move(f"requests/{model}", 1.0), self._move(f"tokens/{model}", float(tokens)))

    def give_back(self, model: str, tokens: int) -> None:
        """Undo ``take`` for a call that was not made."""
        self._move(f"requests/{model}", -1.0)
        self._move(f"tokens/{model}", -float(tokens))

    def settle(self, model: str, estimated: int, used: int) -> None:
        """Correct an estimate by the tokens that an answer used."""
        self._move(f"tokens/{model}", float(used - estimated))

    def _move(self, name: str, amount: float) -> float:
        rate = self._rates.get(name)
        if rate is None or amount == 0:
            return 0.0
        most = max(1.0, rate * BURST_S)
        with (
            database_errors(self.path, "the file of judges' limits", "Remove it and continue with --resume."),
            closing(sqlite3.connect(self.path, timeout=30.0, isolation_level=None)) as db,
            db,
        ):
            db.execute(SCHEMA)
            db.execute("BEGIN IMMEDIATE")
            now = time.time()
            row = db.execute("SELECT level, at FROM buckets WHERE name = ?", (name,)).fetchone()
            level, at = row or (most, now)
            if at > now + CLOCKS_DIFFER_S:
                at = now  # the clock was set back
            level = min(most, level + max(0.0, now - at) * rate) - amount
            db.execute("INSERT OR REPLACE INTO buckets VALUES (?, ?, ?)", (name, level, max(now, at)))
        return max(0.0, -float(level) / rate)


MOST_BYTES = 16 << 20  # of a reply; an answer has some thousand
MOST_CHARACTERS = 1 << 20  # of an answer; a longer text is no answer
MOST_TOKENS = 1 << 40  # a larger count of tokens is no count
MEDIUM_TOKENS = 300  # estimate for a picture, a frame or a second of sound
RETRIED = (408, 409, 425, 429)  # statuses below 500 after which a retry may help
SHORTEST_REST_S, LONGEST_REST_S = 0.1, 600.0
REWRITTEN = ("content-encoding", "content-length", "transfer-encoding")  # headers that no longer hold for a read reply


class StrangeReply(ValueError):
    """A reply that is not read; the message says why."""


@cache
def trusted_certificates() -> ssl.SSLContext:
    """The TLS context of all clients of this process: reading the system's certificates takes 50 ms for each."""
    return ssl.create_default_context()


def bounded_client(most: int = MOST_BYTES) -> Any:
    """An HTTP client for the openai package that reads at most so many bytes, unpacked, and follows no redirect.

    A redirect would carry the question, and Azure's key, to an address that nobody configured.
    """
    import openai

    class BoundedClient(openai.DefaultAsyncHttpxClient):  # type: ignore[misc]  # mypy does not read openai
        async def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
            reply = await super().send(request, stream=True, **options)
            try:
                raw = bytearray()
                async for part in reply.aiter_raw():
                    raw += part
                    if len(raw) > most:
                        raise StrangeReply(f"its reply has more than {most >> 20} MiB")
            finally:
                await reply.aclose()
            headers = {name: value for name, value in reply.headers.items() if name not in REWRITTEN}
            content = unpacked(bytes(raw), reply.headers.get("content-encoding", ""), most)
            return type(reply)(reply.status_code, headers=headers, content=content, request=request)

    headers = {"Accept-Encoding": "gzip, deflate"}
    return BoundedClient(follow_redirects=False, headers=headers, verify=trusted_certificates())


def unpacked(data: bytes, encoding: str, most: int = MOST_BYTES) -> bytes:
    """The bytes of a reply with this content encoding, at most so many."""
    kind = encoding.strip().lower()
    if kind in ("", "identity"):
        return data
    if kind not in ("gzip", "x-gzip", "deflate"):
        raise StrangeReply(f"its reply is packed as {kind[:40]!r}, which was not asked for")
    try:
        found = zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(data, most + 1)
    except zlib.error as error:
        raise StrangeReply(f"its reply cannot be unpacked: {error}") from error
    if len(found) > most:
        raise StrangeReply(f"its reply unpacks to more than {most >> 20} MiB")
    return found


def wire_messages(messages: Sequence[Message], store: MediaStore | None, video: str) -> list[dict[str, Any]]:
    """The messages as the API takes them; media are read from the store, videos as ``frames`` or as a ``file``."""
    found = []
    for message in messages:
        parts = [part for block in message.content for part in _parts(block, store, video)]
        content = parts if message.media else _sendable(message.text)
        found.append({"role": message.role, "content": content})
    return found


def _sendable(text: str) -> str:
    """The text with lone surrogates, which JSON can hold and UTF-8 cannot, written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _parts(block: Block, store: MediaStore | None, video: str) -> list[dict[str, Any]]:
    if isinstance(block, Text):
        return [{"type": "text", "text": _sendable(block.text)}]
    if store is None:
        raise MediaError(f"a judge is to be shown the {block.kind} '{block.name}', and there is no store that holds it.")
    if block.kind == "picture":
        data = store.shown_bytes(block)
        return [{"type": "image_url", "image_url": {"url": _data_url(data, mime_type(data[:64], "picture"))}}]
    parts: list[dict[str, Any]] = []
    if block.kind == "video" and video == "file":
        assert isinstance(block.parameters, VideoParameters)
        if block.parameters.start or block.parameters.end is not None:
            raise MediaError(f"video '{block.name}' is trimmed, and its file would show more than that; set video: frames.")
        data = store.bytes_of(block)
        parts.append({"type": "video_url", "video_url": {"url": _data_url(data, mime_type(data[:64], "video"))}})
    elif block.kind == "video":
        clip = decode(store, block)
        assert isinstance(clip, DecodedVideo)
        for time_s, frame in zip(clip.times_s.tolist(), clip.frames, strict=True):
            buffer = BytesIO()
            Image.fromarray(frame).save(buffer, "JPEG", quality=90)
            parts.append({"type": "text", "text": f"<{time_s:.1f} seconds>"})
            parts.append({"type": "image_url", "image_url": {"url": _data_url(buffer.getvalue(), "image/jpeg")}})
    sound = block if block.kind == "sound" else block.sound
    if sound is not None:
        heard = decode(store, sound)
        assert isinstance(heard, DecodedAudio)
        data = base64.b64encode(encode_wav(heard.samples, heard.sample_rate))
        parts.append({"type": "input_audio", "input_audio": {"data": data.decode(), "format": "wav"}})
    return parts


def _data_url(data: bytes, mime: str) -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def estimated_tokens(messages: list[dict[str, Any]], most: int) -> int:
    """About how many tokens a call takes: a quarter of the characters, a fixed number a medium, and all it may write."""
    found = most
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        found += sum(len(part["text"]) // 4 + 4 if part["type"] == "text" else MEDIUM_TOKENS for part in parts)
    return found


@dataclass(frozen=True)
class Reply:
    """A judge's text and its tokens. ``cut``: max_tokens ended it."""

    text: str
    input_tokens: int
    output_tokens: int
    cut: bool = False


@dataclass(frozen=True)
class CallProblem:
    """Why a call gave no usable text. ``again``: a retry may help. ``key``: the endpoint refused the key.

    ``rest_s``: how long it asked not to be called. ``schema``: the endpoint at ``place`` may not take JSON schemas.
    ``text``: a malformed answer.
    """

    reason: str
    outcome: str
    again: bool = True
    key: bool = False
    rest_s: float | None = None
    schema: bool = False
    place: str = ""
    text: str = ""


class Transport:
    """Calls endpoints; holds one client for each. Lives in one event loop."""

    def __init__(self) -> None:
        self._clients: dict[int, Any] = {}
        self.secrets: list[str] = []

    async def call(
        self,
        endpoint: Endpoint,
        messages: list[dict[str, Any]],
        parameters: dict[str, Any],
        schema: dict[str, Any] | None,
        deadline_s: float,
    ) -> Reply | CallProblem:
        """Ask once, within a deadline. Keys that an endpoint sends back are masked."""
        import openai

        parts = [part for message in messages if not isinstance(message["content"], str) for part in message["content"]]
        shows_file = any(part["type"] == "video_url" for part in parts)
        if endpoint.section.azure_endpoint and shows_file:
            messages = _video_files_as_images(messages)
        model, extra = endpoint.section.model or endpoint.model, dict(parameters)
        if schema is not None:
            named = {"name": "answer", "schema": schema, **({"strict": True} if strict(schema) else {})}
            extra["response_format"] = {"type": "json_schema", "json_schema": named}
        try:
            client = self._client(endpoint)
            async with asyncio.timeout(deadline_s):  # the client bounds single reads: a byte a second would never end
                found = await client.chat.completions.create(model=model, messages=messages, timeout=deadline_s, **extra)
        except (openai.APITimeoutError, TimeoutError):
            return CallProblem(f"{endpoint.place} did not answer within {deadline_s:g} s", "timeout")
        except openai.APIStatusError as error:
            return self._status_problem(endpoint, error, schema is not None, shows_file)
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            if isinstance(cause, StrangeReply):
                return CallProblem(f"{endpoint.place} answered strangely: {cause}", "strange")
            reason = self._excerpt(str(cause) or type(cause).__name__)
            return CallProblem(f"{endpoint.place} cannot be reached: {reason}", "unreachable")
        except SensoriumError:
            raise
        except Exception as error:  # whatever the client raises at what an endpoint sent: it is no answer of this API
            return CallProblem(f"{endpoint.place} answered strangely: {self._excerpt(words(error))}", "strange")
        return self._reply(endpoint, found)

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()
        self._clients.clear()

    def _client(self, endpoint: Endpoint) -> Any:
        if id(endpoint) not in self._clients:
            import openai

            secret = endpoint.secret()
            key = secret.reveal() if secret is not None else "none"
            if secret is not None:
                self.secrets.append(key)
            options = {"api_key": key, "max_retries": 0, "http_client": bounded_client()}
            at = endpoint.section
            if at.azure_endpoint:
                options |= {"azure_endpoint": at.azure_endpoint, "api_version": at.api_version}
                self._clients[id(endpoint)] = openai.AsyncAzureOpenAI(**options)
            else:
                self._clients[id(endpoint)] = openai.AsyncOpenAI(base_url=at.base_url, **options)
        return self._clients[id(endpoint)]

    def _reply(self, endpoint: Endpoint, found: Any) -> Reply | CallProblem:
        try:
            text = found.choices[0].message.content
        except (AttributeError, IndexError, TypeError, KeyError):
            return CallProblem(f"{endpoint.place} answered without a choice", "strange")
        text = text if isinstance(text, str) else ""
        if len(text) > MOST_CHARACTERS:
            return CallProblem(f"{endpoint.place} answered with {len(text):,} characters", "strange")
        usage = getattr(found, "usage", None)
        counts = [getattr(usage, name, 0) for name in ("prompt_tokens", "completion_tokens")]
        tokens = [count if isinstance(count, int) and 0 <= count <= MOST_TOKENS else 0 for count in counts]
        cut = getattr(found.choices[0], "finish_reason", "") == "length"
        return Reply(_sendable(str(masked(text, self.secrets))), tokens[0], tokens[1], cut)

    def _excerpt(self, text: str) -> str:
        """The beginning of a message; keys are masked first, so that none is cut in two."""
        return printable(masked(text, self.secrets))[:200]

    def _status_problem(self, endpoint: Endpoint, error: Any, with_schema: bool, shows_file: bool) -> CallProblem:
        status, body = error.status_code, error.body
        text = (body.get("message") or body.get("error") or body) if isinstance(body, dict) else (body or error)
        reason = f"{endpoint.place} answered {status}: {self._excerpt(str(text))}"
        if status in (401, 403):
            return CallProblem(f"{reason} (its key comes from {endpoint.key_source})", str(status), again=False, key=True)
        if status >= 500 or status in RETRIED:
            return CallProblem(reason, str(status), rest_s=_retry_after(error.response.headers))
        if shows_file:
            reason += " (it was shown a video as a file; to show frames instead, set video: frames in the reward term)"
        schema = with_schema and status in (400, 422)
        return CallProblem(reason, str(status), again=False, schema=schema, place=endpoint.place)


def _video_files_as_images(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Video files as ``image_url``: Azure's API has no other part for them, and TaskMem sends them so."""

    def part_of(part: dict[str, Any]) -> dict[str, Any]:
        return {"type": "image_url", "image_url": part["video_url"]} if part["type"] == "video_url" else part

    return [
        message if isinstance(message["content"], str) else {**message, "content": list(map(part_of, message["content"]))}
        for message in messages
    ]


def refuse_without_client() -> None:
    """Refuse a recipe that asks judges where the openai package is not installed."""
    try:
        import openai  # noqa: F401
    except ImportError as error:
        raise RecipeError(
            f"judges are asked through the package openai ({error}). Install it: pip install 'sensorium[judges]'."
        ) from None


def _retry_after(headers: Any) -> float | None:
    """Seconds by Retry-After (seconds or a date) or retry-after-ms; None if neither is given, or the time is over.

    An endpoint that says "at once" and refuses again would use up all retries within a moment.
    """
    try:
        if "retry-after-ms" in headers:
            seconds = float(headers["retry-after-ms"]) / 1000
        else:
            given = headers.get("retry-after", "").strip()
            plain = given.replace(".", "", 1).isdigit()
            seconds = float(given) if plain else email.utils.parsedate_to_datetime(given).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return None
    return min(LONGEST_REST_S, seconds) if seconds >= SHORTEST_REST_S else None

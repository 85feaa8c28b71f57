"""One call of an endpoint through the openai client, and its result. The client itself never tries again."""

import asyncio
import base64
import email.utils
import time
import zlib
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from PIL import Image

from sensorium.data.decoder import decode
from sensorium.data.media_files import mime_type
from sensorium.data.media_store import MediaStore
from sensorium.data.sound import DecodedAudio, encode_wav
from sensorium.data.video import DecodedVideo
from sensorium.rewards.judges.answer_forms import strict
from sensorium.rewards.judges.endpoints import Endpoint
from sensorium.vocabulary.content import Media, Message, Text
from sensorium.vocabulary.decoding import VideoParameters
from sensorium.vocabulary.errors import MediaError, RecipeError, SensoriumError
from sensorium.vocabulary.plain import printable, words
from sensorium.vocabulary.secrets import masked

# A redirect would carry the question, and Azure's key, to a place that nobody named. A reply without an end, or one
# that is small and grows without bounds when it is unpacked, would take all memory.


MOST_BYTES = 16 << 20
"""Of a reply; an answer has some thousand."""

REWRITTEN = ("content-encoding", "content-length", "transfer-encoding")
"""Headers that say how the reply came, which is whole and unpacked here."""


class StrangeReply(ValueError):
    """A reply that is not read; the message says why."""


def bounded_client(most: int = MOST_BYTES) -> Any:
    """A client for the openai package."""
    import openai

    class BoundedClient(openai.DefaultAsyncHttpxClient):  # type: ignore[misc]  # mypy does not read openai
        """The package's own client, with the bounds of this module."""

        async def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
            """Ask, and read the whole reply within the bound."""
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

    return BoundedClient(follow_redirects=False, headers={"Accept-Encoding": "gzip, deflate"})


def unpacked(data: bytes, encoding: str, most: int = MOST_BYTES) -> bytes:
    """The bytes of a reply that came in this encoding, at most so many."""
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


MEDIUM_TOKENS = 300
"""What a picture or frame, or a second of sound, is taken for when tokens are estimated."""


def wire_messages(messages: tuple[Message, ...], store: MediaStore | None, video: str) -> list[dict[str, Any]]:
    """The messages as the API takes them; media are read from the store."""
    return [_message(message, store, video) for message in messages]


def _message(message: Message, store: MediaStore | None, video: str) -> dict[str, Any]:
    if not message.media:
        return {"role": message.role, "content": _sendable(message.text)}
    parts: list[dict[str, Any]] = []
    for block in message.content:
        if isinstance(block, Text):
            parts.append({"type": "text", "text": _sendable(block.text)})
        else:
            parts += _media_parts(block, store, video)
    return {"role": message.role, "content": parts}


def _sendable(text: str) -> str:
    """The text with half characters (lone surrogates, which JSON can hold and UTF-8 cannot) written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _media_parts(media: Media, store: MediaStore | None, video: str) -> list[dict[str, Any]]:
    if store is None:
        raise MediaError(f"a judge is to be shown the {media.kind} '{media.name}', and there is no store that holds it.")
    if media.kind == "picture":
        data = store.bytes_of(media)
        return [_picture(data, mime_type(data[:64], "picture"))]
    if media.kind == "sound":
        return [_sound(media, store)]
    sound = [] if media.sound is None else [_sound(media.sound, store)]
    return [*(_file(media, store) if video == "file" else _frames(media, store)), *sound]


def _picture(data: bytes, mime: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:{mime};base64,{base64.b64encode(data).decode()}"}}


def _frames(media: Media, store: MediaStore) -> list[dict[str, Any]]:
    """Frames as pictures, each after its time."""
    clip = decode(store, media)
    assert isinstance(clip, DecodedVideo)
    parts: list[dict[str, Any]] = []
    for time_s, frame in zip(clip.times_s.tolist(), clip.frames, strict=True):
        buffer = BytesIO()
        Image.fromarray(frame).save(buffer, "JPEG", quality=90)
        parts += [{"type": "text", "text": f"<{time_s:.1f} seconds>"}, _picture(buffer.getvalue(), "image/jpeg")]
    return parts


def _file(media: Media, store: MediaStore) -> list[dict[str, Any]]:
    """The whole file; a trimmed one would show more than was asked for."""
    asked = media.parameters
    assert isinstance(asked, VideoParameters)
    if asked.start or asked.end is not None:
        raise MediaError(f"video '{media.name}' is trimmed, so a judge can be shown its frames only; set video: frames.")
    data = store.bytes_of(media)
    url = f"data:{mime_type(data[:64], 'video')};base64,{base64.b64encode(data).decode()}"
    return [{"type": "video_url", "video_url": {"url": url}}]


def video_files_as_images(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with video files as ``image_url``: Azure's API has no other part for them, and TaskMem sends them so."""
    return [
        {**message, "content": [_video_as_image(part) for part in message["content"]]}
        if has_video_file([message])
        else message
        for message in messages
    ]


def has_video_file(messages: list[dict[str, Any]]) -> bool:
    """True if a video is shown as a file."""
    return any(
        part["type"] == "video_url"
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"]
    )


def _video_as_image(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "image_url", "image_url": part["video_url"]} if part["type"] == "video_url" else part


def _sound(media: Media, store: MediaStore) -> dict[str, Any]:
    clip = decode(store, media)
    assert isinstance(clip, DecodedAudio)
    data = encode_wav(clip.samples, clip.sample_rate)
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


def estimated_tokens(messages: list[dict[str, Any]], most: int) -> int:
    """About how many tokens a call takes: a quarter of the characters, a fixed number a medium, and all it may write."""
    found = most
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        found += sum(len(part["text"]) // 4 + 4 if part["type"] == "text" else MEDIUM_TOKENS for part in parts)
    return found


AGAIN = (408, 409, 425, 429)
"""Statuses below 500 after which asking again may help."""

SHORTEST_REST_S, LONGEST_REST_S = 0.1, 600.0
MOST_TOKENS = 1 << 40
"""A count of tokens beyond this is no count."""
MOST_CHARACTERS = 1 << 20
"""Of an answer; who says more than this answers nothing."""


@dataclass(frozen=True)
class Reply:
    """A judge's text and its tokens."""

    text: str
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class CallProblem:
    """Why a call gave no text. ``again``: asking again may help. ``key``: the endpoint refused the key.

    ``rest_s``: how long it asked to be left alone. ``schema``: the endpoint at ``place`` may not take JSON schemas.
    """

    reason: str
    outcome: str
    again: bool = True
    key: bool = False
    rest_s: float | None = None
    schema: bool = False
    place: str = ""


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
        """Ask once, within a deadline. Should an endpoint send a key back, it is not told on."""
        import openai

        extra: dict[str, Any] = {}
        shows_file = has_video_file(messages)
        if endpoint.azure_endpoint:
            messages = video_files_as_images(messages)
        if schema is not None:
            named = {"name": "answer", "schema": schema, **({"strict": True} if strict(schema) else {})}
            extra["response_format"] = {"type": "json_schema", "json_schema": named}
        try:
            client = self._client(endpoint)
            async with asyncio.timeout(deadline_s):  # the client's own bounds each read alone: a byte a second never ends
                found = await client.chat.completions.create(
                    model=endpoint.served_model, messages=messages, timeout=deadline_s, **parameters, **extra
                )
        except (openai.APITimeoutError, TimeoutError):
            return CallProblem(f"{endpoint.place} did not answer within {deadline_s:g} s", "timeout")
        except openai.APIStatusError as error:
            return self._status_problem(endpoint, error, schema is not None, shows_file)
        except openai.APIConnectionError as error:
            if isinstance(error.__cause__, StrangeReply):
                return CallProblem(f"{endpoint.place} answered strangely: {error.__cause__}", "strange")
            return CallProblem(f"{endpoint.place} cannot be reached: {self._told(_cause(error))}", "unreachable")
        except SensoriumError:
            raise
        except Exception as error:  # whatever the client raises at what an endpoint sent: it is no answer of this API
            return CallProblem(f"{endpoint.place} answered strangely: {self._told(words(error))}", "strange")
        return self._reply(endpoint, found)

    async def close(self) -> None:
        """Close the connections."""
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
            if endpoint.azure_endpoint:
                self._clients[id(endpoint)] = openai.AsyncAzureOpenAI(
                    azure_endpoint=endpoint.azure_endpoint,
                    api_version=endpoint.api_version,
                    api_key=key,
                    max_retries=0,
                    http_client=bounded_client(),
                )
            else:
                self._clients[id(endpoint)] = openai.AsyncOpenAI(
                    base_url=endpoint.base_url, api_key=key, max_retries=0, http_client=bounded_client()
                )
        return self._clients[id(endpoint)]

    def _reply(self, endpoint: Endpoint, found: Any) -> Reply | CallProblem:
        try:
            choice = found.choices[0]
            text = choice.message.content
        except (AttributeError, IndexError, TypeError, KeyError):
            return CallProblem(f"{endpoint.place} answered without a choice", "strange")
        if not isinstance(text, str):
            text = ""
        if len(text) > MOST_CHARACTERS:
            return CallProblem(f"{endpoint.place} answered with {len(text):,} characters", "strange")
        usage = getattr(found, "usage", None)
        return Reply(self._answer(text), _count(usage, "prompt_tokens"), _count(usage, "completion_tokens"))

    def _answer(self, text: str) -> str:
        """A judge's answer without keys, and with lone surrogates as escapes: no file can hold them."""
        return str(masked(text, self.secrets)).encode("utf-8", "backslashreplace").decode()

    def _told(self, text: str) -> str:
        """The beginning of an endpoint's or its client's message; keys are masked first, so that none is cut in two."""
        return printable(masked(text, self.secrets))[:200]

    def _status_problem(self, endpoint: Endpoint, error: Any, with_schema: bool, shows_file: bool) -> CallProblem:
        status = error.status_code
        said = f"{endpoint.place} answered {status}: {self._told(_said(error))}"
        if status in (401, 403):
            return CallProblem(f"{said} (its key comes from {endpoint.key_source})", str(status), again=False, key=True)
        if status >= 500 or status in AGAIN:
            return CallProblem(said, str(status), rest_s=_retry_after(error.response.headers))
        if shows_file:
            said += " (it was shown a video as a file; to show frames instead, set video: frames in the reward term)"
        schema = with_schema and status in (400, 422)
        return CallProblem(said, str(status), again=False, schema=schema, place=endpoint.place)


def refuse_without_client() -> None:
    """Refuse a recipe that asks judges where the openai package is not installed."""
    try:
        import openai  # noqa: F401
    except ImportError as error:
        raise RecipeError(
            f"judges are asked through the package openai ({error}). Install it: pip install 'sensorium[judges]'."
        ) from None


def _count(usage: Any, name: str) -> int:
    value = getattr(usage, name, 0)
    return value if isinstance(value, int) and 0 <= value <= MOST_TOKENS else 0


def _said(error: Any) -> str:
    body = error.body
    if isinstance(body, dict):
        return str(body.get("message") or body.get("error") or body)
    return str(body or error)


def _retry_after(headers: Any) -> float | None:
    """Seconds by Retry-After (seconds or a date) or retry-after-ms; None if neither says so, or names a time that is over.

    Whoever says "at once" and refuses again would have all retries within a moment; those wait as if it had said nothing.
    """
    try:
        if "retry-after-ms" in headers:
            asked = float(headers["retry-after-ms"]) / 1000
        else:
            said = headers.get("retry-after", "").strip()
            plain = said.replace(".", "", 1).isdigit()
            asked = float(said) if plain else email.utils.parsedate_to_datetime(said).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return None
    return min(LONGEST_REST_S, asked) if asked >= SHORTEST_REST_S else None


def _cause(error: BaseException) -> str:
    cause = error.__cause__ or error
    return str(cause) or type(cause).__name__

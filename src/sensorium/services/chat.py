"""Requests of OpenAI-compatible clients as messages and sampling, and the replies to them."""

import codecs
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from sensorium.data.media_store import MediaStore
from sensorium.data.row_format import Place, messages_of
from sensorium.engines.protocol import Sampling
from sensorium.services.application import Json, Refusal, Whole
from sensorium.vocabulary.content import Message
from sensorium.vocabulary.errors import SensoriumError

MOST_SEED = 2**63 - 1
MOST_CHOICES = 128
LEAST_TEMPERATURE = 1e-6
FILE = "file://"


def divisible(temperature: float) -> float:
    """Refuse temperatures by which logits cannot be divided; 0 is greedy."""
    if 0 < temperature < LEAST_TEMPERATURE:
        raise ValueError(f"Input should be 0, which is greedy, or at least {LEAST_TEMPERATURE}")
    return temperature


class Part(BaseModel):
    """A content part: text, or a medium as ``image_url``, ``video_url``, ``audio_url`` or ``input_audio``.

    Further keys of a video or sound part say how it is decoded (``fps``, ``frames``, …; see docs/guides/media.md).
    """

    model_config = ConfigDict(extra="allow")
    type: str


class ChatMessage(BaseModel):
    """One message."""

    model_config = ConfigDict(strict=True, extra="forbid")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part]
    name: str | None = None


class StreamOptions(BaseModel):
    """How to stream."""

    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False


class ResponseFormat(BaseModel):
    """Only plain text."""

    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text"] = "text"


class ChatRequest(BaseModel):
    """A chat completion. What the engine cannot do (tools, penalties, other log-probs) is refused, never ignored."""

    model_config = ConfigDict(strict=True, extra="forbid")
    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    temperature: Annotated[float, Field(ge=0, le=100), AfterValidator(divisible)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[Whole, Field(ge=-1, le=2**31)] | None = 0
    n: Annotated[Whole, Field(ge=1, le=MOST_CHOICES)] | None = 1
    max_tokens: Annotated[Whole, Field(ge=1, le=2**31)] | None = None
    max_completion_tokens: Annotated[Whole, Field(ge=1, le=2**31)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    seed: Annotated[Whole, Field(ge=-MOST_SEED, le=MOST_SEED)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[Whole, Field(ge=0, le=0)] | None = None
    return_token_ids: bool | None = False
    response_format: ResponseFormat | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        given = self.stop if isinstance(self.stop, list) else [self.stop]
        return tuple(text for text in given if text)

    def sampling(self, most: int) -> Sampling:
        """The sampling parameters; ``most`` tokens where the client sets no bound."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            max_new_tokens=min(most, self.max_completion_tokens or self.max_tokens or most),
            stop=self.stops,
        )


def conversation(request: ChatRequest, store: MediaStore, roots: tuple[Path, ...]) -> tuple[Message, ...]:
    """The messages of a request; its media go to the store. Files are read only where they lie in one of ``roots``."""
    if request.messages[-1].role == "assistant":
        raise Refusal(400, "the last message is the assistant's, so there is nothing to answer.")
    raw = []
    for message in request.messages:
        content = message.content if isinstance(message.content, str) else [raw_block(part) for part in message.content]
        raw.append({"role": "system" if message.role == "developer" else message.role, "content": content})
    try:
        return messages_of(raw, Place("messages", Path("/"), store, roots=roots, service=True))
    except SensoriumError as error:
        raise Refusal(400, str(error)) from error


def raw_block(part: Part) -> dict[str, Any]:
    """A content part as rows have it."""
    raw = part.model_dump()
    if part.type == "input_audio":
        held = raw.get("input_audio")
        data = held.get("data") if isinstance(held, dict) else None
        if not isinstance(data, str):
            raise Refusal(400, "input_audio holds {data: base64, format: wav}.")
        return {"type": "audio", "data": data}
    held = raw.get(part.type)
    if part.type.endswith("_url"):
        url = held.get("url") if isinstance(held, dict) else held
        if not isinstance(url, str) or not url:
            raise Refusal(400, f"{part.type} holds {{url: …}}.")
        if not url.startswith(("data:", FILE)):
            ways = f"send the medium as a data URL, or as {FILE} in a folder that is served"
            raise Refusal(400, f"'{url:.80}' is not fetched: {ways}.")
        return raw | {part.type: url.removeprefix(FILE)}
    return raw


class WrittenText:
    """The text of tokens as they come: whole characters only, up to a stop string.

    Example: with the stop string "END", the tokens "a", " E", "N", "D" give "a", " ", "", "": what may be the beginning of
    a stop string is held back until that is decided.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], stops: Sequence[str] = ()) -> None:
        self._bytes_of, self._stops = bytes_of, tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting = ""
        self.stopped = False

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that is certain after further tokens."""
        return self._take(self._decoder.decode(b"".join(self._bytes_of(token) for token in tokens)))

    def end(self) -> str:
        """The text that was held back, now that nothing follows."""
        left = self._take(self._decoder.decode(b"", final=True))
        rest, self._waiting = ("" if self.stopped else self._waiting), ""
        return left + rest

    def _take(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._waiting + new
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.stopped, self._waiting = True, ""
            return text[: min(places)]
        # the longest end of the text that may be the beginning of a stop string
        lengths = (n for stop in self._stops for n in range(1, min(len(text) + 1, len(stop))) if text.endswith(stop[:n]))
        kept = max(lengths, default=0)
        self._waiting = text[len(text) - kept :]
        return text[: len(text) - kept]


@dataclass
class Choice:
    """One answer: what was sampled, and how it ended."""

    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None


@dataclass(frozen=True)
class ReplyShape:
    """The form of a reply: its head, and what it has besides text."""

    id: str
    model: str
    bytes_of: Callable[[int], bytes]
    stops: tuple[str, ...] = ()
    logprobs: bool = False
    token_ids: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[Choice], prompt: Sequence[int]) -> Json:
        listed = []
        for choice in choices:
            text = WrittenText(self.bytes_of, self.stops)
            content = text.feed(choice.tokens) + text.end()
            entry = {"index": choice.index, "message": {"role": "assistant", "content": content}}
            listed.append(entry | self._details(choice.tokens, choice.logprobs) | {"finish_reason": choice.finish})
        reply = self._head("chat.completion") | {"choices": listed, "usage": usage(prompt, choices)}
        return reply | ({"prompt_token_ids": list(prompt)} if self.token_ids else {})

    def chunk(self, index: int, delta: Json, tokens: Sequence[int], logprobs: Sequence[float], finish: str | None) -> str:
        """A part of one choice, as an event."""
        entry = {"index": index, "delta": delta, **self._details(tokens, logprobs), "finish_reason": finish}
        return event(self._head("chat.completion.chunk") | {"choices": [entry]})

    def last(self, prompt: Sequence[int], choices: Sequence[Choice]) -> str:
        return event(self._head("chat.completion.chunk") | {"choices": [], "usage": usage(prompt, choices)})

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _details(self, tokens: Sequence[int], logprobs: Sequence[float]) -> Json:
        listed = []
        for token, logprob in zip(tokens, logprobs, strict=True):
            data = self.bytes_of(token)
            text = data.decode("utf-8", "replace")
            listed.append({"token": text, "logprob": logprob, "bytes": list(data), "top_logprobs": []})
        found: Json = {"logprobs": {"content": listed, "refusal": None} if self.logprobs else None}
        return found | ({"token_ids": list(tokens)} if self.token_ids else {})


def usage(prompt: Sequence[int], choices: Sequence[Choice]) -> Json:
    """Tokens read and written."""
    written = sum(len(choice.tokens) for choice in choices)
    return {"prompt_tokens": len(prompt), "completion_tokens": written, "total_tokens": len(prompt) + written}


def event(data: Any) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(data) if not isinstance(data, str) else data}\n\n"


def error_body(status: int, why: str) -> Json:
    """An error as OpenAI's clients read it."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": why, "type": kind, "param": None, "code": status}}

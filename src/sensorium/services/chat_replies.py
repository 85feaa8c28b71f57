"""What an OpenAI-compatible client is told: whole completions, and chunks of them as they are written."""

import codecs
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sensorium.services.application import Json


class WrittenText:
    """The text of tokens as they come: whole characters only, nothing from a stop string on.

    Example: with the stop string "END", the tokens "a", " E", "N", "D" give "a", " ", "", "": what may be the beginning of
    a stop string waits until it is known.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], stops: Sequence[str] = ()) -> None:
        self._bytes_of, self._stops = bytes_of, tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting = ""
        self.stopped = False

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that further tokens add for certain."""
        return self._take(self._decoder.decode(b"".join(self._bytes_of(token) for token in tokens)))

    def end(self) -> str:
        """What waited, now that nothing follows."""
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
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._waiting = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """How much of the end of a text may be the beginning of a stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass
class Choice:
    """One answer: what was sampled, and how it ended."""

    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None


@dataclass(frozen=True)
class ReplyShape:
    """What a reply has besides text."""

    id: str
    model: str
    bytes_of: Callable[[int], bytes]
    stops: tuple[str, ...] = ()
    logprobs: bool = False
    token_ids: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[Choice], prompt: Sequence[int]) -> Json:
        """A chat completion."""
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
        """The event with the usage."""
        return event(self._head("chat.completion.chunk") | {"choices": [], "usage": usage(prompt, choices)})

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _details(self, tokens: Sequence[int], logprobs: Sequence[float]) -> Json:
        listed = [self._token(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True)]
        found: Json = {"logprobs": {"content": listed, "refusal": None} if self.logprobs else None}
        return found | ({"token_ids": list(tokens)} if self.token_ids else {})

    def _token(self, token: int, logprob: float) -> Json:
        data = self.bytes_of(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data), "top_logprobs": []}


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

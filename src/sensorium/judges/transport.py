"""One call of an endpoint through the openai client, and what became of it. The client itself never tries again."""

import asyncio
import email.utils
import time
from dataclasses import dataclass
from typing import Any

from sensorium.judges.endpoints import Endpoint
from sensorium.judges.http_client import StrangeReply, bounded_client
from sensorium.judges.json_schema import strict
from sensorium.judges.wire import has_video_file, video_files_as_images
from sensorium.vocabulary.errors import RecipeError, SensoriumError
from sensorium.vocabulary.plain import printable, words
from sensorium.vocabulary.secrets import masked

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

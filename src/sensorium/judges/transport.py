"""One call of an endpoint through the openai client, and what became of it. The client itself never tries again."""

import asyncio
import email.utils
import time
from dataclasses import dataclass, replace
from typing import Any

from sensorium.judges.endpoints import Endpoint
from sensorium.judges.http_client import StrangeReply, bounded_client
from sensorium.judges.json_schema import strict
from sensorium.vocabulary.errors import RecipeError
from sensorium.vocabulary.plain import printable

AGAIN = (408, 409, 425, 429)
"""Statuses below 500 after which asking again may help."""

LONGEST_REST_S = 600.0
MOST_TOKENS = 1 << 40
"""A count of tokens beyond this is no count."""


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
        self._secrets: list[str] = []

    async def call(
        self,
        endpoint: Endpoint,
        messages: list[dict[str, Any]],
        parameters: dict[str, Any],
        schema: dict[str, Any] | None,
        deadline_s: float,
    ) -> Reply | CallProblem:
        """Ask once, within a deadline. Should an endpoint send a key back, it is not told on."""
        found = await self._asked(endpoint, messages, parameters, schema, deadline_s)
        if isinstance(found, CallProblem):
            for secret in self._secrets:
                found = replace(found, reason=found.reason.replace(secret, "***"))
        return found

    async def _asked(
        self,
        endpoint: Endpoint,
        messages: list[dict[str, Any]],
        parameters: dict[str, Any],
        schema: dict[str, Any] | None,
        deadline_s: float,
    ) -> Reply | CallProblem:
        import openai

        extra: dict[str, Any] = {}
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
            return _status_problem(endpoint, error, schema is not None)
        except openai.APIConnectionError as error:
            if isinstance(error.__cause__, StrangeReply):
                return CallProblem(f"{endpoint.place} answered strangely: {error.__cause__}", "strange")
            return CallProblem(f"{endpoint.place} cannot be reached: {_cause(error)}", "unreachable")
        except (openai.OpenAIError, ValueError) as error:  # an answer that is no answer of this API
            return CallProblem(f"{endpoint.place} answered strangely: {printable(str(error))[:200]}", "strange")
        return _reply(endpoint, found)

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
                self._secrets.append(key)
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


def refuse_without_client() -> None:
    """Refuse a recipe that asks judges where the openai package is not installed."""
    try:
        import openai  # noqa: F401
    except ImportError as error:
        raise RecipeError(
            f"judges are asked through the package openai ({error}). Install it: pip install 'sensorium[judges]'."
        ) from None


def _reply(endpoint: Endpoint, found: Any) -> Reply | CallProblem:
    try:
        choice = found.choices[0]
        text = choice.message.content
    except (AttributeError, IndexError, TypeError):
        return CallProblem(f"{endpoint.place} answered without a choice", "strange")
    if not isinstance(text, str):
        text = ""
    usage = getattr(found, "usage", None)
    return Reply(text, _count(usage, "prompt_tokens"), _count(usage, "completion_tokens"))


def _count(usage: Any, name: str) -> int:
    value = getattr(usage, name, 0)
    return value if isinstance(value, int) and 0 <= value <= MOST_TOKENS else 0


def _status_problem(endpoint: Endpoint, error: Any, with_schema: bool) -> CallProblem:
    status = error.status_code
    said = f"{endpoint.place} answered {status}: {printable(_said(error))[:200]}"
    if status in (401, 403):
        return CallProblem(f"{said} (its key comes from {endpoint.key_source})", str(status), again=False, key=True)
    if status >= 500 or status in AGAIN:
        return CallProblem(said, str(status), rest_s=_retry_after(error.response.headers))
    return CallProblem(said, str(status), again=False, schema=with_schema and status in (400, 422), place=endpoint.place)


def _said(error: Any) -> str:
    body = error.body
    if isinstance(body, dict):
        return str(body.get("message") or body.get("error") or body)
    return str(body or error)


def _retry_after(headers: Any) -> float | None:
    """Seconds by Retry-After (seconds or a date) or retry-after-ms; None if neither says so."""
    try:
        if "retry-after-ms" in headers:
            return min(LONGEST_REST_S, max(0.0, float(headers["retry-after-ms"]) / 1000))
        said = headers.get("retry-after")
        if said is None:
            return None
        if said.strip().replace(".", "", 1).isdigit():
            return min(LONGEST_REST_S, float(said))
        moment = email.utils.parsedate_to_datetime(said).timestamp()
        return min(LONGEST_REST_S, max(0.0, moment - time.time()))
    except (ValueError, TypeError, OverflowError):
        return None


def _cause(error: BaseException) -> str:
    cause = error.__cause__ or error
    return printable(str(cause) or type(cause).__name__)[:200]

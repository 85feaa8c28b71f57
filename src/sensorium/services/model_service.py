"""A model behind an OpenAI-compatible API.

    POST /v1/chat/completions   pictures, videos and sounds as content parts; n, stop, seed, streaming, log-probs, token ids
    GET  /v1/models             the one model
    GET  /health, /metrics

Statuses: 400 what cannot be answered, and why; 401 no key; 404 another model; 413 too large; 503 busy (with Retry-After).
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from sensorium import __version__
from sensorium.data.media_store import MediaStore
from sensorium.services.application import BodyLimit, Counters, Json, Refusal, make_application, sweeping, until_gone
from sensorium.services.chat import ChatRequest, Choice, ReplyShape, WrittenText, conversation, error_body, event
from sensorium.services.model_host import Heard, ModelHost, Prompt
from sensorium.vocabulary.errors import SensoriumError

STATUSES = {
    400: "it cannot be answered",
    401: "the key is missing or wrong",
    404: "there is no such model",
    413: "the body is too large",
    499: "the client is gone",
    503: "the server is busy; try again after Retry-After seconds",
}
RETRY_AFTER_S = 1.0
KEPT_S = 600.0
ChatReply = dict[str, Any]


class ModelService:
    """Answers requests with a model. At most ``capacity`` are open at once; media files may lie in ``roots`` alone."""

    def __init__(
        self, host: ModelHost, store: MediaStore, name: str, capacity: int = 256, roots: tuple[Path, ...] = ()
    ) -> None:
        self.host, self.store, self.name, self.capacity, self.roots = host, store, name, capacity, roots
        self.started = int(time.time())
        self.open = 0
        self.counters = Counters("sensorium_model")
        self.counters.declare(
            requests="requests taken",
            refused="requests refused because the server was busy",
            failed="requests that could not be answered",
            withdrawn="requests whose client went away",
            prompt_tokens="tokens read",
            completion_tokens="tokens written",
        )
        self.counters.measure("open", "requests under way", lambda: self.open)
        self.counters.measure("capacity", "requests that may be under way", lambda: self.capacity)

    def take(self, request: ChatRequest) -> None:
        """Take a place for a request; refused where there is none, or where it asks for another model."""
        if request.model not in (self.name, self.host.policy.family):
            raise Refusal(404, f"there is no model '{request.model:.80}' here; it is '{self.name}'.")
        if (request.n or 1) > self.capacity:
            most = f"this server writes at most {self.capacity} answers at once (its --capacity)"
            raise Refusal(400, f"n: {most}; ask for fewer at a time.")
        if self.open + (request.n or 1) > self.capacity:
            self.counters.add("refused")
            raise Refusal(503, f"{self.open} of {self.capacity} answers are being written.", RETRY_AFTER_S)
        self.open += request.n or 1
        self.counters.add("requests")

    async def prompt(self, request: ChatRequest) -> Prompt:
        messages = await asyncio.to_thread(conversation, request, self.store, self.roots)
        return await self.host.prompt(messages)

    def shape(self, request: ChatRequest) -> ReplyShape:
        wanted = bool(request.logprobs), bool(request.return_token_ids)
        id = f"chatcmpl-{secrets.token_hex(12)}"
        return ReplyShape(id, self.name, self.host.chat.token_bytes, request.stops, *wanted)

    async def answer(self, request: ChatRequest, prompt: Prompt, heard: Heard | None = None) -> list[Choice]:
        """The answers to a request, counted in the metrics."""
        seed = secrets.randbits(63) if request.seed is None else request.seed
        sampling = request.sampling(self.host.most_context)
        choices = await self.host.answer(prompt, sampling, seed, request.n or 1, heard)
        self.counters.add("prompt_tokens", len(prompt.tokens))
        self.counters.add("completion_tokens", sum(len(choice.tokens) for choice in choices))
        return choices

    async def whole(self, request: ChatRequest) -> Json:
        prompt = await self.prompt(request)
        return self.shape(request).whole(await self.answer(request, prompt), prompt.tokens)

    async def events(self, request: ChatRequest, prompt: Prompt) -> AsyncIterator[str]:
        shape, loop, count = self.shape(request), asyncio.get_running_loop(), request.n or 1
        news: asyncio.Queue[tuple[Choice, list[int], list[float]] | None] = asyncio.Queue()

        def heard(choice: Choice, tokens: Any, logprobs: Any) -> None:
            new = (Choice(choice.index, finish=choice.finish), list(tokens), list(logprobs))
            loop.call_soon_threadsafe(news.put_nowait, new)

        texts = [WrittenText(self.host.chat.token_bytes, request.stops) for _ in range(count)]
        asked = asyncio.create_task(self.answer(request, prompt, heard))
        asked.add_done_callback(lambda _: news.put_nowait(None))
        try:
            for index in range(count):
                yield shape.chunk(index, {"role": "assistant", "content": ""}, (), (), None)
            while (new := await news.get()) is not None:
                choice, tokens, logprobs = new
                text = texts[choice.index]
                content = text.feed(tokens) + (text.end() if choice.finish else "")
                yield shape.chunk(choice.index, {"content": content}, tokens, logprobs, choice.finish)
            choices = await asked
            if request.stream_options and request.stream_options.include_usage:
                yield shape.last(prompt.tokens, choices)
            yield event("[DONE]")
        except (Refusal, SensoriumError) as error:  # the reply has begun, so the stream reports it
            self.counters.add("failed")
            yield event(error_body(500, str(error)))
        finally:
            asked.cancel()
            self.open -= count


def make_model_app(service: ModelService, key: str = "", most_body: int = 64 << 20, hosts: Sequence[str] = ()) -> FastAPI:
    """The service. ``key`` must come with every request but /health, where it is not empty; ``hosts``: further names."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with sweeping(service.store, KEPT_S):
            yield
        service.host.close()

    app, declared = make_application("Sensorium model service", key, lifespan, STATUSES, error_body, hosts)
    app.add_middleware(BodyLimit, most=most_body)
    streamed = {"description": "the completion, or its parts as events", "content": {"text/event-stream": {}}}

    @app.get("/health")
    async def health() -> Json:
        load = {"open": service.open, "capacity": service.capacity}
        return {"status": "ok", "version": __version__, "model": service.name, **load}

    @app.get("/metrics", response_class=PlainTextResponse, **declared)
    async def metrics() -> PlainTextResponse:
        return service.counters.page()

    @app.get("/v1/models", **declared)
    async def models() -> Json:
        modalities = sorted(service.host.chat.modalities)
        model = {"id": service.name, "object": "model", "created": service.started, "owned_by": "sensorium"}
        return {"object": "list", "data": [model | {"modalities": modalities, "max_model_len": service.host.most_context}]}

    chat_declared = {**declared, "responses": declared["responses"] | {200: streamed}}

    @app.post("/v1/chat/completions", response_model=ChatReply, **chat_declared)
    async def complete(body: ChatRequest, request: Request) -> Any:
        service.take(body)
        streaming = False
        try:
            work: Coroutine[Any, Any, Any] = service.prompt(body) if body.stream else service.whole(body)
            asked, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(request))
            await asyncio.wait({asked, gone}, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if not asked.done():
                asked.cancel()
                raise Refusal(499, "the client is gone")
            if not body.stream:
                return JSONResponse(asked.result())
            events = service.events(body, asked.result())
            first = await anext(events)  # from here on the generator frees the place, also if nobody reads it
            streaming = True

            async def stream() -> AsyncIterator[str]:
                yield first
                async for other in events:
                    yield other

            return StreamingResponse(stream(), media_type="text/event-stream")
        except Refusal as refusal:
            service.counters.add("withdrawn" if refusal.status == 499 else "failed")
            raise
        finally:
            if not streaming:
                service.open -= body.n or 1

    return app

"""A model behind an OpenAI-compatible API.

    POST /v1/chat/completions   pictures, videos and sounds as content parts; n, stop, seed, streaming, log-probs, token ids
    GET  /v1/models             the one model
    GET  /health, /metrics

Statuses: 400 what cannot be answered, and why; 401 no key; 404 another model; 413 too large; 503 busy (with Retry-After).

The engine runs in a thread with an event loop of its own, and batches all requests that are open; they join and leave the
batch between tokens. A client that stops waiting withdraws its request. A repeated prompt is computed once (prefix cache).
Text is tokenized in threads of its own, so that no answer waits for it, and only if the tokens can fit: a token has a
bounded number of bytes, so 10 MB of text cannot be 8,192 tokens, which is known without counting them.
"""

import asyncio
import itertools
import secrets
import time
import unicodedata
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from sensorium import __version__
from sensorium.cluster.event_loop import LoopThread
from sensorium.data.media_store import MediaStore
from sensorium.engines.native.native_engine import NativeEngine
from sensorium.engines.protocol import Request, Sampling, response_key
from sensorium.models.policy import Policy
from sensorium.rollout.live import Preparation, media_of
from sensorium.services.application import BodyLimit, Counters, Json, Refusal, make_application, sweeping, until_gone
from sensorium.services.chat import ChatRequest, Choice, ReplyShape, WrittenText, conversation, error_body, event
from sensorium.vocabulary.content import Message
from sensorium.vocabulary.episode import Segment
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
# Receives further tokens of a choice and their log-probs, in the engine's thread.
Heard = Callable[[Choice, Sequence[int], Sequence[float]], None]
RENDERERS = 4  # threads that tokenize: short texts pass a long one, which takes seconds


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation, and its tokens as the language model sees them."""

    segment: Segment
    tokens: tuple[int, ...]


async def _refusing(work: "asyncio.Future[Any]") -> Any:
    """The result of work on a request; an error in the request refuses it."""
    try:
        return await work
    except SensoriumError as error:
        raise Refusal(400, str(error)) from error


class ModelHost:
    """A policy, its engine, and the thread they work in. ``most_context`` bounds prompt and answer together."""

    def __init__(self, policy: Policy, most_context: int, max_rows: int = 256) -> None:
        self.policy, self.chat = policy, policy.chat
        self.most_context = min(most_context, policy.model.config.get_text_config().max_position_embeddings)
        self.engine = NativeEngine(policy, lockstep=False, max_context=self.most_context, max_rows=max_rows)
        self._ready = Preparation(self.chat)
        self._renderers = ThreadPoolExecutor(RENDERERS, "renderer")
        self._numbers = itertools.count()
        self._thread = LoopThread("engine")

    async def prompt(self, messages: Sequence[Message]) -> Prompt:
        """Messages rendered and their media prepared; refused where they leave no room for an answer."""
        loop = asyncio.get_running_loop()
        segment: Segment = await _refusing(loop.run_in_executor(self._renderers, self._rendered, messages))

        async def prepared() -> Prompt:
            await self._ready(span.media for span in segment.media)
            tokens = tuple(self.chat.layout(segment).ids_T.tolist())
            self._refuse_long(len(tokens))
            return Prompt(segment, tokens)

        prompt: Prompt = await self._there(prepared())
        return prompt

    async def answer(
        self, prompt: Prompt, sampling: Sampling, seed: int, count: int, heard: Heard | None = None
    ) -> list[Choice]:
        """``count`` answers to a prompt, sampled by a seed. ``heard`` gets their tokens as they are written."""
        room = self.most_context - len(prompt.tokens)
        sampling = replace(sampling, max_new_tokens=min(room, sampling.max_new_tokens))

        async def answers() -> list[Choice]:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(prompt, sampling, seed, index, heard)) for index in range(count)]
            return [task.result() for task in tasks]

        found: list[Choice] = await self._there(answers())
        return found

    def close(self) -> None:
        self._renderers.shutdown(wait=False, cancel_futures=True)
        self._thread.close(30)
        self.engine.close()
        self.chat.decoder.close()

    async def _there(self, work: Any) -> Any:
        return await _refusing(asyncio.wrap_future(self._thread.submit(work)))

    def _rendered(self, messages: Sequence[Message]) -> Segment:
        """Messages as tokens, where these can fit."""
        for medium in media_of(messages):
            if medium.kind not in self.chat.modalities:
                able = ", ".join(sorted(self.chat.modalities))
                raise Refusal(400, f"this model takes no {medium.kind}; it takes {able}.")
        characters = sum(len(message.text) for message in messages)
        if 4 * characters > self.most_context * self.chat.longest_token:  # it may be too long: look closer
            texts = (unicodedata.normalize("NFC", message.text) for message in messages)
            size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
            self._refuse_long(size // self.chat.longest_token, "at least ")
        segment = self.chat.render(messages)
        self._refuse_long(len(segment.tokens))
        return segment

    def _refuse_long(self, count: int, least: str = "") -> None:
        if count >= self.most_context:
            raise Refusal(
                400, f"the prompt has {least}{count} tokens and this server holds {self.most_context} with the answer."
            )

    async def _one(self, prompt: Prompt, sampling: Sampling, seed: int, index: int, heard: Heard | None) -> Choice:
        number = next(self._numbers)
        thread, choice = f"request {number}", Choice(index)
        request = Request(thread, (prompt.segment,), sampling, (number,), response_key(seed, 0, "serve", index, 0), thread)
        watching = asyncio.create_task(self._watch(thread, choice, heard)) if heard is not None else None
        try:
            response = await self.engine.generate(request)
        finally:
            self.engine.release(thread)
            if watching is not None:
                watching.cancel()
        new = len(choice.tokens)
        choice.tokens, choice.logprobs = list(response.segment.tokens), list(response.segment.logprobs)
        choice.finish = response.finish
        if heard is not None:
            heard(choice, choice.tokens[new:], choice.logprobs[new:])
        return choice

    async def _watch(self, thread: str, choice: Choice, heard: Heard) -> None:
        """Report new tokens after each tick; the engine yields then."""
        while True:
            tokens, logprobs = self.engine.written_so_far(thread)
            new = len(choice.tokens)
            if len(tokens) > new:
                choice.tokens, choice.logprobs = list(tokens), list(logprobs)
                heard(choice, choice.tokens[new:], choice.logprobs[new:])
            await asyncio.sleep(0)


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
    async def complete(body: ChatRequest, request: HttpRequest) -> Any:
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

"""The client of judges: from the cache, from an equal question that is open, or by asking an endpoint.

    client = JudgeClient(recipe.judges, store, run_directory)
    message = untrusted_message("Is {text} true? …", text=caption)
    answer = await client.ask(JudgeRequest("judge", (message,), "truth/1", form))
    answer.value                    # as the form reads it; JudgeFailure where there is none: a missing score, never a 0

Invariants: one judgement is asked for once at a time, in all processes that share the cache. Every wait is bounded by
``total_deadline_s``. Only answers in their form are kept. All of it runs in an event loop of its own thread, so ``ask`` may
be awaited in any loop, and a question that its asker no longer waits for is still answered into the cache.
"""

import asyncio
import random
import threading
import time
import uuid
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from sensorium.judges.asking import ModelAsker
from sensorium.judges.cache import AnswerCache, StoredAnswer
from sensorium.judges.claim_owners import owner_name
from sensorium.judges.counts import JudgeMeter
from sensorium.judges.endpoint_pool import EndpointPool
from sensorium.judges.endpoints import Endpoint, endpoints_of
from sensorium.judges.limits import SharedLimits
from sensorium.judges.request import JudgeAnswer, JudgeRequest
from sensorium.judges.transcripts import Transcripts
from sensorium.judges.transport import Transport, refuse_without_client
from sensorium.media.store import MediaStore
from sensorium.recipe.judge_section import JudgesSection
from sensorium.record.judge_transcripts import TRANSCRIPTS
from sensorium.vocabulary.errors import JudgeFailure, JudgeOffline, JudgeRefusal, RecordError, UnknownJudge, nearest
from sensorium.vocabulary.secrets import masked

T = TypeVar("T")
POLL_S = 0.05
LEASE_S = 60.0
"""How long the claim of a process that died on another machine keeps others from asking."""
CACHE, LIMITS = "judges.sqlite", "judge_limits.sqlite"


class JudgeClient:
    """Asks judges. ``folder`` is the run directory; without one nothing outlives the process but ``section.cache``."""

    def __init__(self, section: JudgesSection, store: MediaStore | None = None, folder: Path | None = None) -> None:
        self.section, self.store = section, store
        kept = section.cache or (folder / CACHE if folder is not None else None)
        self.cache = AnswerCache(kept, read_only=section.offline)
        self.transcripts = Transcripts(folder / TRANSCRIPTS if folder is not None else None)
        self.meter = JudgeMeter(section.prices)
        self._owner = owner_name(uuid.uuid4().hex[:12])
        self._limits = self._shared_limits(folder)
        self._transport = Transport()
        self._askers: dict[str, ModelAsker] = {}
        self._running: dict[str, asyncio.Task[JudgeAnswer]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()
        self._random = random.Random()
        self._closed = False

    @cached_property
    def endpoints(self) -> dict[str, tuple[Endpoint, ...]]:
        """Endpoints by model name; read when a judge is first asked for."""
        return endpoints_of(self.section)

    def refuse_unknown(self, model: str) -> None:
        """Refuse a model that has no endpoint, unless the run is offline."""
        if self.section.offline:
            return
        if model not in self.endpoints:
            where = nearest(model, list(self.endpoints)) if self.endpoints else "; no endpoint is configured at all."
            raise UnknownJudge(
                f"judges: there is no endpoint for the model '{model}'{where} Name it in judges.endpoints, in the file of "
                "judges.config, in the one that M3_API_CONFIG names, or in configs/api_config.json."
            )
        refuse_without_client()

    def refuse_without_keys(self, model: str) -> None:
        """Refuse a model with an endpoint whose key is not where it should be, unless the run is offline."""
        if not self.section.offline:
            for endpoint in self.endpoints.get(model, ()):
                endpoint.secret()

    async def ask(self, request: JudgeRequest, *, about: tuple[str, ...] = (), term: str = "") -> JudgeAnswer:
        """The answer to a question; ``about`` are the ids of the episodes it is asked for. Awaitable in any event loop."""
        return await asyncio.wrap_future(self._submit(self._ask(request, about, term)))

    def ask_now(self, request: JudgeRequest, *, about: tuple[str, ...] = (), term: str = "") -> JudgeAnswer:
        """The same for who has no event loop."""
        return self._submit(self._ask(request, about, term)).result()

    def take_metrics(self) -> dict[str, float]:
        """What judges cost since the last call."""
        return self.meter.take_metrics()

    def close(self) -> None:
        """End the calls that are open, and close connections and files."""
        with self._starting:
            self._closed = True
            loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._end(), loop).result(timeout=10)
            loop.call_soon_threadsafe(loop.stop)
        self.cache.close()
        self.transcripts.close()

    async def _ask(self, request: JudgeRequest, about: tuple[str, ...], term: str) -> JudgeAnswer:
        key = request.key
        answer = self._known(request)
        if answer is not None:
            self.meter.of(answer.model).cache_hits += 1
        elif self.section.offline:
            raise JudgeOffline(self._lacks(request))
        else:
            self.refuse_unknown(request.model)
            joined = key in self._running
            if not joined:
                self._running[key] = asyncio.create_task(self._judged(request))
                self._running[key].add_done_callback(lambda _: self._running.pop(key, None))
            try:
                answer = await asyncio.shield(self._running[key])
            except JudgeFailure as failure:
                self.transcripts.keep_failure(about, term, request, f"(no answer: {failure})")
                raise
            if joined:
                self.meter.of(answer.model).cache_hits += 1
        self.transcripts.keep(about, term, request.asked_of(answer.model), answer.text)
        return answer

    async def _judged(self, request: JudgeRequest) -> JudgeAnswer:
        """Claim the question, ask the model and then those that may stand in for it."""
        total_s = self.section.total_deadline_s
        until = time.monotonic() + total_s
        while not await asyncio.to_thread(self.cache.claim, request.key, self._owner, LEASE_S):
            await asyncio.sleep(POLL_S * (1 + self._random.random()))
            if (answer := self._known(request)) is not None:
                self.meter.of(answer.model).cache_hits += 1
                return answer
            if time.monotonic() > until:
                raise JudgeFailure(f"judge '{request.model}': another process has asked this for more than {total_s:g} s")
        renewing = asyncio.create_task(self._renewed(request.key))
        try:
            if (answer := self._known(request)) is not None:  # it was answered between the look and the claim
                self.meter.of(answer.model).cache_hits += 1
                return answer
            return await self._first_answer(request, until)
        finally:
            renewing.cancel()
            await asyncio.to_thread(self.cache.release, request.key, self._owner)

    async def _renewed(self, key: str) -> None:
        """Renew a claim for as long as its question is open."""
        while True:
            await asyncio.sleep(LEASE_S / 4)
            await asyncio.to_thread(self.cache.renew, key, self._owner, LEASE_S)

    async def _first_answer(self, request: JudgeRequest, until: float) -> JudgeAnswer:
        problems: list[JudgeFailure] = []
        models = self._models(request)
        for place, model in enumerate(models):
            left = until - time.monotonic()
            share = time.monotonic() + left / (len(models) - place)
            asked = request.asked_of(model)
            try:
                self.refuse_unknown(model)
                kept = await self._asker(model).ask(asked, share)
            except JudgeFailure as failure:
                self.meter.of(model).failures += 1
                problems.append(failure)
                continue
            return self._read(asked, kept, cached=False)
        told = "; then ".join(map(str, problems))
        raise (JudgeRefusal if all(isinstance(p, JudgeRefusal) for p in problems) else JudgeFailure)(told)

    def _known(self, request: JudgeRequest) -> JudgeAnswer | None:
        """The answer of the cache: the model's own, or of one that stood in for it."""
        for model in self._models(request):
            asked = request.asked_of(model)
            stored = self.cache.get(asked.key)
            if stored is not None:
                return self._read(asked, stored, cached=True)
        return None

    def _read(self, request: JudgeRequest, stored: StoredAnswer, *, cached: bool) -> JudgeAnswer:
        try:
            value = masked(request.form.parse(stored.text), self._transport.secrets)
        except ValueError as error:
            raise RecordError(
                f"the file of judgements '{self.cache.path}' holds an answer that is not in its form ({error}; prompt "
                f"{request.prompt}, key {request.key}). Only answers in their form are kept, so it was damaged or changed: "
                "move it away, and judgements are asked for again."
            ) from error
        return JudgeAnswer(value, stored.text, request.model, request.key, cached)

    def _models(self, request: JudgeRequest) -> tuple[str, ...]:
        return (request.model, *self.section.fallbacks.get(request.model, ()))

    def _asker(self, model: str) -> ModelAsker:
        if model not in self._askers:
            pool = EndpointPool(self.endpoints[model])
            self._askers[model] = ModelAsker(
                self.section, pool, self._transport, self._limits, self.cache, self.meter, self.store, self._gate()
            )
        return self._askers[model]

    def _gate(self) -> asyncio.Semaphore:
        if not hasattr(self, "_calls"):
            self._calls = asyncio.Semaphore(self.section.concurrency)
        return self._calls

    def _lacks(self, request: JudgeRequest) -> str:
        return (
            f"judges.offline: the cache '{self.cache.path}' has no answer of '{request.model}' to this question (prompt "
            f"{request.prompt}, key {request.key}). The run is not the one that filled the cache: another prompt, model, "
            "policy or seed. Set judges.offline: false to ask, or name the cache that has it (judges.cache)."
        )

    def _shared_limits(self, folder: Path | None) -> SharedLimits | None:
        requests, tokens = self.section.requests_per_minute, self.section.tokens_per_minute
        if not requests and not tokens:
            return None
        if self.section.limits is not None:
            self.section.limits.parent.mkdir(parents=True, exist_ok=True)
            return SharedLimits(self.section.limits, requests, tokens)
        if folder is None:
            import tempfile

            folder = Path(tempfile.mkdtemp(prefix="sensorium_judges_"))
        return SharedLimits(folder / LIMITS, requests, tokens)

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        with self._starting:
            if self._closed:
                coroutine.close()
                raise JudgeFailure("the client of judges is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._serve, args=(self._loop,), name="judges", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    @staticmethod
    def _serve(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.close()

    async def _end(self) -> None:
        running = [*self._running.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._transport.close()

"""The client of judges: from the cache, from an equal question that is open, or by asking an endpoint."""

import asyncio
import random
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from sensorium.data.media_store import MediaStore
from sensorium.recipe.schema import JudgesSection, PriceSection
from sensorium.rewards.judges.cache import AnswerCache, CallRow, StoredAnswer, owner_name
from sensorium.rewards.judges.endpoints import Endpoint, EndpointHealth, EndpointPool, SharedLimits, endpoints_of
from sensorium.rewards.judges.request import JudgeAnswer, JudgeRequest, neutral, shortened
from sensorium.rewards.judges.transcripts import Transcripts
from sensorium.rewards.judges.transport import (
    CallProblem,
    Reply,
    Transport,
    estimated_tokens,
    refuse_without_client,
    wire_messages,
)
from sensorium.runs.episodes import TRANSCRIPTS
from sensorium.vocabulary.errors import (
    JudgeFailure,
    JudgeOffline,
    JudgeRefusal,
    MediaError,
    RecordError,
    UnknownJudge,
    nearest,
)
from sensorium.vocabulary.plain import shown
from sensorium.vocabulary.secrets import masked


@dataclass
class JudgeCounts:
    """One model since the counts were last taken."""

    calls: int = 0
    cache_hits: int = 0
    retries: int = 0
    malformed: int = 0
    failures: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0


class JudgeMeter:
    """Counts by model name, under the phase that is measured now: ``judge/MODEL/calls``, ``eval/judge/MODEL/calls``."""

    def __init__(self, prices: Mapping[str, PriceSection]) -> None:
        self._prices = prices
        self._phase = ""
        self._counts: dict[tuple[str, str], JudgeCounts] = defaultdict(JudgeCounts)

    def of(self, model: str) -> JudgeCounts:
        """The counts of a model."""
        return self._counts[self._phase, model]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what is asked inside the block under ``name/judge/…``."""
        before, self._phase = self._phase, f"{name}/"
        try:
            yield
        finally:
            self._phase = before

    def take_metrics(self) -> dict[str, float]:
        """Rows for the metrics since the last call; names of models have '.' for '/'."""
        taken, self._counts = self._counts, defaultdict(JudgeCounts)
        row: dict[str, float] = {}
        for (phase, model), counted in sorted(taken.items()):
            name = f"{phase}judge/{model.replace('/', '.')}"
            price = self._prices.get(model, PriceSection())
            row[f"{name}/calls"] = counted.calls
            row[f"{name}/cache_hits"] = counted.cache_hits
            row[f"{name}/retries"] = counted.retries
            row[f"{name}/malformed"] = counted.malformed
            row[f"{name}/failures"] = counted.failures
            row[f"{name}/input_tokens"] = counted.input_tokens
            row[f"{name}/output_tokens"] = counted.output_tokens
            row[f"{name}/cost"] = (counted.input_tokens * price.input + counted.output_tokens * price.output) / 1e6
            if counted.calls:
                row[f"{name}/latency_mean_s"] = counted.seconds / counted.calls
                row[f"{name}/latency_max_s"] = counted.longest_s
        return row


# Example: the first endpoint answers 503, so the second is asked at once; it answers "Sure!", which is not the JSON
# that was asked for, so it is told what is wrong and asked again; it answers {"score": 1}, and that is the answer.
# Three calls are on record: 503, malformed, answered.


FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
USUAL_TOKENS = 512


@dataclass(frozen=True)
class MalformedReply:
    """A judge's text that is not in the form asked for, and what is wrong with it."""

    text: str
    problem: str


class ModelAsker:
    """Asks one model through its endpoints. Lives in one event loop."""

    def __init__(
        self,
        section: JudgesSection,
        pool: EndpointPool,
        transport: Transport,
        limits: SharedLimits | None,
        cache: AnswerCache,
        meter: JudgeMeter,
        store: MediaStore | None,
        gate: asyncio.Semaphore,
    ) -> None:
        self.section, self.pool, self.transport, self.limits = section, pool, transport, limits
        self.cache, self.meter, self.store, self.gate = cache, meter, store, gate
        self._without_schema: set[str] = set()
        """Places whose endpoints refused a JSON schema; they are asked for JSON in words alone."""
        self._random = random.Random()

    async def ask(self, request: JudgeRequest, until: float) -> StoredAnswer:
        """An answer in its form before ``until``, as the cache keeps it; JudgeFailure says why there is none."""
        try:
            messages = await asyncio.to_thread(wire_messages, request.messages, self.store, request.video)
        except MediaError as error:
            raise JudgeRefusal(f"judge '{request.model}' cannot be shown a medium: {error}") from error
        counted, talk, failures, malformed = self.meter.of(request.model), messages, 0, 0
        while True:
            found = await self._called(request, talk, until)
            counted.calls += 1
            if isinstance(found, StoredAnswer):
                return found
            if isinstance(found, MalformedReply):
                malformed += 1
                counted.malformed += 1
                if malformed > self.section.malformed_retries:
                    raise JudgeFailure(
                        f"judge '{request.model}' answered {malformed} times not as asked: {found.problem}; the last time "
                        f"it said {shown(found.text)}"
                    )
                talk = [*messages, *_sent_back(found.text, found.problem)]
            elif found.again:
                failures += 1
                counted.retries += 1
                if failures > self.section.retries:
                    raise JudgeFailure(
                        f"judge '{request.model}' gave no answer in {failures} calls; the last: {found.reason}"
                    )
                if (found.rest_s is None and self.pool.next()[0] is None) or len(self.pool.members) == 1:
                    wait = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (failures - 1)) * (0.5 + self._random.random())
                    await self._sleep(wait if found.rest_s is None else 0.0, until, request, found.reason)
            elif found.schema:
                self._without_schema.add(found.place)
            elif found.key:
                if self.pool.next()[1] == float("inf"):
                    raise JudgeRefusal(f"judge '{request.model}': {found.reason}")
            else:
                self._without_schema.discard(found.place)  # it refused without a schema too: that was not the cause
                raise JudgeRefusal(f"judge '{request.model}': {found.reason}")

    async def _called(
        self, request: JudgeRequest, talk: list[dict[str, Any]], until: float
    ) -> StoredAnswer | MalformedReply | CallProblem:
        """One call, on record, when the limits and an endpoint allow it."""
        estimated = estimated_tokens(talk, int(request.parameters.get("max_tokens", USUAL_TOKENS)))
        if self.limits is not None:
            wait = await asyncio.to_thread(self.limits.take, request.model, estimated)
            if time.monotonic() + wait > until:
                await asyncio.to_thread(self.limits.give_back, request.model, estimated)
                raise JudgeFailure(
                    f"judge '{request.model}': its limit a minute leaves no call within {self.section.total_deadline_s:g} s"
                )
            await asyncio.sleep(wait)
        async with self.gate:
            member = await self._endpoint(request, until)
            self.pool.begin(member)
            started, found = time.monotonic(), None
            taken = self.section.structured == "auto" and member.endpoint.place not in self._without_schema
            schema = request.form.schema() if taken else None
            deadline = max(0.001, min(self.section.deadline_s, until - started))
            try:
                found = await self.transport.call(member.endpoint, talk, dict(request.parameters), schema, deadline)
            finally:
                self._ended(member, found)
        return await self._put_on_record(request, member, found, time.monotonic() - started, estimated)

    def _ended(self, member: EndpointHealth, found: Reply | CallProblem | None) -> None:
        if isinstance(found, Reply) or found is None:
            self.pool.answered(member)
        elif found.again:
            self.pool.failed(member, found.rest_s)
        else:
            self.pool.refused(member, found.reason if found.key else "")

    async def _endpoint(self, request: JudgeRequest, until: float) -> EndpointHealth:
        """The endpoint to ask, once one may be asked."""
        while True:
            member, wait = self.pool.next()
            if member is not None:
                return member
            refused = [one.refused_key for one in self.pool.members if one.refused_key]
            if wait == float("inf"):
                raise JudgeRefusal(f"judge '{request.model}': {refused[-1]}")
            await self._sleep(wait * (1 + 0.1 * self._random.random()), until, request, "its endpoints rest after failures")

    async def _sleep(self, seconds: float, until: float, request: JudgeRequest, reason: str) -> None:
        """Wait, unless that would be too long."""
        if time.monotonic() + seconds > until:
            raise JudgeFailure(
                f"judge '{request.model}' gave no answer within {self.section.total_deadline_s:g} s in all: {reason}"
            )
        await asyncio.sleep(seconds)

    async def _put_on_record(
        self, request: JudgeRequest, member: EndpointHealth, found: Reply | CallProblem, seconds: float, estimated: int
    ) -> StoredAnswer | MalformedReply | CallProblem:
        """Count a call and keep its row; that of a good answer together with the answer."""
        counted = self.meter.of(request.model)
        counted.seconds += seconds
        counted.longest_s = max(counted.longest_s, seconds)
        if isinstance(found, CallProblem):
            await self._log(request, member, found.outcome, (0, 0), seconds)
            return found
        tokens = (found.input_tokens, found.output_tokens)
        counted.input_tokens += tokens[0]
        counted.output_tokens += tokens[1]
        if self.limits is not None and tokens != (0, 0):
            await asyncio.to_thread(self.limits.settle, request.model, estimated, sum(tokens))
        problem = _problem_of(request, found.text)
        if problem:
            await self._log(request, member, "malformed", tokens, seconds)
            return MalformedReply(found.text, problem)
        answer = StoredAnswer(found.text, request.model, *tokens)
        row = CallRow(request.key, request.model, member.endpoint.place, "answered", *tokens, seconds)
        return await asyncio.to_thread(self.cache.put, request.key, request.prompt, answer, row)

    async def _log(
        self, request: JudgeRequest, member: EndpointHealth, outcome: str, tokens: tuple[int, int], seconds: float
    ) -> None:
        row = CallRow(request.key, request.model, member.endpoint.place, outcome, *tokens, seconds)
        await asyncio.to_thread(self.cache.log, row)


def _problem_of(request: JudgeRequest, text: str) -> str:
    """What is wrong with an answer; empty if it is in its form."""
    try:
        request.form.parse(text)
    except ValueError as error:
        return str(error)
    return ""


def _sent_back(text: str, problem: str) -> list[dict[str, Any]]:
    """The answer as the judge gave it, and what is wrong with it."""
    return [
        {"role": "assistant", "content": neutral(shortened(text, 2000)) or "(nothing)"},
        {
            "role": "user",
            "content": f"This answer cannot be used: {problem}. Answer again, in the form asked for and no other.",
        },
    ]


# client = JudgeClient(recipe.judges, store, run_directory) message = untrusted_message("Is {text} true? …",
# text=caption) answer = await client.ask(JudgeRequest("judge", (message,), "truth/1", form)) answer.value # as the form
# reads it; JudgeFailure where there is none: a missing score, never a 0 Invariants: one judgement is asked for once at
# a time, in all processes that share the cache. Every wait is bounded by ``total_deadline_s``. Only answers in their
# form are kept. All of it runs in an event loop of its own thread, so ``ask`` may be awaited in any loop, and a
# question that its asker no longer waits for is still answered into the cache.


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

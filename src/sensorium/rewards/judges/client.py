"""The client of judges: answers from the cache, from an equal question that is open, or by asking an endpoint.

    client = JudgeClient(recipe.judges, store, run_directory)
    message = untrusted_message("Is {text} true? …", text=caption)
    answer = await client.ask(JudgeRequest("judge", (message,), "truth/1", form))
    answer.value                    # as the form reads it; JudgeFailure (a missing score, never a 0) where there is none

One question may take several calls: the first endpoint answers 503, so the second is asked at once; it answers "Sure!",
which is not the JSON asked for, so it is asked again with the problem; it answers {"score": 1}. Three calls are recorded:
503, malformed, answered.
"""

import asyncio
import random
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from sensorium.cluster.event_loop import LoopThread
from sensorium.data.media_store import MediaStore
from sensorium.recipe.schema import JudgesSection, PriceSection
from sensorium.rewards.judges.judgements import (
    AnswerCache,
    CallRow,
    JudgeAnswer,
    JudgeRequest,
    StoredAnswer,
    neutral,
    owner_name,
    shortened,
)
from sensorium.rewards.judges.transport import (
    CallProblem,
    Endpoint,
    EndpointHealth,
    EndpointPool,
    Reply,
    SharedLimits,
    Transport,
    endpoints_of,
    estimated_tokens,
    refuse_without_client,
    wire_messages,
)
from sensorium.runs.episodes import TRANSCRIPTS, Transcripts
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

T = TypeVar("T")
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
USUAL_TOKENS = 512
POLL_S = 0.05
LEASE_S = 60.0  # how long the claim of a process that died on another machine keeps others from asking
CACHE, LIMITS = "judges.sqlite", "judge_limits.sqlite"


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
        return self._counts[self._phase, model]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count questions inside the block under ``name/judge/…``."""
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
            for count in ("calls", "cache_hits", "retries", "malformed", "failures", "input_tokens", "output_tokens"):
                row[f"{name}/{count}"] = getattr(counted, count)
            row[f"{name}/cost"] = (counted.input_tokens * price.input + counted.output_tokens * price.output) / 1e6
            if counted.calls:
                row[f"{name}/latency_mean_s"] = counted.seconds / counted.calls
                row[f"{name}/latency_max_s"] = counted.longest_s
        return row


class ModelAsker:
    """Asks one model through its endpoints. Lives in the client's event loop."""

    def __init__(self, client: "JudgeClient", pool: EndpointPool) -> None:
        self.client, self.section, self.pool = client, client.section, pool
        self._without_schema: set[str] = set()  # places that refused a JSON schema; their prompts alone ask for JSON
        self._random = random.Random()

    async def ask(self, request: JudgeRequest, until: float) -> StoredAnswer:
        """An answer in its form before ``until``, as the cache keeps it; JudgeFailure says why there is none."""
        judge = f"judge '{request.model}'"
        try:
            messages = await asyncio.to_thread(wire_messages, request.messages, self.client.store, request.video)
        except MediaError as error:
            raise JudgeRefusal(f"{judge} cannot be shown a medium: {error}") from error
        counted, talk, failures, malformed = self.client.meter.of(request.model), messages, 0, 0
        while True:
            found = await self._call(request, talk, until)
            counted.calls += 1
            if isinstance(found, StoredAnswer):
                return found
            if found.outcome == "malformed":
                malformed += 1
                counted.malformed += 1
                if malformed > self.section.malformed_retries:
                    raise JudgeFailure(
                        f"{judge} answered {malformed} times not as asked: {found.reason}; its last answer: "
                        f"{shown(found.text)}"
                    )
                advice = f"This answer cannot be used: {found.reason}. Answer again, in the form asked for and no other."
                answer = neutral(shortened(found.text, 2000)) or "(nothing)"
                talk = [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": advice}]
            elif found.again:
                failures += 1
                counted.retries += 1
                if failures > self.section.retries:
                    raise JudgeFailure(f"{judge} gave no answer in {failures} calls; the last: {found.reason}")
                if (found.rest_s is None and self.pool.next()[0] is None) or len(self.pool.members) == 1:
                    wait = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (failures - 1)) * (0.5 + self._random.random())
                    await self._sleep(wait if found.rest_s is None else 0.0, until, request, found.reason)
            elif found.schema:
                self._without_schema.add(found.place)
            elif not found.key:
                self._without_schema.discard(found.place)  # it refused without a schema too: that was not the cause
                raise JudgeRefusal(f"{judge}: {found.reason}")
            elif self.pool.next()[1] == float("inf"):
                raise JudgeRefusal(f"{judge}: {found.reason}")

    async def _call(self, request: JudgeRequest, talk: list[dict[str, Any]], until: float) -> StoredAnswer | CallProblem:
        """One recorded call, as soon as the limits and an endpoint allow it."""
        limits = self.client.limits
        estimated = estimated_tokens(talk, int(request.parameters.get("max_tokens", USUAL_TOKENS)))
        if limits is not None:
            wait = await asyncio.to_thread(limits.take, request.model, estimated)
            if time.monotonic() + wait > until:
                await asyncio.to_thread(limits.give_back, request.model, estimated)
                raise JudgeFailure(
                    f"judge '{request.model}': its limit a minute leaves no call within {self.section.total_deadline_s:g} s"
                )
            await asyncio.sleep(wait)
        async with self.client.gate:
            member = await self._endpoint(request, until)
            self.pool.begin(member)
            started, found = time.monotonic(), None
            takes_schema = self.section.structured == "auto" and member.endpoint.place not in self._without_schema
            schema = request.form.schema() if takes_schema else None
            deadline = max(0.001, min(self.section.deadline_s, until - started))
            try:
                found = await self.client.transport.call(member.endpoint, talk, dict(request.parameters), schema, deadline)
            finally:
                if not isinstance(found, CallProblem):
                    self.pool.answered(member)
                elif found.again:
                    self.pool.failed(member, found.rest_s)
                else:
                    self.pool.refused(member, found.reason if found.key else "")
        return await self._record(request, member, found, time.monotonic() - started, estimated)

    async def _endpoint(self, request: JudgeRequest, until: float) -> EndpointHealth:
        """The endpoint to ask, once one may be asked."""
        while True:
            member, wait = self.pool.next()
            if member is not None:
                return member
            if wait == float("inf"):
                refused = [one.refused_key for one in self.pool.members if one.refused_key]
                raise JudgeRefusal(f"judge '{request.model}': {refused[-1]}")
            await self._sleep(wait * (1 + 0.1 * self._random.random()), until, request, "its endpoints rest after failures")

    async def _sleep(self, seconds: float, until: float, request: JudgeRequest, reason: str) -> None:
        if time.monotonic() + seconds > until:
            raise JudgeFailure(
                f"judge '{request.model}' gave no answer within {self.section.total_deadline_s:g} s in all: {reason}"
            )
        await asyncio.sleep(seconds)

    async def _record(
        self, request: JudgeRequest, member: EndpointHealth, found: Reply | CallProblem, seconds: float, estimated: int
    ) -> StoredAnswer | CallProblem:
        """Count a call and keep its row; that of a good answer together with the answer."""
        counted = self.client.meter.of(request.model)
        counted.seconds += seconds
        counted.longest_s = max(counted.longest_s, seconds)
        problem, tokens = None if isinstance(found, Reply) else found, (0, 0)
        if isinstance(found, Reply):
            tokens = (found.input_tokens, found.output_tokens)
            counted.input_tokens += tokens[0]
            counted.output_tokens += tokens[1]
            if self.client.limits is not None and tokens != (0, 0):
                await asyncio.to_thread(self.client.limits.settle, request.model, estimated, sum(tokens))
            try:
                request.form.parse(found.text)
            except ValueError as error:
                problem = CallProblem(str(error), "malformed", text=found.text)
            if request.whole and found.cut:
                problem = CallProblem("its answer was cut off at max_tokens", "cut", again=False)
        outcome = "answered" if problem is None else problem.outcome
        row = CallRow(request.key, request.model, member.endpoint.place, outcome, *tokens, seconds)
        if problem is not None:
            await asyncio.to_thread(self.client.cache.log, row)
            return problem
        assert isinstance(found, Reply)
        answer = StoredAnswer(found.text, request.model, *tokens)
        return await asyncio.to_thread(self.client.cache.put, request.key, request.prompt, answer, row)


class JudgeClient:
    """Asks judges. ``folder`` is the run directory; without one nothing outlives the process but ``section.cache``.

    Invariants: one judgement is asked for once at a time, in all processes that share the cache. Every wait is bounded by
    ``total_deadline_s``. Only answers in their form are kept. It runs in an event loop of its own thread, so ``ask`` may
    be awaited in any loop, and a question that its asker no longer waits for is still answered into the cache.
    """

    def __init__(self, section: JudgesSection, store: MediaStore | None = None, folder: Path | None = None) -> None:
        self.section, self.store = section, store
        self.cache = AnswerCache(section.cache or (folder / CACHE if folder else None), read_only=section.offline)
        self.transcripts = Transcripts(folder / TRANSCRIPTS if folder else None)
        self.meter = JudgeMeter(section.prices)
        self.limits: SharedLimits | None = None
        if section.requests_per_minute or section.tokens_per_minute:
            if section.limits is not None:
                section.limits.parent.mkdir(parents=True, exist_ok=True)
            path = section.limits or (folder or Path(tempfile.mkdtemp(prefix="sensorium_judges_"))) / LIMITS
            self.limits = SharedLimits(path, section.requests_per_minute, section.tokens_per_minute)
        self.transport = Transport()
        self.gate = asyncio.Semaphore(section.concurrency)
        self._owner = owner_name(uuid.uuid4().hex[:12])
        self._askers: dict[str, ModelAsker] = {}
        self._running: dict[str, asyncio.Task[JudgeAnswer]] = {}
        self._thread: LoopThread | None = None
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
        """The same without an event loop."""
        return self._submit(self._ask(request, about, term)).result()

    def take_metrics(self) -> dict[str, float]:
        return self.meter.take_metrics()

    def close(self) -> None:
        """Cancel open calls, and close connections and files."""

        async def end() -> None:
            running = [*self._running.values()]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await self.transport.close()

        with self._starting:
            self._closed = True
            thread, self._thread = self._thread, None
        try:
            if thread is not None:
                thread.submit(end()).result(timeout=10)
        finally:
            if thread is not None:
                thread.close()
            self.cache.close()
            self.transcripts.close()

    async def _ask(self, request: JudgeRequest, about: tuple[str, ...], term: str) -> JudgeAnswer:
        key = request.key
        answer = self._cached(request)
        if answer is None and self.section.offline:
            raise JudgeOffline(
                f"judges.offline: the cache '{self.cache.path}' has no answer of '{request.model}' to this question "
                f"(prompt {request.prompt}, key {key}). The run is not the one that filled the cache: another prompt, "
                "model, policy or seed. Set judges.offline: false to ask, or name the cache that has it (judges.cache)."
            )
        if answer is None:
            self.refuse_unknown(request.model)
            joined = key in self._running
            if not joined:
                self._running[key] = asyncio.create_task(self._judge(request))
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

    async def _judge(self, request: JudgeRequest) -> JudgeAnswer:
        """Claim the question, then ask the model and after it its fallbacks."""
        total_s = self.section.total_deadline_s
        until = time.monotonic() + total_s
        while not await asyncio.to_thread(self.cache.claim, request.key, self._owner, LEASE_S):
            await asyncio.sleep(POLL_S * (1 + self._random.random()))
            if (answer := self._cached(request)) is not None:
                return answer
            if time.monotonic() > until:
                raise JudgeFailure(f"judge '{request.model}': another process has asked this for more than {total_s:g} s")
        renewing = asyncio.create_task(self._renew(request.key))
        try:
            # It may have been answered between the last look and the claim.
            return self._cached(request) or await self._first_answer(request, until)
        finally:
            renewing.cancel()
            await asyncio.to_thread(self.cache.release, request.key, self._owner)

    async def _renew(self, key: str) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 4)
            await asyncio.to_thread(self.cache.renew, key, self._owner, LEASE_S)

    async def _first_answer(self, request: JudgeRequest, until: float) -> JudgeAnswer:
        problems: list[JudgeFailure] = []
        models = self._models(request)
        for place, model in enumerate(models):
            now = time.monotonic()
            share = now + (until - now) / (len(models) - place)
            asked = request.asked_of(model)
            try:
                self.refuse_unknown(model)
                if model not in self._askers:
                    self._askers[model] = ModelAsker(self, EndpointPool(self.endpoints[model]))
                stored = await self._askers[model].ask(asked, share)
            except JudgeFailure as failure:
                self.meter.of(model).failures += 1
                problems.append(failure)
                continue
            return self._read(asked, stored, cached=False)
        kind = JudgeRefusal if all(isinstance(problem, JudgeRefusal) for problem in problems) else JudgeFailure
        raise kind("; then ".join(map(str, problems)))

    def _cached(self, request: JudgeRequest) -> JudgeAnswer | None:
        """The cached answer of the model, or of one of its fallbacks; counted as a hit."""
        for model in self._models(request):
            asked = request.asked_of(model)
            stored = self.cache.get(asked.key)
            if stored is not None:
                answer = self._read(asked, stored, cached=True)
                self.meter.of(model).cache_hits += 1
                return answer
        return None

    def _read(self, request: JudgeRequest, stored: StoredAnswer, *, cached: bool) -> JudgeAnswer:
        """The answer in its form. Keys are masked here too: a file of an earlier version may hold one."""
        try:
            value = masked(request.form.parse(stored.text), self._keys)
        except ValueError as error:
            raise RecordError(
                f"the file of judgements '{self.cache.path}' holds an answer that is not in its form ({error}; prompt "
                f"{request.prompt}, key {request.key}). Only answers in their form are kept, so it was damaged or changed: "
                "move it away, and judgements are asked for again."
            ) from error
        text = str(masked(stored.text, self._keys))
        return JudgeAnswer(value, text, request.model, request.key, cached)

    @cached_property
    def _keys(self) -> list[str]:
        """The keys of all endpoints; one that cannot be read is reported when its endpoint is asked."""
        found = []
        for endpoint in chain.from_iterable(self.endpoints.values()):
            with suppress(UnknownJudge):
                secret = endpoint.secret()
                found += [] if secret is None else [secret.reveal()]
        return found

    def _models(self, request: JudgeRequest) -> tuple[str, ...]:
        return (request.model, *self.section.fallbacks.get(request.model, ()))

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        with self._starting:
            if self._closed:
                coroutine.close()
                raise JudgeFailure("the client of judges is closed")
            if self._thread is None:
                self._thread = LoopThread("judges")
            return self._thread.submit(coroutine)

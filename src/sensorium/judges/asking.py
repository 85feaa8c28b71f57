"""Asking one model until it answers in form: endpoints in rotation, backoff with jitter, limits, and answers sent back.

Example: the first endpoint answers 503, so the second is asked at once; it answers "Sure!", which is not the JSON that was
asked for, so it is told what is wrong and asked again; it answers {"score": 1}, and that is the answer. Three calls are on
record: 503, malformed, answered.
"""

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any

from sensorium.judges.cache import AnswerCache, CallRow, StoredAnswer
from sensorium.judges.counts import JudgeMeter
from sensorium.judges.endpoint_pool import EndpointHealth, EndpointPool
from sensorium.judges.limits import SharedLimits
from sensorium.judges.request import JudgeRequest
from sensorium.judges.transport import CallProblem, Reply, Transport
from sensorium.judges.untrusted import neutral, shortened
from sensorium.judges.wire import estimated_tokens, wire_messages
from sensorium.media.store import MediaStore
from sensorium.recipe.judge_section import JudgesSection
from sensorium.vocabulary.errors import JudgeFailure, JudgeRefusal, MediaError
from sensorium.vocabulary.plain import shown

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

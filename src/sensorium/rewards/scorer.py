"""Scoring: every term judges every episode, under a deadline, and a judge that fails gives a missing score, never a zero.

Invariants: each wait is bounded by (retries + 1) · (deadline + wait) and names the term it waited for. Slow terms run in
daemon threads, so a judge that never returns can neither stop the run nor keep the process alive; their judgements, missing
ones included, go to the cache, so that a resumed run meets the same ones.
"""

import asyncio
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import isfinite
from typing import Any, Protocol

from sensorium.rewards.protocol import ComparingTerm, RewardTerm
from sensorium.vocabulary.episode import Episode, Status
from sensorium.vocabulary.errors import RewardFailure, TaskError
from sensorium.vocabulary.score import Score
from sensorium.vocabulary.task import Task


class JudgementCache(Protocol):
    """Where judgements of slow terms are kept (a run's ledger)."""

    def get(self, key: str) -> tuple[Score, ...] | None: ...

    def put(self, key: str, scores: tuple[Score, ...]) -> None: ...


class Scorer:
    """Runs reward terms over episodes. ``missing`` and ``retried`` count, by term, since the last ``drain``."""

    def __init__(
        self,
        terms: Sequence[tuple[RewardTerm, float]],
        deadline_s: float = 30.0,
        retries: int = 2,
        retry_wait_s: float = 0.5,
        judgements: JudgementCache | None = None,
        concurrency: int = 64,
    ) -> None:
        self.terms = tuple(terms)
        self.deadline_s, self.retries, self.retry_wait_s = deadline_s, retries, retry_wait_s
        self.judgements = judgements
        self.concurrency = concurrency
        self.missing: Counter[str] = Counter()
        self.retried: Counter[str] = Counter()
        self._gate: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._overdue: list[threading.Thread] = []

    async def score(self, task: Task, episode: Episode) -> Episode:
        """The episode with a score from every term. One that failed or was aborted is judged by none, with the reason."""
        if episode.status in (Status.FAILED, Status.ABORTED):
            reason = f"the episode {episode.status.value}: {episode.failure}"
            return episode.with_scores(tuple(Score(term.name, None, weight, reason=reason) for term, weight in self.terms))
        slow = [term for term, _ in self.terms if not term.instant]
        judged = dict(zip(map(id, slow), await asyncio.gather(*(self._slow(t, task, episode) for t in slow)), strict=True))
        scores: list[Score] = []
        for term, weight in self.terms:
            found = self._instant(term, task, episode) if term.instant else judged[id(term)]
            self.missing[term.name] += sum(score.missing for score in found)
            scores += [replace(score, weight=weight) for score in found]
        return episode.with_scores(tuple(scores))

    @property
    def comparing(self) -> ComparingTerm | None:
        """The first term that compares answers: its word counts for what the answer is."""
        return next((term for term, _ in self.terms if isinstance(term, ComparingTerm)), None)

    def extract(self, task: Task, episode: Episode) -> str | None:
        """The answer of a scored episode, as the comparing term sees it; None where it gave none or could not be judged."""
        term = self.comparing
        if term is None or not episode.turns or any(s.missing for s in episode.scores if s.name == term.name):
            return None
        return term.extract(task, episode)

    def drain(self) -> tuple[dict[str, int], dict[str, int]]:
        """Missing and retried judgements by term since the last call (terms that had none are left out)."""
        counts = {k: v for k, v in self.missing.items() if v}, {k: v for k, v in self.retried.items() if v}
        self.missing.clear()
        self.retried.clear()
        return counts

    def close(self) -> None:
        """Let terms that hold processes or connections give them back."""
        for term, _ in self.terms:
            closing = getattr(term, "close", None)
            if closing is not None:
                closing()

    def _instant(self, term: RewardTerm, task: Task, episode: Episode) -> tuple[Score, ...]:
        try:
            return _checked(term, episode, term.score(task, episode))
        except Exception as error:
            return (Score(term.name, None, reason=_reason(error)),)

    async def _slow(self, term: RewardTerm, task: Task, episode: Episode) -> tuple[Score, ...]:
        key = _judgement_key(term, task, episode)
        known = self.judgements.get(key) if self.judgements is not None else None
        if known is not None:
            return known
        async with self._slot():
            found = await self._persistently(term, task, episode)
        if self.judgements is not None:
            self.judgements.put(key, found)
        return found

    async def _persistently(self, term: RewardTerm, task: Task, episode: Episode) -> tuple[Score, ...]:
        """Ask until it answers or the retries are spent; a task that is at fault is not asked again."""
        for attempt in range(1, self.retries + 2):
            try:
                return _checked(term, episode, await self._in_thread(term.name, lambda: term.score(task, episode)))
            except Exception as error:
                reason = _reason(error) + (f" (tried {attempt} times)" if attempt > 1 else "")
                if isinstance(error, TaskError):
                    break
            if attempt <= self.retries:
                self.retried[term.name] += 1
                await asyncio.sleep(self.retry_wait_s)
        return (Score(term.name, None, reason=reason),)

    async def _in_thread(self, name: str, judge: Callable[[], tuple[Score, ...]]) -> Any:
        """Run a judge in a thread of its own, for as long as the deadline allows."""
        self._overdue = [thread for thread in self._overdue if thread.is_alive()]
        if len(self._overdue) >= 4 * self.concurrency:
            raise RewardFailure(f"{len(self._overdue)} earlier calls of reward terms still hang; '{name}' was not asked")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[Any, Exception | None]] = loop.create_future()

        def settle(value: Any, error: Exception | None) -> None:
            if not answer.done():
                answer.set_result((value, error))

        def work() -> None:
            value, error = None, None
            try:
                value = judge()
            except Exception as raised:
                error = raised
            with suppress(RuntimeError):  # the loop has gone: nobody waits for this answer any more
                loop.call_soon_threadsafe(settle, value, error)

        thread = threading.Thread(target=work, name=f"reward-{name}", daemon=True)
        thread.start()
        done, _ = await asyncio.wait({answer}, timeout=self.deadline_s)
        if not done:
            answer.cancel()
            self._overdue.append(thread)
            raise RewardFailure(f"reward term '{name}' did not answer within {self.deadline_s:g} s")
        value, error = answer.result()
        if error is not None:
            raise error
        return value

    def _slot(self) -> asyncio.Semaphore:
        """The gate of the running loop: a scorer outlives the event loops it is used in."""
        loop = asyncio.get_running_loop()
        if self._gate is None or self._gate[0] is not loop:
            self._gate = (loop, asyncio.Semaphore(self.concurrency))
        return self._gate[1]


def _checked(term: RewardTerm, episode: Episode, scores: Any) -> tuple[Score, ...]:
    """What a term may return: at least one score, of things that are there; a value that is not finite is missing."""
    if not isinstance(scores, tuple) or not scores or not all(isinstance(score, Score) for score in scores):
        raise RewardFailure(f"reward term '{term.name}' must return a tuple of scores, not {scores!r:.80}")
    for score in scores:
        problem = _misplaced(score, episode)
        if problem:
            raise RewardFailure(f"reward term '{term.name}' {problem}")
    return tuple(
        replace(score, value=None, correct=None, reason=f"the value {score.value} is not finite")
        if score.value is not None and not isfinite(score.value)
        else score
        for score in scores
    )


def _misplaced(score: Score, episode: Episode) -> str:
    """What is wrong with the turn or span that a score speaks of; empty if it is there."""
    turns = len(episode.turns)
    if score.scope == "episode":
        return ""
    if score.turn is None and (score.scope == "turn" or turns != 1):
        return f"judged a {score.scope} without saying of which of the {turns} turns"
    if score.turn is not None and not 0 <= score.turn < turns:
        return f"judged turn {score.turn} of an episode with {turns} turns"
    if score.scope == "span":
        size = len(episode.turns[score.turn or 0].response.text.encode())
        if score.span is None or not 0 <= score.span[0] <= score.span[1] <= size:
            return f"judged the bytes {score.span} of a response of {size} bytes"
    return ""


def _reason(error: Exception) -> str:
    told = isinstance(error, RewardFailure | TaskError)
    return str(error) if told and str(error) else f"{type(error).__name__}: {error}"


def _judgement_key(term: RewardTerm, task: Task, episode: Episode) -> str:
    said = [(turn.response.text, turn.reward) for turn in episode.turns]
    body = repr((term.name, episode.id, task.id, task.answer, said)).encode()
    return hashlib.blake2b(body, digest_size=16).hexdigest()

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
from inspect import isawaitable
from typing import Any, Protocol

from sensorium.rewards.intake import scores_of
from sensorium.rewards.protocol import ComparingTerm, RewardTerm
from sensorium.vocabulary.episode import Episode, Status
from sensorium.vocabulary.errors import RewardFailure, TaskError
from sensorium.vocabulary.plain import attempt, printable, words
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
        self._names = frozenset(term.name for term, _ in self.terms)
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
        slow = [term for term, _ in self.terms if not _instant(term)]
        judged = dict(zip(map(id, slow), await asyncio.gather(*(self._slow(t, task, episode) for t in slow)), strict=True))
        scores: list[Score] = []
        for term, weight in self.terms:
            found = self._in_place(term, task, episode) if _instant(term) else judged[id(term)]
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

    def _in_place(self, term: RewardTerm, task: Task, episode: Episode) -> tuple[Score, ...]:
        """Ask a term that is plain computation; it has no event loop to wait in."""
        returned, error = attempt(term.score, task, episode)
        if isawaitable(returned):
            closing = getattr(returned, "close", None)
            if closing is not None:
                closing()
            error = RewardFailure(f"reward term '{term.name}' is async, so it cannot be instant; set instant = False")
        try:
            if error is None:
                return self._scores(term, returned, episode)
        except RewardFailure as refused:
            error = refused
        return (Score(term.name, None, reason=_reason(error)),)

    def _scores(self, term: RewardTerm, returned: Any, episode: Episode) -> tuple[Score, ...]:
        return scores_of(term.name, returned, episode, self._names)

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
        for tries in range(1, self.retries + 2):
            try:
                return self._scores(term, await self._in_thread(term.name, lambda: term.score(task, episode)), episode)
            except Exception as error:
                reason = _reason(error) + (f" (tried {tries} times)" if tries > 1 else "")
                if isinstance(error, TaskError):
                    break
            if tries <= self.retries:
                self.retried[term.name] += 1
                await asyncio.sleep(self.retry_wait_s)
        return (Score(term.name, None, reason=reason),)

    async def _in_thread(self, name: str, judge: Callable[[], Any]) -> Any:
        """Run a judge in a thread of its own, for as long as the deadline allows."""
        self._overdue = [thread for thread in self._overdue if thread.is_alive()]
        if len(self._overdue) >= 4 * self.concurrency:
            raise RewardFailure(f"{len(self._overdue)} earlier calls of reward terms still hang; '{name}' was not asked")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def settle(value: Any, error: BaseException | None) -> None:
            if not answer.done():
                answer.set_result((value, error))

        def work() -> None:
            value, error = attempt(lambda: _awaited(judge()))
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
        if isinstance(error, Exception):
            raise error
        if error is not None:  # SystemExit and its like are this judgement's failure, not the end of the run
            raise RewardFailure(f"reward term '{name}' raised {words(error)}")
        return value

    def _slot(self) -> asyncio.Semaphore:
        """The gate of the running loop: a scorer outlives the event loops it is used in."""
        loop = asyncio.get_running_loop()
        if self._gate is None or self._gate[0] is not loop:
            self._gate = (loop, asyncio.Semaphore(self.concurrency))
        return self._gate[1]


def _awaited(returned: Any) -> Any:
    """What a term returned, waited for where it is async; for a thread that has no event loop."""

    async def wait() -> Any:
        return await returned

    return asyncio.run(wait()) if isawaitable(returned) else returned


def _instant(term: RewardTerm) -> bool:
    return bool(getattr(term, "instant", False))


def _reason(error: BaseException) -> str:
    told = isinstance(error, RewardFailure | TaskError) and str(error)
    return printable(str(error)) if told else words(error)


def _judgement_key(term: RewardTerm, task: Task, episode: Episode) -> str:
    said = [(turn.response.text, turn.reward) for turn in episode.turns]
    body = repr((term.name, episode.id, task.id, task.answer, said)).encode()
    return hashlib.blake2b(body, digest_size=16).hexdigest()

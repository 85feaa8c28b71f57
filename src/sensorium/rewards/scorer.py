"""Scoring: every term judges every episode, under a deadline, and a judge that fails gives a missing score, never a zero.

Invariants: a judgement is waited for at most (retries + 1) · (deadline + wait), once it has a place among those that run,
and the wait names its term. Slow terms run in the daemon threads of a pool, so a judge that never returns can neither stop
the run nor keep the process alive; their judgements, missing ones included, go to the cache, so that a resumed run meets
the same ones. That a term had to be asked again is counted, and said the first time and whenever it is ten times as often.
"""

import asyncio
import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import isawaitable
from typing import Any, Protocol

from sensorium.rewards.intake import scores_of
from sensorium.rewards.protocol import ComparingTerm, RewardTerm
from sensorium.vocabulary.episode import Episode, Group, Status
from sensorium.vocabulary.errors import RewardFailure, TaskError
from sensorium.vocabulary.plain import attempt, printable, words
from sensorium.vocabulary.score import Score
from sensorium.vocabulary.task import Task
from sensorium.workers.pool import CallOverdue, WorkerFailure, WorkerPool
from sensorium.workers.side_by_side import side_by_side


class JudgementCache(Protocol):
    """Where judgements of slow terms are kept (a run's ledger)."""

    def get(self, key: str) -> tuple[Score, ...] | None: ...

    def put(self, key: str, scores: tuple[Score, ...]) -> None: ...


@dataclass
class TermCounts:
    """One term since the counts were last taken: calls made, their seconds, calls made again, scores that are missing."""

    calls: int = 0
    retries: int = 0
    missing: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Count a call."""
        self.calls += 1
        self.seconds += seconds
        self.longest_s = max(self.longest_s, seconds)


class Scorer:
    """Runs reward terms over episodes. ``noted`` hears, in a line, that a term has to be asked again."""

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
        self.noted: Callable[[str], None] = lambda text: warnings.warn(text, stacklevel=2)
        self._names = frozenset(term.name for term, _ in self.terms)
        self._pool = WorkerPool("reward term", concurrency)
        self._counts = {name: TermCounts() for name in self._names}
        self._retried = dict.fromkeys(self._names, 0)

    async def score(self, task: Task, episode: Episode) -> Episode:
        """The episode with a score from every term. One that failed or was aborted is judged by none, with the reason."""
        if episode.status in (Status.FAILED, Status.ABORTED):
            reason = f"the episode {episode.status.value}: {episode.failure}"
            return episode.with_scores(tuple(Score(term.name, None, weight, reason=reason) for term, weight in self.terms))
        judged = await self._slow_terms(task, episode)
        scores: list[Score] = []
        for term, weight in self.terms:
            found = self._in_place(term, task, episode) if _instant(term) else judged[term.name]
            self._counts[term.name].missing += sum(score.missing for score in found)
            scores += [replace(score, weight=weight) for score in found]
        return episode.with_scores(tuple(scores))

    async def score_group(self, group: Group) -> Group:
        """The group with every episode scored."""
        if all(_instant(term) for term, _ in self.terms):
            return replace(group, episodes=tuple([await self.score(group.task, episode) for episode in group.episodes]))
        return replace(group, episodes=tuple(await side_by_side(self.score(group.task, e) for e in group.episodes)))

    async def _slow_terms(self, task: Task, episode: Episode) -> dict[str, tuple[Score, ...]]:
        """What the terms that run in threads say, side by side."""
        slow = [term for term, _ in self.terms if not _instant(term)]
        if not slow:
            return {}
        found = await side_by_side(self._slow(term, task, episode) for term in slow)
        return {term.name: scores for term, scores in zip(slow, found, strict=True)}

    @property
    def comparing(self) -> ComparingTerm | None:
        """The first term that compares answers: its word counts for what the answer is."""
        return next((term for term, _ in self.terms if isinstance(term, ComparingTerm)), None)

    def extract(self, task: Task, episode: Episode) -> str | None:
        """The answer of a scored episode, as the comparing term sees it; None where it gave none or could not be judged."""
        term = self.comparing
        if term is None or not episode.turns or any(s.missing for s in episode.scores if s.name == term.name):
            return None
        answer, error = attempt(term.extract, task, episode)
        return printable(answer) if error is None and isinstance(answer, str) else None

    def take_counts(self) -> dict[str, TermCounts]:
        """What was counted of each term since the last call."""
        taken, self._counts = self._counts, {name: TermCounts() for name in self._names}
        return taken

    def take_metrics(self) -> dict[str, float]:
        """Of the slow terms since counts were last taken: seconds of a call (mean and longest), and calls made again."""
        slow = [term.name for term, _ in self.terms if not _instant(term)]
        row: dict[str, float] = {}
        for name, counted in self.take_counts().items():
            if name in slow:
                row[f"retries/{name}"] = counted.retries
                if counted.calls:
                    row[f"time/reward/{name}_mean_s"] = counted.seconds / counted.calls
                    row[f"time/reward/{name}_max_s"] = counted.longest_s
        return row

    def close(self) -> None:
        """Let terms that hold processes or connections give them back; one that hangs in this is not waited for."""
        for term, _ in self.terms:
            closing = getattr(term, "close", None)
            if closing is None:
                continue
            try:
                error = self._pool.call_now(closing, self.deadline_s).error
                problem = "" if error is None else words(error)
            except WorkerFailure as failure:
                problem = f"it {failure}"
            if problem:
                self.noted(f"reward term '{term.name}' could not be closed: {problem}.")
        self._pool.close()

    def _in_place(self, term: RewardTerm, task: Task, episode: Episode) -> tuple[Score, ...]:
        """Ask a term that is plain computation; it has no event loop to wait in."""
        returned, error = attempt(term.score, task, episode)
        awaitable, unreadable = attempt(isawaitable, returned)
        error = error or unreadable
        if awaitable:
            attempt(getattr(returned, "close", lambda: None))
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
        found = await self._persistently(term, task, episode)
        if self.judgements is not None:
            self.judgements.put(key, found)
        return found

    async def _persistently(self, term: RewardTerm, task: Task, episode: Episode) -> tuple[Score, ...]:
        """Ask until it answers or the retries are spent; a task that is at fault is not asked again."""
        for tries in range(1, self.retries + 2):
            found = await self._asked(term, task, episode)
            if isinstance(found, tuple):
                return found
            reason = _reason(found) + (f" (tried {tries} times)" if tries > 1 else "")
            if isinstance(found, TaskError):
                break
            if tries <= self.retries:
                self._note_retry(term.name, reason)
                await asyncio.sleep(self.retry_wait_s)
        return (Score(term.name, None, reason=reason),)

    async def _asked(self, term: RewardTerm, task: Task, episode: Episode) -> tuple[Score, ...] | BaseException:
        """The scores of one call in a thread, or what went wrong."""
        try:
            call = await self._pool.call(lambda: term.score(task, episode), self.deadline_s)
        except CallOverdue as overdue:
            self._counts[term.name].add(self.deadline_s)
            return RewardFailure(f"reward term '{term.name}' {overdue}")
        except WorkerFailure as refused:
            return RewardFailure(f"{refused}, so '{term.name}' was not asked")
        self._counts[term.name].add(call.seconds)
        if call.error is not None:
            return call.error
        try:
            return self._scores(term, call.value, episode)
        except RewardFailure as refused:
            return refused

    def _note_retry(self, name: str, reason: str) -> None:
        self._counts[name].retries += 1
        self._retried[name] = times = self._retried[name] + 1
        if times == 1:
            self.noted(
                f"reward term '{name}' failed and is asked again: {reason}. retries/{name} in the metrics counts on."
            )
        elif str(times).strip("0") == "1":
            self.noted(f"reward term '{name}' was asked again {times} times by now; the last time: {reason}.")


def _instant(term: RewardTerm) -> bool:
    return bool(getattr(term, "instant", False))


def _reason(error: BaseException) -> str:
    told = isinstance(error, RewardFailure | TaskError) and str(error)
    return printable(str(error)) if told else words(error)


def _judgement_key(term: RewardTerm, task: Task, episode: Episode) -> str:
    said = [(turn.response.text, turn.reward) for turn in episode.turns]
    body = repr((term.name, episode.id, task.id, task.answer, said)).encode()
    return hashlib.blake2b(body, digest_size=16).hexdigest()

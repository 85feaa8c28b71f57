"""Scoring: every term judges every episode, under a deadline, and a judge that fails gives a missing score, never a zero.

Invariants: a judgement is waited for at most (retries + 1) · (deadline + wait), once it has a place among those that run,
and the wait names its term. Slow terms run in the daemon threads of a pool, so a judge that never returns can neither stop
the run nor keep the process alive; their judgements, missing ones included, go to the cache, so that a resumed run meets
the same ones, and equal content is judged once (``judgements.py``). That a term had to be asked again is counted, and said
the first time and whenever it is ten times as often. A programming error in a term is said likewise, and not tried again.
"""

import asyncio
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import isawaitable
from typing import Any, TypeGuard, cast

from sensorium.rewards.intake import group_scores_of, scores_of
from sensorium.rewards.judgements import JudgementCache, JudgementKeys, JudgementMemory, Scores, judgement_keys
from sensorium.rewards.protocol import ComparingTerm, GroupTerm, RewardTerm, Term
from sensorium.vocabulary.episode import Episode, Group, Status
from sensorium.vocabulary.errors import (
    JudgeOffline,
    JudgeRefusal,
    RecordError,
    RewardFailure,
    TaskError,
    WorkersLost,
    WorkGivenUp,
)
from sensorium.vocabulary.plain import attempt, printable, words
from sensorium.vocabulary.score import Score
from sensorium.vocabulary.task import Task
from sensorium.workers.pool import CallOverdue, WorkerFailure, WorkerPool
from sensorium.workers.side_by_side import side_by_side

PROGRAMMING_ERRORS = (AttributeError, NameError, TypeError, ImportError, SyntaxError, NotImplementedError)
"""Errors of the code itself. KeyError, IndexError and ValueError are left out: a service's odd answer raises those."""


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
    """Runs reward terms over episodes. ``noted`` hears, in a line, that a term has to be asked again.

    ``identities`` says by term name what else tells its judgements apart: options and version (``term_identity``).
    """

    def __init__(
        self,
        terms: Sequence[tuple[Term, float]],
        deadline_s: float = 30.0,
        retries: int = 2,
        retry_wait_s: float = 0.5,
        judgements: JudgementCache | None = None,
        concurrency: int = 64,
        identities: Mapping[str, str] | None = None,
    ) -> None:
        self.terms = tuple(terms)
        self.deadline_s, self.retries, self.retry_wait_s = deadline_s, retries, retry_wait_s
        self.judgements: JudgementCache = JudgementMemory() if judgements is None else judgements
        self._identities = identities or {}
        self._running: dict[str, asyncio.Future[list[Scores] | None]] = {}
        self.noted: Callable[[str], None] = lambda text: warnings.warn(text, stacklevel=2)
        self._names = frozenset(term.name for term, _ in self.terms)
        self._pool = WorkerPool("reward term", concurrency)
        self._counts = {name: TermCounts() for name in self._names}
        self._retried = dict.fromkeys(self._names, 0)
        self._broken = dict.fromkeys(self._names, 0)

    async def score(self, task: Task, episode: Episode) -> Episode:
        """The episode with a score from every term, as the only one of its group."""
        return (await self.score_group(Group(episode.group_id, task, (episode,)))).episodes[0]

    async def score_group(self, group: Group) -> Group:
        """The group with a score from every term for every episode. One that failed or was aborted is judged by none."""
        sound = [episode for episode in group.episodes if episode.status not in (Status.FAILED, Status.ABORTED)]
        found = await self._judged(group.task, sound) if sound else {}
        places = {id(episode): place for place, episode in enumerate(sound)}
        episodes = []
        for episode in group.episodes:
            scores: list[Score] = []
            for term, weight in self.terms:
                if id(episode) in places:
                    given = found[term.name][places[id(episode)]]
                    self._counts[term.name].missing += sum(score.missing for score in given)
                else:
                    given = (Score(term.name, None, reason=f"the episode {episode.status.value}: {episode.failure}"),)
                scores += [replace(score, weight=weight if score.weight else 0.0) for score in given]
            episodes.append(episode.with_scores(tuple(scores)))
        return replace(group, episodes=tuple(episodes))

    async def _judged(self, task: Task, episodes: Sequence[Episode]) -> dict[str, list[Scores]]:
        """What each term says of each episode: slow ones side by side, instant ones in place."""
        slow = [(term, call) for term, _ in self.terms if not _instant(term) for call in _calls(term, episodes)]
        asked = await side_by_side(self._kept(term, task, call) for term, call in slow) if slow else []
        found: dict[str, list[Scores]] = {term.name: [] for term, _ in self.terms}
        for (term, _), scores in zip(slow, asked, strict=True):
            found[term.name] += scores
        for term, _ in self.terms:
            if _instant(term):
                for call in _calls(term, episodes):
                    found[term.name] += self._in_place(term, task, call)
        return found

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

    def _in_place(self, term: Term, task: Task, episodes: Sequence[Episode]) -> list[Scores]:
        """Ask a term that is plain computation; it has no event loop to wait in."""
        returned, error = attempt(asked_of, term, task, episodes)
        awaitable, unreadable = attempt(isawaitable, returned)
        error = error or unreadable
        if awaitable:
            attempt(getattr(returned, "close", lambda: None))
            error = RewardFailure(f"reward term '{term.name}' is async, so it cannot be instant; set instant = False")
        try:
            if error is None:
                return self._scores(term, returned, episodes)
        except RewardFailure as refused:
            error = refused
        return _missing(term, _reason(error), episodes)

    def _scores(self, term: Term, returned: Any, episodes: Sequence[Episode]) -> list[Scores]:
        if judges_groups(term):
            return group_scores_of(term.name, returned, episodes, self._names)
        return [scores_of(term.name, returned, episodes[0], self._names)]

    async def _kept(self, term: Term, task: Task, episodes: Sequence[Episode]) -> list[Scores]:
        """What a slow term says: from the cache, from an equal call that runs at this moment, or by asking it."""
        by_content = getattr(term, "deterministic", True) and not getattr(term, "caches_answers", False)
        keys = judgement_keys(self._identities.get(term.name, term.name), task, episodes, deterministic=by_content)
        known = keys.look_up(self.judgements)
        if known is not None:
            await self._recalled(term, task, episodes, known)
            return known
        running = self._running.get(keys.content[0])
        if running is None:
            return await self._ask_for_all(term, task, episodes, keys)
        found = await asyncio.shield(running)
        if found is None or any(score.missing for scores in found for score in scores):
            found = await self._persistently(term, task, episodes)  # that it failed for another says nothing of this one
            keys.keep(self.judgements, found)
        else:
            await self._recalled(term, task, episodes, found)
        return found

    async def _recalled(self, term: Term, task: Task, episodes: Sequence[Episode], known: list[Scores]) -> None:
        """Tell a term that wants to hear it that scores of its own were found in the cache."""
        recall = getattr(term, "recall_judgement", None)
        if recall is None:
            return
        try:
            error = (await self._pool.call(lambda: recall(task, episodes, known), self.deadline_s)).error
            problem = "" if error is None else words(error)
        except WorkerFailure as failure:
            problem = f"it {failure}"
        if problem:
            self.noted(f"reward term '{term.name}' could not recall a judgement, whose scores stand: {problem}.")

    async def _ask_for_all(self, term: Term, task: Task, episodes: Sequence[Episode], keys: JudgementKeys) -> list[Scores]:
        """Ask, and let whoever wants the same judgement meanwhile wait for it; None if this one is cancelled."""
        running = self._running[keys.content[0]] = asyncio.get_running_loop().create_future()
        found = None
        try:
            found = await self._persistently(term, task, episodes)
            keys.keep(self.judgements, found)
            return found
        finally:
            del self._running[keys.content[0]]
            running.set_result(found)

    async def _persistently(self, term: Term, task: Task, episodes: Sequence[Episode]) -> list[Scores]:
        """Ask until it answers or the retries are spent. Not again: a task or code at fault, a refusal, work given up."""
        for tries in range(1, self.retries + 2):
            found = await self._asked(term, task, episodes)
            if isinstance(found, list):
                return found
            reason = _reason(found) + (f" (tried {tries} times)" if tries > 1 else "")
            if isinstance(found, WorkGivenUp):
                ids = ", ".join(episode.id for episode in episodes)
                self.noted(f"reward term '{term.name}' gives no score to {ids}: {reason}.")
            if is_programming_error(found):
                self._note_programming_error(term.name, reason)
                break
            if isinstance(found, TaskError | JudgeRefusal | WorkGivenUp):
                break
            if tries <= self.retries:
                self._note_retry(term.name, reason)
                await asyncio.sleep(self.retry_wait_s)
        return _missing(term, reason, episodes)

    async def _asked(self, term: Term, task: Task, episodes: Sequence[Episode]) -> list[Scores] | BaseException:
        """The scores of one call in a thread, or what went wrong."""
        try:
            call = await self._pool.call(lambda: asked_of(term, task, episodes), self.deadline_s)
        except CallOverdue as overdue:
            self._counts[term.name].add(self.deadline_s)
            return RewardFailure(f"reward term '{term.name}' {overdue}")
        except WorkerFailure as refused:
            return RewardFailure(f"{refused}, so '{term.name}' was not asked")
        self._counts[term.name].add(call.seconds)
        if isinstance(call.error, JudgeOffline | RecordError | WorkersLost):
            raise call.error  # a missing score would hide that the run is not repeated, or that it cannot go on
        if call.error is not None:
            return call.error
        try:
            return self._scores(term, call.value, episodes)
        except RewardFailure as refused:
            return refused

    def _note_retry(self, name: str, reason: str) -> None:
        self._counts[name].retries += 1
        self._retried[name] = times = self._retried[name] + 1
        if times == 1:
            self.noted(
                f"reward term '{name}' failed and is asked again: {reason}. retries/{name} in the metrics counts on."
            )
        elif _ten_times_as_often(times):
            self.noted(f"reward term '{name}' was asked again {times} times by now; the last time: {reason}.")

    def _note_programming_error(self, name: str, reason: str) -> None:
        self._broken[name] = times = self._broken[name] + 1
        if times == 1:
            self.noted(f"reward term '{name}' has an error in its code and is not asked again for that episode: {reason}.")
        elif _ten_times_as_often(times):
            self.noted(f"reward term '{name}' met errors in its code {times} times by now; the last: {reason}.")


def is_programming_error(error: BaseException) -> bool:
    """True for an error of a term's code that trying again cannot mend.

    What a service sent may raise two of them too, and is tried again: an attribute or item of an answer that is None
    ('NoneType' object …), and text of the answer that does not parse as Python (its file is called '<unknown>').
    """
    if not isinstance(error, PROGRAMMING_ERRORS) or "NoneType" in words(error):
        return False
    return not (isinstance(error, SyntaxError) and str(error.filename or "<").startswith("<"))


def judges_groups(term: Term) -> TypeGuard[GroupTerm]:
    """True for a term that is asked about a whole group at once."""
    return callable(getattr(term, "score_group", None))


def asked_of(term: Term, task: Task, episodes: Sequence[Episode]) -> Any:
    """What a term returns for the episodes of one call."""
    if judges_groups(term):
        return term.score_group(task, tuple(episodes))
    return cast(RewardTerm, term).score(task, episodes[0])


def _calls(term: Term, episodes: Sequence[Episode]) -> list[Sequence[Episode]]:
    """The episodes of each call that a term needs: all of them at once, or one at a time."""
    return [episodes] if judges_groups(term) else [(episode,) for episode in episodes]


def _missing(term: Term, reason: str, episodes: Sequence[Episode]) -> list[Scores]:
    return [(Score(term.name, None, reason=reason),) for _ in episodes]


def _ten_times_as_often(times: int) -> bool:
    """True for 1, 10, 100…"""
    return str(times).strip("0") == "1"


def _instant(term: Term) -> bool:
    return bool(getattr(term, "instant", False))


def _reason(error: BaseException) -> str:
    told = isinstance(error, RewardFailure | TaskError | WorkGivenUp) and str(error)
    return printable(str(error)) if told else words(error)

"""Scoring: every term judges every episode, under a deadline, and a judge that fails gives a missing score."""

import asyncio
import hashlib
import json
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import isawaitable
from math import isfinite
from types import TracebackType
from typing import Any, Protocol, Self, TypeGuard, cast, get_args

from sensorium.cluster.event_loop import first_error, side_by_side
from sensorium.cluster.pool import CallOverdue, WorkerFailure, WorkerPool
from sensorium.data.lru import LRU
from sensorium.rewards.reward_term import ComparingTerm, GroupTerm, RewardTerm, Term
from sensorium.vocabulary.content import Message, Text
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
from sensorium.vocabulary.plain import attempt, number_of, printable, shown, text_of, truth_of, whole_of, words
from sensorium.vocabulary.score import Scope, Score
from sensorium.vocabulary.task import Task

# A term may return a number, one Score, a tuple or list of Scores, or ``{name: number}``, one score each. True and
# False are the numbers 1 and 0, and also say right or wrong, alone and in ``{name: …}``; a Score without a name gets
# the term's.


SCOPES: tuple[str, ...] = get_args(Scope)
FORMS = "a number, a Score, a tuple of Scores, True or False, or {name: number}"


def scores_of(name: str, returned: Any, episode: Episode, others: Container[str] = ()) -> tuple[Score, ...]:
    """The scores of the term ``name``; ``others`` are the names of the other terms. RewardFailure if they are none.

    A value that is not finite is missing.
    """
    scores, error = attempt(_checked, name, returned, episode, others)
    if error is not None:  # of ours, or of what was returned: a mapping may raise when it is read
        told = printable(str(error)) if type(error) is ValueError else words(error)
        raise RewardFailure(f"reward term '{name}': {told}") from error
    unsaid = f"reward term '{name}' gave no value and said no reason"
    return tuple(replace(s, reason=unsaid) if s.value is None and not s.reason else s for s in scores)


def group_scores_of(
    name: str, returned: Any, episodes: Sequence[Episode], others: Container[str] = ()
) -> list[tuple[Score, ...]]:
    """The scores of each episode of a group. RewardFailure if they are no list with an entry for each.

    An entry that is none of the forms is that episode's missing score.
    """
    listed, _ = attempt(lambda: returned.tolist() if getattr(returned, "shape", ()) else returned)
    if not isinstance(listed, list | tuple) or len(listed) != len(episodes):
        raise RewardFailure(
            f"reward term '{name}': score_group must return a list of {len(episodes)} entries, one for each episode, not "
            f"{shown(returned)}"
        )
    found = []
    for entry, episode in zip(listed, episodes, strict=True):
        try:
            found.append(scores_of(name, entry, episode, others) if entry is not None else (_unsaid(name),))
        except RewardFailure as refused:
            found.append((Score(name, None, reason=str(refused)),))
    return found


def _unsaid(name: str) -> Score:
    return Score(name, None, reason=f"reward term '{name}' gave no score")


def _checked(name: str, returned: Any, episode: Episode, others: Container[str]) -> tuple[Score, ...]:
    scores = _scores(name, returned)
    for score in scores:
        _refuse_misplaced(score, episode)
        if score.name != name and score.name in others:
            raise ValueError(f"a score is named '{score.name}', which is the name of another term")
    return scores


def _scores(name: str, returned: Any) -> tuple[Score, ...]:
    if isinstance(returned, Score):
        return (_plain(returned, name),)
    if isinstance(returned, Mapping):
        return tuple(_named(name, key, value) for key, value in returned.items()) or _refuse(returned)
    if isinstance(returned, list | tuple):
        if not returned or not all(isinstance(score, Score) for score in returned):
            _refuse(returned)
        return tuple(_plain(score, name) for score in returned)
    if returned is None:
        _refuse(returned)
    try:
        return (_finite(Score(name, number_of(returned), correct=_verdict(returned))),)
    except ValueError as error:
        raise ValueError(f"it must return {FORMS}, and {error}") from error


def _verdict(returned: Any) -> bool | None:
    """What a bool of Python, numpy or torch says; None of any other number."""
    is_bool = isinstance(returned, bool) or str(getattr(returned, "dtype", "")) in ("bool", "torch.bool")
    return truth_of(returned) if is_bool else None


def _refuse(returned: Any) -> tuple[Score, ...]:
    raise ValueError(f"it must return {FORMS}, not {shown(returned)}")


def _named(term: str, key: Any, value: Any) -> Score:
    try:
        name = text_of(key)
        return _finite(Score(name if name == term else f"{term}/{name}", number_of(value), correct=_verdict(value)))
    except ValueError as error:
        raise ValueError(f"it returned an object in which {error}; its keys are texts and its values numbers") from error


def _plain(score: Score, term: str) -> Score:
    """A score whose fields are of the types they are declared with; without a name it has the term's."""
    field = ""
    try:
        field = "name"
        name = text_of(score.name) or term
        field = "value"
        value = None if score.value is None else number_of(score.value)
        field = "correct"
        correct = None if score.correct is None else truth_of(score.correct)
        field = "turn"
        turn = None if score.turn is None else whole_of(score.turn)
        field = "span"
        span = None if score.span is None else _span(score.span)
    except ValueError as error:
        raise ValueError(f"the {field} of a score: {error}") from error
    if not isinstance(score.scope, str) or score.scope not in SCOPES:
        raise ValueError(f"the scope of a score is one of {', '.join(SCOPES)}, not {shown(score.scope)}")
    reason = printable(score.reason) if isinstance(score.reason, str) else shown(score.reason)
    paid = 0.0 if isinstance(score.weight, int | float) and score.weight == 0 else 1.0  # 0: measured and not paid
    return _finite(Score(name, value, paid, scope=score.scope, turn=turn, span=span, correct=correct, reason=reason))


def _span(span: Any) -> tuple[int, int]:
    if not isinstance(span, list | tuple) or len(span) != 2:
        raise ValueError(f"{shown(span)} is no pair of byte places")
    return whole_of(span[0]), whole_of(span[1])


def _finite(score: Score) -> Score:
    if score.value is None or isfinite(score.value):
        return score
    return Score(
        score.name, None, score.weight, scope=score.scope, turn=score.turn, span=score.span,
        reason=f"the value {score.value} is not finite",
    )  # fmt: skip


def _refuse_misplaced(score: Score, episode: Episode) -> None:
    """Refuse a score that speaks of a turn or span that is not there."""
    turns = len(episode.turns)
    if score.scope == "episode":
        return
    if score.turn is None and (score.scope == "turn" or turns != 1):
        raise ValueError(f"it judged a {score.scope} without saying of which of the {turns} turns")
    if score.turn is not None and not 0 <= score.turn < turns:
        raise ValueError(f"it judged turn {score.turn} of an episode with {turns} turns")
    if score.scope == "span":
        size = len(episode.turns[score.turn or 0].response.text.encode())
        if score.span is None or not 0 <= score.span[0] <= score.span[1] <= size:
            raise ValueError(f"it judged the bytes {score.span} of a response of {size} bytes")


# What a judgement is known by: the term (its name in the recipe, its options, its ``version``), the task (all of it),
# and of the episode what was shown, said and paid: texts, media, number of tokens, pay, info, status. A term that looks
# at anything else, or draws, says ``deterministic = False``; then it is also known by the episode's id, and equal texts
# are judged apart. A missing score is known by the episode as well: that a judge was away is repeated when a run
# resumes, and not held against the same words in another episode. Example: episodes a and b of a task both say "cat".
# The judge is asked about a; b gets the same scores from the cache. If the judge failed for a, a resumed run repeats
# that a's score is missing, and a later episode that says "cat" is judged anew.


Scores = tuple[Score, ...]


class JudgementCache(Protocol):
    """Where judgements of slow terms are kept (a run's ledger)."""

    def get(self, key: str) -> Scores | None: ...

    def put(self, key: str, scores: Scores) -> None: ...


class JudgementMemory:
    """Judgements in memory, for whoever keeps no ledger; the least recently used go first."""

    def __init__(self, most: int = 100_000) -> None:
        self._kept: LRU[str, Scores] = LRU(most)

    def get(self, key: str) -> Scores | None:
        """A judgement received earlier."""
        return self._kept.get(key)

    def put(self, key: str, scores: Scores) -> None:
        """Keep a judgement."""
        self._kept.put(key, scores)


@dataclass(frozen=True)
class JudgementKeys:
    """The keys of what one call judges, episode by episode: by content, and by the episode itself."""

    content: tuple[str, ...]
    own: tuple[str, ...]

    def look_up(self, cache: JudgementCache) -> list[Scores] | None:
        """What is known of every episode; None if anything is not."""
        found = []
        for own, content in zip(self.own, self.content, strict=True):
            scores = cache.get(own)
            scores = cache.get(content) if scores is None else scores
            if scores is None:
                return None
            found.append(scores)
        return found

    def keep(self, cache: JudgementCache, judged: Sequence[Scores]) -> None:
        """Keep what was found, and that something is missing with the episode alone."""
        for own, content, scores in zip(self.own, self.content, judged, strict=True):
            cache.put(own if any(score.missing for score in scores) else content, scores)


def judgement_keys(term: str, task: Task, episodes: Sequence[Episode], *, deterministic: bool = True) -> JudgementKeys:
    """The keys of a call; ``term`` is all that tells one term from another. A call about several is one judgement."""
    whole = _digest([term, _task(task), [_episode(episode) for episode in episodes]])
    content = [_digest([whole, i]) for i in range(len(episodes))]
    own = [_digest([key, episode.id]) for key, episode in zip(content, episodes, strict=True)]
    return JudgementKeys(tuple(content if deterministic else own), tuple(own))


def term_identity(name: str, options: Any, version: Any) -> str:
    """What tells a term from another: its name in a recipe, its options and its version."""
    return _written([name, options, str(version)])


def task_digest(task: Task) -> str:
    """A digest of all that a task says and shows; a medium counts by what it is, wherever it lay."""
    return _digest(_task(task))


def _task(task: Task) -> list[Any]:
    spec = task.environment
    played = None if spec is None else [spec.name, dict(spec.options), spec.seed]
    return [task.id, _messages(task.messages), task.answer, played, list(task.demonstration), dict(task.metadata)]


def _episode(episode: Episode) -> list[Any]:
    turns = [
        [_messages(turn.observation), turn.response.text, len(turn.response.tokens), turn.reward, turn.parts, turn.info]
        for turn in episode.turns
    ]
    return [episode.status.value, _messages(episode.head), turns, episode.info]


def _messages(messages: Sequence[Message]) -> list[Any]:
    """Who said what; a medium by what it is, wherever it lay."""
    return [
        [message.role, [[block.text] if isinstance(block, Text) else [block.kind, block.key] for block in message.content]]
        for message in messages
    ]


def _written(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=repr)


def _digest(value: Any) -> str:
    return hashlib.blake2b(_written(value).encode(), digest_size=16).hexdigest()


# Invariants: a judgement is waited for at most (retries + 1) · (deadline + wait), once it has a place among those that
# run, and the wait names its term. Slow terms run in the daemon threads of a pool, so a judge that never returns can
# neither stop the run nor keep the process alive; their judgements, missing ones included, go to the cache, so that a
# resumed run meets the same ones, and equal content is judged once (``judgements.py``). That a term had to be asked
# again is counted, and said the first time and whenever it is ten times as often. A programming error in a term is said
# likewise, and not tried again.


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


# Invariant: what comes out is a function of what went in. In which order groups were begun or ended shows nowhere.


class GroupScoring:
    """``async with GroupScoring(scorer) as scoring: scoring.begin(group); …; groups = await scoring.finish()``."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._crowd = asyncio.TaskGroup()
        self._running: dict[str, asyncio.Task[Group]] = {}

    async def __aenter__(self) -> Self:
        await self._crowd.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._crowd.__aexit__(kind, error, trace)
        except BaseExceptionGroup as failed:
            raise first_error(failed) from failed

    def begin(self, group: Group) -> None:
        """Score a group from now on."""
        self._running[group.id] = self._crowd.create_task(self._scorer.score_group(group))

    async def finish(self) -> dict[str, Group]:
        """All groups that were begun, scored, by id."""
        return {id: await running for id, running in self._running.items()}


async def score_groups(scorer: Scorer, groups: Iterable[Group]) -> list[Group]:
    """Score every episode of every group."""
    async with GroupScoring(scorer) as scoring:
        for group in groups:
            scoring.begin(group)
        return list((await scoring.finish()).values())

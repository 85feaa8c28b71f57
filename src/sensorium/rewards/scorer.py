"""Scoring: every term judges every episode, under a deadline; a judge that fails gives a missing score.

Invariants: a judgement takes at most (retries + 1) · (deadline + wait) once it has a worker thread, and errors name its
term. Slow terms run in daemon threads, so a judge that never returns neither stops the run nor keeps the process alive.
Their judgements, missing ones included, are cached: a resumed run meets the same ones, and equal content is judged once.
"""

import asyncio
import hashlib
import json
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import isawaitable
from math import isfinite
from types import TracebackType
from typing import Any, Protocol, Self, TypeGuard, cast, get_args

from sensorium.cluster.event_loop import first_error, side_by_side
from sensorium.cluster.pool import CallOverdue, Worker, WorkerFailure, WorkerPool
from sensorium.data.lru import LRU
from sensorium.rewards.judges.judgements import message_contents
from sensorium.rewards.reward_term import ComparingTerm, FunctionTerm, GroupFunctionTerm, GroupTerm, RewardTerm, Term
from sensorium.vocabulary.episode import Episode, Group, Scope, Score, Segment, Status, Thread, Turn
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
from sensorium.vocabulary.task import Task

Scores = tuple[Score, ...]
SCOPES: tuple[str, ...] = get_args(Scope)
FORMS = "a number, a Score, a tuple of Scores, True or False, or {name: number}"
JUDGEMENTS_IN_MEMORY = 100_000

# Errors of the code itself. KeyError, IndexError and ValueError are left out: a service's odd answer raises those.
PROGRAMMING_ERRORS = (AttributeError, NameError, TypeError, ImportError, SyntaxError, NotImplementedError)


def scores_of(name: str, returned: Any, episode: Episode, others: Container[str] = ()) -> Scores:
    """The scores that the term ``name`` returned in one of FORMS; RewardFailure for anything else.

    True and False are 1 and 0 and also say right or wrong; a Score without a name gets the term's. A value that is not
    finite is missing. ``others`` are the names of the other terms, which a score may not have.
    """
    scores, error = attempt(_read_scores, name, returned, episode, others)
    if error is not None:  # ours, or raised by the returned object itself while it was read
        problem = printable(str(error)) if type(error) is ValueError else words(error)
        raise RewardFailure(f"reward term '{name}': {problem}") from error
    return tuple(scores)


def _read_scores(name: str, returned: Any, episode: Episode, others: Container[str]) -> list[Score]:
    scores: list[Score] = []
    if isinstance(returned, Mapping):
        for key, value in returned.items():
            try:
                part = text_of(key)
                scores.append(Score(part if part == name else f"{name}/{part}", number_of(value), correct=_verdict(value)))
            except ValueError as error:
                raise ValueError(
                    f"it returned an object in which {error}; its keys are texts and its values numbers"
                ) from error
    elif isinstance(returned, Score):
        scores = [_plain(returned, name)]
    elif isinstance(returned, list | tuple) and all(isinstance(score, Score) for score in returned):
        scores = [_plain(score, name) for score in returned]
    elif returned is not None and not isinstance(returned, list | tuple):
        try:
            scores = [Score(name, number_of(returned), correct=_verdict(returned))]
        except ValueError as error:
            raise ValueError(f"it must return {FORMS}, and {error}") from error
    if not scores:
        raise ValueError(f"it must return {FORMS}, not {shown(returned)}")
    for place, score in enumerate(scores):
        if score.name != name and score.name in others:
            raise ValueError(f"a score is named '{score.name}', which is the name of another term")
        _check_position(score, episode)
        if score.value is None:
            scores[place] = replace(score, reason=score.reason or f"reward term '{name}' gave no value and no reason")
        elif not isfinite(score.value):
            scores[place] = replace(score, value=None, correct=None, reason=f"the value {score.value} is not finite")
    return scores


def _verdict(returned: Any) -> bool | None:
    """Right or wrong by a bool of Python, numpy or torch; None for any other number."""
    is_bool = isinstance(returned, bool) or str(getattr(returned, "dtype", "")) in ("bool", "torch.bool")
    return truth_of(returned) if is_bool else None


def _plain(score: Score, term: str) -> Score:
    """A score whose fields have the types they are declared with; without a name it has the term's."""

    def span_of(span: Any) -> tuple[int, int]:
        if not isinstance(span, list | tuple) or len(span) != 2:
            raise ValueError(f"{shown(span)} is no pair of byte offsets")
        return whole_of(span[0]), whole_of(span[1])

    plain: dict[str, Any] = {}
    readers = {"name": text_of, "value": number_of, "correct": truth_of, "turn": whole_of, "span": span_of}
    for field, read in readers.items():
        given = getattr(score, field)
        try:
            plain[field] = None if given is None and field != "name" else read(given)
        except ValueError as error:
            raise ValueError(f"the {field} of a score: {error}") from error
    if not isinstance(score.scope, str) or score.scope not in SCOPES:
        raise ValueError(f"the scope of a score is one of {', '.join(SCOPES)}, not {shown(score.scope)}")
    reason = printable(score.reason) if isinstance(score.reason, str) else shown(score.reason)
    weight = 0.0 if isinstance(score.weight, int | float) and score.weight == 0 else 1.0  # 0: measured, not rewarded
    plain["name"] = plain["name"] or term
    return Score(**plain, weight=weight, scope=score.scope, reason=reason)


def _check_position(score: Score, episode: Episode) -> None:
    """Refuse a score of a turn or span that does not exist."""
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


class JudgementCache(Protocol):
    """Where judgements of slow terms are kept: a run's ledger, or an LRU in memory."""

    def get(self, key: str) -> Scores | None: ...

    def put(self, key: str, scores: Scores) -> None: ...


@dataclass(frozen=True)
class JudgementKeys:
    """The cache keys of one call, one for each episode: by content, and by content and episode id.

    Example: episodes a and b of a task both say "cat". The judge is asked about a; b gets the same scores from the cache.
    Had the judge failed for a, the missing score would be kept for a alone: a resumed run repeats it, and b is judged.
    """

    content: tuple[str, ...]
    own: tuple[str, ...]

    def look_up(self, cache: JudgementCache) -> list[Scores] | None:
        """The cached scores of every episode; None if any has none."""
        found = []
        for own, content in zip(self.own, self.content, strict=True):
            scores = cache.get(own)
            scores = cache.get(content) if scores is None else scores
            if scores is None:
                return None
            found.append(scores)
        return found

    def keep(self, cache: JudgementCache, judged: Sequence[Scores]) -> None:
        """Cache the scores; missing ones for their episode alone."""
        for own, content, scores in zip(self.own, self.content, judged, strict=True):
            cache.put(own if any(score.missing for score in scores) else content, scores)


def judgement_keys(term: str, task: Task, episodes: Sequence[Episode], *, deterministic: bool = True) -> JudgementKeys:
    """The keys of one call of the term with this identity: by all of the task and all that the episodes hold.

    A term that looks at anything else, or samples, has ``deterministic = False``: then the episode's id counts as well.
    """
    played = []
    for episode in episodes:
        turns = []
        for turn in episode.turns:
            text, tokens = turn.response.text, len(turn.response.tokens)
            turns.append([message_contents(turn.observation), text, tokens, turn.reward, turn.parts, turn.info])
        played.append([episode.status.value, message_contents(episode.head), turns, episode.info])
    whole = _digest([term, _task(task), played])
    content = [_digest([whole, i]) for i in range(len(episodes))]
    own = [_digest([key, episode.id]) for key, episode in zip(content, episodes, strict=True)]
    return JudgementKeys(tuple(content if deterministic else own), tuple(own))


def term_identity(name: str, options: Any, version: Any) -> str:
    """The identity of a term in the cache: its name in the recipe, its options and its version."""
    return _as_json([name, options, str(version)])


def task_digest(task: Task) -> str:
    """A digest of everything in a task; media count by content, wherever they lie."""
    return _digest(_task(task))


def _task(task: Task) -> list[Any]:
    spec = task.environment
    played = None if spec is None else [spec.name, dict(spec.options), spec.seed]
    return [task.id, message_contents(task.messages), task.answer, played, list(task.demonstration), dict(task.metadata)]


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=repr)


def _digest(value: Any) -> str:
    return hashlib.blake2b(_as_json(value).encode(), digest_size=16).hexdigest()


@dataclass
class TermCounts:
    """One term since the counts were last taken: calls, their seconds, retries, missing scores."""

    calls: int = 0
    retries: int = 0
    missing: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.calls += 1
        self.seconds += seconds
        self.longest_s = max(self.longest_s, seconds)


class Scorer:
    """Runs reward terms over episodes. ``noted`` is called with a line of text when a term has to be asked again.

    ``identities`` by term name: what tells its judgements from those of other terms (``term_identity``).
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
        self.judgements: JudgementCache = LRU(JUDGEMENTS_IN_MEMORY) if judgements is None else judgements
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
        """The group with a score from every term for every episode; failed and aborted episodes get missing scores."""
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
        """The scores of each episode by term: slow terms side by side in threads, instant ones in place."""
        slow: list[tuple[Term, Sequence[Episode]]] = []
        instant: list[tuple[Term, Sequence[Episode]]] = []
        for term, _ in self.terms:
            calls = [episodes] if judges_groups(term) else [(episode,) for episode in episodes]
            (instant if _is_instant(term) else slow).extend((term, call) for call in calls)
        asked = await side_by_side(self._cached(term, task, call) for term, call in slow) if slow else []
        found: dict[str, list[Scores]] = {term.name: [] for term, _ in self.terms}
        for (term, _), scores in zip(slow, asked, strict=True):
            found[term.name] += scores
        for term, call in instant:
            found[term.name] += self._asked_in_place(term, task, call)
        return found

    @property
    def comparing(self) -> ComparingTerm | None:
        """The first term that compares answers; it decides what the answer of an episode is."""
        return next((term for term, _ in self.terms if isinstance(term, ComparingTerm)), None)

    def extract(self, task: Task, episode: Episode) -> str | None:
        """The answer of a scored episode by the comparing term; None if it gave none or could not be judged."""
        term = self.comparing
        if term is None or not episode.turns or any(s.missing for s in episode.scores if s.name == term.name):
            return None
        answer, error = attempt(term.extract, task, episode)
        return printable(answer) if error is None and isinstance(answer, str) else None

    def take_counts(self) -> dict[str, TermCounts]:
        """The counts by term name since the last call."""
        taken, self._counts = self._counts, {name: TermCounts() for name in self._names}
        return taken

    def take_metrics(self) -> dict[str, float]:
        """For each slow term since counts were last taken: retries, and seconds of a call (mean and longest)."""
        slow = [term.name for term, _ in self.terms if not _is_instant(term)]
        row: dict[str, float] = {}
        for name, counted in self.take_counts().items():
            if name in slow:
                row[f"retries/{name}"] = counted.retries
                if counted.calls:
                    row[f"time/reward/{name}_mean_s"] = counted.seconds / counted.calls
                    row[f"time/reward/{name}_max_s"] = counted.longest_s
        return row

    def close(self) -> None:
        """Close the terms that hold processes or connections, each within the deadline."""
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

    def _asked_in_place(self, term: Term, task: Task, episodes: Sequence[Episode]) -> list[Scores]:
        """Ask an instant term; there is no event loop here, so it cannot be async."""
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
        """The scores of each episode of a call; an entry of a group that is none of FORMS is a missing score."""
        if not judges_groups(term):
            return [scores_of(term.name, returned, episodes[0], self._names)]
        listed, _ = attempt(lambda: returned.tolist() if getattr(returned, "shape", ()) else returned)
        if not isinstance(listed, list | tuple) or len(listed) != len(episodes):
            raise RewardFailure(
                f"reward term '{term.name}': score_group must return a list of {len(episodes)} entries, one for each "
                f"episode, not {shown(returned)}"
            )
        found: list[Scores] = []
        for entry, episode in zip(listed, episodes, strict=True):
            try:
                if entry is None:
                    raise RewardFailure(f"reward term '{term.name}' gave no score")
                found.append(scores_of(term.name, entry, episode, self._names))
            except RewardFailure as refused:
                found.append((Score(term.name, None, reason=str(refused)),))
        return found

    async def _cached(self, term: Term, task: Task, episodes: Sequence[Episode]) -> list[Scores]:
        """The scores of a slow term: from the cache, from an equal call that is running, or by asking it."""
        by_content = getattr(term, "deterministic", True) and not getattr(term, "caches_answers", False)
        keys = judgement_keys(self._identities.get(term.name, term.name), task, episodes, deterministic=by_content)
        found = keys.look_up(self.judgements)
        running = self._running.get(keys.content[0])
        if found is None and running is not None:
            found = await asyncio.shield(running)
            if found is None or any(score.missing for scores in found for score in scores):
                found = await self._persistently(term, task, episodes)  # its failure says nothing about this episode
                keys.keep(self.judgements, found)
                return found
        if found is not None:
            await self._recall(term, task, episodes, found)
            return found
        running = self._running[keys.content[0]] = asyncio.get_running_loop().create_future()
        try:
            found = await self._persistently(term, task, episodes)
            keys.keep(self.judgements, found)
            return found
        finally:
            del self._running[keys.content[0]]
            running.set_result(found)  # None if this call was cancelled

    async def _recall(self, term: Term, task: Task, episodes: Sequence[Episode], known: list[Scores]) -> None:
        """Report cached scores to a term that has ``recall_judgement``."""
        recall = getattr(term, "recall_judgement", None)
        if recall is None:
            return
        try:
            error = (await self._pool.call(lambda: recall(task, episodes, known), self.deadline_s)).error
            problem = "" if error is None else words(error)
        except WorkerFailure as failure:
            problem = f"it {failure}"
        if problem:
            self.noted(f"reward term '{term.name}' could not recall a judgement, whose scores remain: {problem}.")

    async def _persistently(self, term: Term, task: Task, episodes: Sequence[Episode]) -> list[Scores]:
        """Ask until it answers or retries run out. No retry for a faulty task or code, a refusal, or work given up."""
        for tries in range(1, self.retries + 2):
            found = await self._asked(term, task, episodes)
            if isinstance(found, list):
                return found
            reason = _reason(found) + (f" (tried {tries} times)" if tries > 1 else "")
            subject = f"reward term '{term.name}'"
            if isinstance(found, WorkGivenUp):
                self.noted(f"{subject} gives no score to {', '.join(episode.id for episode in episodes)}: {reason}.")
            if is_programming_error(found):
                problem = "has an error in its code and is not asked again for that episode"
                self._note_rarely(self._broken, term.name, f"{subject} {problem}: {reason}.")
                break
            if isinstance(found, TaskError | JudgeRefusal | WorkGivenUp):
                break
            if tries <= self.retries:
                self._counts[term.name].retries += 1
                counter = f"retries/{term.name} in the metrics counts on."
                self._note_rarely(self._retried, term.name, f"{subject} failed and is asked again: {reason}. {counter}")
                await asyncio.sleep(self.retry_wait_s)
        return _missing(term, reason, episodes)

    async def _asked(self, term: Term, task: Task, episodes: Sequence[Episode]) -> list[Scores] | BaseException:
        """The scores of one call in a thread, or its error."""
        try:
            call = await self._pool.call(lambda: asked_of(term, task, episodes), self.deadline_s)
        except CallOverdue as overdue:
            self._counts[term.name].add(self.deadline_s)
            return RewardFailure(f"reward term '{term.name}' {overdue}")
        except WorkerFailure as refused:
            return RewardFailure(f"{refused}, so '{term.name}' was not asked")
        self._counts[term.name].add(call.seconds)
        if isinstance(call.error, JudgeOffline | RecordError | WorkersLost):
            raise call.error  # a missing score would hide that the run is not repeated, or that it cannot continue
        if call.error is not None:
            return call.error
        try:
            return self._scores(term, call.value, episodes)
        except RewardFailure as refused:
            return refused

    def _note_rarely(self, counts: dict[str, int], name: str, text: str) -> None:
        """Note the 1st, 10th, 100th … event of a term."""
        counts[name] += 1
        if str(counts[name]).strip("0") == "1":
            self.noted(text if counts[name] == 1 else f"{text} That was the {counts[name]}th time.")


def is_programming_error(error: BaseException) -> bool:
    """True for an error of a term's code that a retry cannot fix.

    Two of them may come from what a service sent, and are retried: an attribute or item of an answer that is None
    ('NoneType' object …), and text of the answer that does not parse as Python (its file is called '<unknown>').
    """
    if not isinstance(error, PROGRAMMING_ERRORS) or "NoneType" in words(error):
        return False
    return not (isinstance(error, SyntaxError) and str(error.filename or "<").startswith("<"))


TRIALS, TRIAL_S = 3, 5.0  # tasks on which a function is tried at the start, and seconds that it may take


def trial_notes(terms: Sequence[tuple[Term, float]], tasks: Sequence[Task]) -> Iterator[str]:
    """A note for each function that fails on demonstrations of questions, or has an error in its code on an empty answer.

    Functions that are given the judges are not asked, nor is any about tasks of environments, of whose episodes little is
    known before one is played.
    """
    questions = [task for task in tasks if task.environment is None][:TRIALS]
    worker = Worker("trial of rewards") if questions else None
    for term, weight in terms:
        if not weight or worker is None or not isinstance(term, FunctionTerm | GroupFunctionTerm) or term.given_context:
            continue
        for task in questions:
            text = task.demonstration[0] if task.demonstration else ""
            if problem := _tried(worker, term, task, text):
                answer = "its demonstration" if text else "an empty answer"
                yield (
                    f"reward '{term.name}' fails on {answer}, tried with task {task.id}: {problem}. An episode without its "
                    "score is not trained on. Mend the function; if only this trial fails, nothing needs to change."
                )
                break
    if worker is not None:
        worker.stop()


def _tried(worker: Worker, term: Term, task: Task, text: str) -> str:
    """Why a function gave no score to an answer; empty if it did, takes too long, or may ask for more than was tried."""
    response = Segment("model", tuple(text.encode()) or (0,), text=text, logprobs=(0.0,) * max(1, len(text.encode())))
    thread = Thread((Segment("environment", (0,)), response), (False, True))
    turn = Turn(0, task.messages, response, 0, 1)
    episode = Episode("trial", task.id, "trial", 0, (thread,), (turn,), Status.FINISHED)
    call = worker.submit(lambda: asked_of(term, task, (episode,)), TRIAL_S)
    if not call.wait(TRIAL_S):
        return ""
    if isinstance(call.error, RewardFailure | TaskError):
        return ""
    if call.error is not None:
        return words(call.error) if text or is_programming_error(call.error) else ""
    values = list(call.value) if judges_groups(term) and isinstance(call.value, list | tuple) else [call.value]
    if len(values) != 1 or values[0] is None:
        return "" if values == [None] else f"score_group must return one entry for each episode, not {shown(call.value)}"
    _, error = attempt(scores_of, term.name, values[0], episode)
    return "" if error is None else str(error)


def judges_groups(term: Term) -> TypeGuard[GroupTerm]:
    """True for a term that is asked about a whole group at once."""
    return callable(getattr(term, "score_group", None))


def asked_of(term: Term, task: Task, episodes: Sequence[Episode]) -> Any:
    """The return value of a term for the episodes of one call."""
    if judges_groups(term):
        return term.score_group(task, tuple(episodes))
    return cast(RewardTerm, term).score(task, episodes[0])


def _missing(term: Term, reason: str, episodes: Sequence[Episode]) -> list[Scores]:
    return [(Score(term.name, None, reason=reason),) for _ in episodes]


def _is_instant(term: Term) -> bool:
    return bool(getattr(term, "instant", False))


def _reason(error: BaseException) -> str:
    ours = isinstance(error, RewardFailure | TaskError | WorkGivenUp) and str(error)
    return printable(str(error)) if ours else words(error)


class GroupScoring:
    """Scores groups as they come: ``async with GroupScoring(scorer) as scoring: scoring.begin(group); …``.

    Invariant: ``await scoring.finish()`` does not depend on the order in which groups began or ended.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._tasks = asyncio.TaskGroup()
        self._running: dict[str, asyncio.Task[Group]] = {}

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._tasks.__aexit__(kind, error, trace)
        except BaseExceptionGroup as failed:
            raise first_error(failed) from failed

    def begin(self, group: Group) -> None:
        self._running[group.id] = self._tasks.create_task(self._scorer.score_group(group))

    async def finish(self) -> dict[str, Group]:
        """All groups that were begun, scored, by id."""
        return {id: await running for id, running in self._running.items()}


async def score_groups(scorer: Scorer, groups: Iterable[Group]) -> list[Group]:
    """Score every episode of every group."""
    async with GroupScoring(scorer) as scoring:
        for group in groups:
            scoring.begin(group)
        return list((await scoring.finish()).values())

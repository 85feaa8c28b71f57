"""The facts that rules look at: a step's row of metrics, its episodes, and a digest of the run's earlier rows.

``History`` is a function of the rows alone, so that a resumed run reads it back from metrics.jsonl and judges as the
uninterrupted one did.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite

from sensorium.recipe.schema import Recipe
from sensorium.rewards.reward_term import ComparingTerm
from sensorium.rewards.scorer import Scorer
from sensorium.runs.metrics import SightResult
from sensorium.vocabulary.episode import Episode, Group, Score, Status
from sensorium.vocabulary.metric_names import REPLACEMENTS
from sensorium.vocabulary.task import Task

Row = Mapping[str, float]
RECENT = 5
LEVEL = "planner/level"  # tasks of another level of a curriculum are harder or easier
UNPLAYED = (Status.FAILED, Status.ABORTED)


def has_trained(row: Row) -> bool:
    """True if a step moved the weights by a gradient of its own: not if it was skipped or every advantage was zero."""
    return not row.get("policy/skipped") and (row.get("policy/grad_norm", 0.0) > 0 or row.get("value/grad_norm", 0.0) > 0)


class History:
    """A digest of the rows so far. ``rows`` are the last few of RL; ``first`` is RL's first.

    ``held_out`` is the first held-out accuracy on record: after the warm start, or at the first evaluation of RL.
    ``best`` are the best means of a few rows, since a curriculum's ``level`` last changed. ``losses`` counts processes that
    were replaced and what was done again for them, since the run began.
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self.rows: deque[Row] = deque(maxlen=RECENT)
        self.first: Row = {}
        self.steps = self.trained = self.idle = 0
        self.rl_steps = self.rl_trained = 0
        self.best: dict[str, float] = {}
        self.level: float | None = None
        self.held_out: float | None = None
        self.term_range: dict[str, tuple[float, float]] = {}
        self.losses: dict[str, float] = {}
        self._counted: dict[str, float] = {}
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Add a step's row."""
        row = {name: float(value) for name, value in row.items() if isfinite(value)}  # as metrics.jsonl keeps it
        rl, trained = "groups/trained" in row, has_trained(row)
        self.steps += 1
        self.trained += trained
        self.rl_steps += rl
        self.rl_trained += rl and trained
        solved = row.get("accuracy") == 1.0 and self.trained > 0  # what is known already needs no update
        self.idle = 0 if trained else self.idle + (not solved)
        if self.held_out is None:
            self.held_out = row.get("eval/accuracy")
        self.losses = self.losses_with(row)
        self._counted |= {name: row[name] for name in REPLACEMENTS if name in row}
        if rl:
            self.first = self.first or row
            self.rows.append(row)
            if row.get(LEVEL) != self.level:
                self.level, self.best = row.get(LEVEL), {}
            for name in ("accuracy", "reward/mean"):
                if known := [one[name] for one in self.rows if name in one and one.get(LEVEL) == self.level]:
                    self.best[name] = max(self.best.get(name, -float("inf")), sum(known) / len(known))
            for name, value in row.items():
                if name.startswith("reward/"):
                    low, high = self.term_range.get(name, (value, value))
                    self.term_range[name] = (min(low, value), max(high, value))

    def resumed(self) -> None:
        """The processes of the rows so far are gone: counts of those that follow begin at 0."""
        self._counted = {}

    def losses_with(self, row: Row) -> dict[str, float]:
        """The losses with those of the row that follows. A count that is lower than before has restarted at 0."""
        counts = {name: (row[name], self._counted.get(name, 0.0)) for name in REPLACEMENTS if name in row}
        grown = {name: now - (before if now >= before else 0.0) for name, (now, before) in counts.items()}
        return self.losses | {name: self.losses.get(name, 0.0) + more for name, more in grown.items() if more > 0}


@dataclass(frozen=True)
class Evidence:
    """The episodes of a step, and why those that were left out were (by episode id).

    ``unanswered``: by term that compares answers, in how many of how many episodes it found none. ``given_up``: why fast
    ways to compute were given up in this process so far. ``demonstrations``: how many of how many demonstrations of tasks
    like these got no reward themselves, and how many go on after ``rollout.max_turns``; zeros where there are none or
    nothing made us look. ``answers``: how often each answer was given, and known for the tasks.
    """

    groups: tuple[Group, ...] = ()
    fates: Mapping[str, str] = field(default_factory=dict)
    unanswered: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    given_up: tuple[str, ...] = ()
    demonstrations: tuple[int, int, int] = (0, 0, 0)
    answers: tuple[Mapping[str, int], Mapping[str, int]] = field(default_factory=lambda: ({}, {}))


@dataclass(frozen=True)
class HeldOutResult:
    """Accuracy of the model on the held-out tasks as it was after a step (0: before the first), with its 95 % interval."""

    step: int
    accuracy: float
    low: float
    high: float

    @property
    def text(self) -> str:
        """Accuracy and interval in percent: ``60.9 % [48.7 to 71.9]``."""
        return f"{100 * self.accuracy:.1f} % [{100 * self.low:.1f} to {100 * self.high:.1f}]"


@dataclass(frozen=True)
class StepFacts:
    """Everything a rule may look at. ``sight`` is what the last sight check found, ``held_out`` every evaluation so far."""

    recipe: Recipe
    step: int
    row: Row = field(default_factory=dict)
    history: History = field(default_factory=History)
    evidence: Evidence = field(default_factory=Evidence)
    sight: tuple[SightResult, ...] = ()
    held_out: tuple[HeldOutResult, ...] = ()

    @property
    def supervised(self) -> bool:
        return self.step <= self.recipe.warm_start.steps

    @property
    def episodes(self) -> list[Episode]:
        """Every episode that was played to its end, well or not."""
        return [episode for group in self.evidence.groups for episode in group.episodes]

    @property
    def played(self) -> list[tuple[Task, Episode]]:
        """Episodes that did not fail, with their tasks."""
        return [(group.task, e) for group in self.evidence.groups for e in group.episodes if e.status not in UNPLAYED]

    def recent(self, name: str) -> list[float]:
        """A metric in the last rows of RL and in this one, oldest first."""
        return [row[name] for row in (*self.history.rows, self.row) if name in row]


def lacks_answer(task: Task, score: Score) -> bool:
    """True if a term could not judge because the task has no answer."""
    asked_others = any(who in score.reason for who in ("judge '", "reward term '"))  # and they failed, which is the cause
    return score.missing and task.answer is None and task.environment is None and not asked_others


def unanswered(scorer: Scorer, groups: Iterable[Group], most: int = 64) -> dict[str, tuple[int, int]]:
    """By term that compares answers: in how many episodes it found none, of how many it could judge (``most`` at most).

    Only terms that are plain computation are asked: a slow one would be waited for.
    """
    found: dict[str, tuple[int, int]] = {}
    for term, _ in scorer.terms:
        if not isinstance(term, ComparingTerm) or not getattr(term, "instant", False):
            continue
        known = [(g.task, e) for g in groups for e in g.episodes if e.turns and was_judged(e, term.name)][:most]
        if known:
            without = 0
            for task, episode in known:
                try:
                    without += term.extract(task, episode) is None
                except Exception:  # a user's term that fails here has found nothing
                    without += 1
            found[term.name] = (without, len(known))
    return found


def answer_counts(scorer: Scorer, groups: Iterable[Group], most: int = 1024) -> tuple[Counter[str], Counter[str]]:
    """How often each answer was given, by the term that compares first, and how often each is known for the tasks.

    As in ``unanswered``, only a term that is plain computation is asked. Both are empty where a task has no answer.
    """
    given, known = Counter[str](), Counter[str]()
    if not getattr(scorer.comparing, "instant", False):
        return given, known
    for group in groups:
        first = next(iter(group.task.answer), None) if isinstance(group.task.answer, list | tuple) else group.task.answer
        if first is None:
            return Counter(), Counter()
        known["".join(filter(str.isalnum, str(first).casefold()))] += 1
        for episode in group.episodes:
            if given.total() < most and (answer := scorer.extract(group.task, episode)) is not None:
                given[answer] += 1
    return given, known


def was_judged(episode: Episode, term: str) -> bool:
    """True if a term gave the episode a score."""
    return any(score.name == term and not score.missing for score in episode.scores)

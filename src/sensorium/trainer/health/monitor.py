"""What can be known to go wrong before anything is spent: refused, or said, at the start."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sensorium.learner.learner_protocol import RunLearner
from sensorium.recipe.schema import Recipe
from sensorium.report.watcher import Watcher
from sensorium.runs.metrics import Finding, Notice, SightResult, State, read_health, read_metrics, write_notice, write_sight
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.health.facts import Evidence, HeldOutResult, History, Row, StepFacts, held_out_result
from sensorium.trainer.health.rules import IN_A_ROW, examine
from sensorium.vocabulary.errors import NonFiniteModel, NothingTrained, RecordError

# The learner is asked where a model is about to be evaluated or saved, and where the engine could not sample from it.
# So a step that goes well pays nothing for it.


Complete = Callable[[], Sequence[int]]
"""Finds the steps with a complete checkpoint."""


def refuse_ruined(learner: RunLearner, step: int, complete: Complete) -> None:
    """Raise if the model, as the update of ``step`` left it, must not be saved."""
    problem = learner.problem()
    if problem:
        way_out = _way_out(complete())
        raise NonFiniteModel(f"after step {step} the model {problem}, so it is ruined and was not saved. {way_out}")


def _way_out(complete: Sequence[int]) -> str:
    kept = ", ".join(map(str, complete)) or "none"
    return (
        f"Complete checkpoints are of step: {kept}. Lower optimizer.lr or optimizer.clip_norm (of a warm start: "
        "warm_start.optimizer) and start a new run, from one of them if you like (model.path)."
    )


# Invariant: what is told at a step is a function of the rows so far (metrics.jsonl), of the sight checks and
# evaluations on record and of the step's facts. So a resumed run tells what the uninterrupted one would have told.


FIRST_REMINDER = 10
CLEAR_STEPS = 5
"""Steps without it after which a finding is over; one that comes and goes is told once."""
BY_SIGHT_CHECK = frozenset({"blind"})
"""Findings that only a sight check can make or take back."""
DAMAGING = frozenset({"sudden_loss", "learning_rate"})
"""Findings after which a checkpoint is not to be trusted over an earlier one."""
NO_CAUSE = frozenset({"lost_processes", "slower_computing"})
"""Findings that do not explain why nothing was trained: what died was replaced, and its work was done again."""


@dataclass(frozen=True)
class Course:
    """A finding that lasts: when it began, when it was last found, when it is told again."""

    began: int
    last: int
    remind: int


class Courses:
    """Which findings last. ``advance`` says what is to be told."""

    def __init__(self) -> None:
        self.open: dict[str, Course] = {}

    def advance(self, step: int, found: Iterable[str], *, looked: bool = True) -> list[tuple[str, State]]:
        """Take in what was found at a step; ``looked`` says whether that includes a new sight check.

        A finding of the sight check stands until the next one: between them it is neither told again nor over.
        """
        told: list[tuple[str, State]] = []
        for rule in found:
            course = self.open.get(rule)
            if course is None:
                self.open[rule] = Course(step, step, step + FIRST_REMINDER)
                told.append((rule, "began"))
            elif step >= course.remind and (looked or rule not in BY_SIGHT_CHECK):
                self.open[rule] = Course(course.began, step, step + (step - course.began))
                told.append((rule, "goes on"))
            else:
                self.open[rule] = replace(course, last=step)
        over = [rule for rule, course in self.open.items() if step - course.last >= CLEAR_STEPS]
        over += [rule for rule in BY_SIGHT_CHECK & self.open.keys() - set(over) if looked and self.open[rule].last < step]
        for rule in over:
            del self.open[rule]
            told.append((rule, "ended"))
        return told


LOST = ("the metrics say so, but what was told of it is no longer in health.jsonl", False)
"""What is told of a finding of before the run was resumed, if the file that held its text was taken away."""


class Health:
    """Examines the steps of a run. ``damaged`` is true while checkpoints should not push out earlier ones."""

    def __init__(self, recipe: Recipe, directory: RunDirectory, watcher: Watcher) -> None:
        self.recipe, self.directory, self.watcher = recipe, directory, watcher
        self.history, self.courses = History(), Courses()
        self.sight: tuple[SightResult, ...] = ()
        self.held_out: tuple[HeldOutResult, ...] = ()
        self._rows_lost = False
        self._texts: dict[str, tuple[str, bool]] = {}  # by rule: what was last found, and whether it is grave
        self._told_grave: dict[str, bool] = {}  # by rule: whether it was grave when a notice last named it

    @property
    def damaged(self) -> bool:
        """True while a finding says that updates have damaged the model."""
        return not DAMAGING.isdisjoint(self.courses.open)

    def restore(self, done: int = 0) -> None:
        """Read back what the rows of this run directory come to; ``done`` steps were made, or those that the rows tell."""
        record = read_health(self.directory.health)
        for notice in record.notices:
            self._texts[notice.rule] = (notice.text, notice.grave)
            self._told_grave[notice.rule] = notice.grave
        self.sight = record.sight[-1][1] if record.sight else ()
        self._restore_held_out()
        self.courses.advance(0, [notice.rule for notice in record.notices if notice.step == 0])
        for row in read_metrics(self.directory.metrics):
            self.history.add(row)
            found = [name.removeprefix("health/") for name in row if name.startswith("health/")]
            self.courses.advance(row["step"], found, looked="sight/shown" in row)
            done = max(done, int(row["step"]))
        self.history.resumed()
        self._rows_lost = self.history.steps < done

    def remind(self) -> None:
        """Tell the watchers of a resumed run what lasts; of a sight check what it found then, since it is not made anew."""
        for rule, course in self.courses.open.items():
            text, grave = self._texts.get(rule, LOST)
            state: State = "began" if rule in BY_SIGHT_CHECK else "goes on"
            self.watcher.diagnosed(Notice(course.began, rule, state, text, grave))

    def _restore_held_out(self) -> None:
        """Read back the evaluations; the run goes on without them if one is damaged."""
        self.held_out = ()
        try:
            for summary in self.directory.summaries():
                if summary["name"] == "eval":
                    self.evaluated(summary["step"], summary)
        except RecordError as error:
            self.held_out = ()
            self.watcher.noted(f"health does not compare with the evaluations so far, since one cannot be read: {error}")

    def evaluated(self, step: int, summary: Mapping[str, Any]) -> None:
        """Take in the summary of an evaluation on the held-out tasks."""
        result = held_out_result(step, summary)
        if result is not None:
            self.held_out += (result,)

    def look(self, step: int, results: Sequence[SightResult]) -> dict[str, float]:
        """Take in a sight check; returns its metrics."""
        self.sight = tuple(results)
        if results:
            write_sight(self.directory.health, step, list(results))
        if step == 0:
            self._tell(0, examine(StepFacts(self.recipe, 0, sight=self.sight)))
        row = {f"sight/{found.kind}_blanked": found.blanked for found in results}
        return row | ({"sight/shown": results[0].shown} if results else {})

    def examine(self, step: int, row: Row, evidence: Evidence) -> dict[str, float]:
        """Judge a step; returns the metrics of what was found, ``health/<rule>`` 1 each."""
        found = examine(StepFacts(self.recipe, step, row, self.history, evidence, self.sight, self.held_out))
        self._tell(step, found, looked="sight/shown" in row)
        self.history.add(row)
        return {f"health/{finding.rule}": 1.0 for finding in found}

    @property
    def idle(self) -> bool:
        """True if no step has made an update for as long as the recipe allows."""
        limit = self.recipe.health.stop_after
        return 0 < limit <= self.history.idle

    def refuse_untrained(self) -> None:
        """Raise at the end of a run that was idle, or in which nothing, or nothing of RL, was trained.

        In one or two steps it may be chance that all attempts were paid the same: that is noted, and ``untrained`` says so.
        """
        told = self.untrained()
        if not told:
            return
        chance = self.history.rl_steps < IN_A_ROW and not self.idle
        if chance and not self.courses.open.keys() & {"no_update", "no_answer"}:
            self.watcher.noted(told)
        else:
            saved = f"What the run has is saved in '{self.directory.path}'."
            seen = "Why stands in the lines “health” above, in health.jsonl and on top of the report."
            short = f"{self._stage()}. {seen} {saved}" if self.courses.open.keys() - NO_CAUSE else ""
            raise NothingTrained(f"{told} {saved}", short)

    def untrained(self) -> str:
        """Why the run as it is has trained nothing, or stopped; empty if it has."""
        stage = self._stage()
        return f"{stage}. {self._causes()}" if stage else ""

    def _stage(self) -> str:
        """Which steps have trained nothing; empty if that cannot be said. Rows that are lost may have told of an update."""
        history, limit = self.history, self.recipe.health.stop_after
        if self.idle and history.steps < self.recipe.total_steps:
            return f"the last {history.idle} steps made no update, so the run was stopped (health.stop_after: {limit})"
        if self._rows_lost:
            return ""
        if history.steps and not history.trained:
            return f"none of the {history.steps} steps made an update"
        if history.rl_steps and not history.rl_trained:
            return f"none of the {history.rl_steps} steps of RL made an update, only the warm start did"
        return ""

    def _causes(self) -> str:
        """What is known of the reasons, the grave ones first."""
        known = sorted(
            (self._texts.get(rule, LOST) for rule in self.courses.open if rule not in NO_CAUSE),
            key=lambda told: not told[1],
        )
        if not known:
            return "In every step all attempts at a task were paid the same, so there was nothing to tell them apart by."
        return " ".join(text[:1].upper() + text[1:] + "." for text, _ in known)

    def _tell(self, step: int, found: Sequence[Finding], *, looked: bool = True) -> None:
        worse = [f.rule for f in found if f.grave and f.rule in self.courses.open and self._told_grave.get(f.rule) is False]
        self._texts |= {finding.rule: (finding.text, finding.grave) for finding in found}
        told = self.courses.advance(step, [finding.rule for finding in found], looked=looked)
        told += [(rule, "goes on") for rule in worse if (rule, "goes on") not in told]  # at once, and not when it is due
        for rule, state in told:
            text, grave = self._texts.get(rule, LOST)
            notice = Notice(step, rule, state, text, grave)
            self._told_grave[rule] = grave
            write_notice(self.directory.health, notice)
            self.watcher.diagnosed(notice)


def run_untrained(directory: RunDirectory, recipe: Recipe) -> str:
    """Why the run in a directory has trained nothing; empty if it has. For a command's exit code."""
    health = Health(recipe, directory, Watcher())
    health.restore()
    return health.untrained()

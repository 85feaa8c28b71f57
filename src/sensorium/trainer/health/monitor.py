"""The health of a run: which findings of the rules begin, last and end, and how they are reported.

Invariant: the report of a step is a function of the rows so far (metrics.jsonl), of the sight checks and evaluations on
record and of the step's facts. So a resumed run reports what the uninterrupted one would have reported.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sensorium.learner.learner_protocol import RunLearner
from sensorium.recipe.schema import Recipe
from sensorium.report.watcher import Watcher
from sensorium.runs.metrics import (
    OF_THE_MACHINE,
    Finding,
    Notice,
    SightResult,
    State,
    read_health,
    read_metrics,
    write_notice,
    write_sight,
)
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.health.facts import Evidence, HeldOutResult, History, Row, StepFacts
from sensorium.trainer.health.rules import IN_A_ROW, examine
from sensorium.vocabulary.errors import NonFiniteModel, NothingTrained, RecordError

FIRST_REMINDER = 10
CLEAR_STEPS = 5  # steps without a finding after which it is over; one that comes and goes is reported once
BY_SIGHT_CHECK = frozenset({"blind"})  # findings that only a sight check can make or end
DAMAGING = frozenset({"sudden_loss", "learning_rate"})  # findings after which an earlier checkpoint is to be preferred
NO_CAUSE = frozenset(OF_THE_MACHINE)  # none explains why nothing was trained


def refuse_ruined(learner: RunLearner, step: int, complete: Callable[[], Sequence[int]]) -> None:
    """Raise if the model, as the update of ``step`` left it, must not be saved; ``complete`` finds earlier checkpoints.

    Called before a model is evaluated or saved, and where the engine could not sample from it, not at every step.
    """
    if problem := learner.problem():
        kept = ", ".join(map(str, complete())) or "none"
        raise NonFiniteModel(
            f"after step {step} the model {problem}, so it is ruined and was not saved. Complete checkpoints are of step: "
            f"{kept}. Lower optimizer.lr or optimizer.clip_norm (of a warm start: warm_start.optimizer) and start a new "
            "run, from one of them if you like (model.path)."
        )


@dataclass(frozen=True)
class Course:
    """A finding that lasts: the steps at which it began, was last found, and is reported again."""

    began: int
    last: int
    remind: int


class Courses:
    """Which findings last."""

    def __init__(self) -> None:
        self.open: dict[str, Course] = {}

    def advance(self, step: int, found: Iterable[str], *, looked: bool = True) -> list[tuple[str, State]]:
        """Add the findings of a step; returns what to report. ``looked``: they include a new sight check.

        A finding of the sight check lasts until the next one: between them it is neither reported again nor over.
        """
        changes: list[tuple[str, State]] = []
        for rule in found:
            course = self.open.get(rule)
            if course is None:
                self.open[rule] = Course(step, step, step + FIRST_REMINDER)
                changes.append((rule, "began"))
            elif step >= course.remind and (looked or rule not in BY_SIGHT_CHECK):
                self.open[rule] = Course(course.began, step, step + (step - course.began))
                changes.append((rule, "goes on"))
            else:
                self.open[rule] = replace(course, last=step)
        over = [rule for rule, course in self.open.items() if step - course.last >= CLEAR_STEPS]
        over += [rule for rule in BY_SIGHT_CHECK & self.open.keys() - set(over) if looked and self.open[rule].last < step]
        for rule in over:
            del self.open[rule]
            changes.append((rule, "ended"))
        return changes


# Text of a finding from before the run was resumed, if the file that held it was taken away.
LOST = ("the metrics say so, but its text is no longer in health.jsonl", False)


class Health:
    """Examines the steps of a run. ``damaged`` is true while checkpoints should not push out earlier ones."""

    def __init__(self, recipe: Recipe, directory: RunDirectory, watcher: Watcher) -> None:
        self.recipe, self.directory, self.watcher = recipe, directory, watcher
        self.history, self.courses = History(), Courses()
        self.sight: tuple[SightResult, ...] = ()
        self.held_out: tuple[HeldOutResult, ...] = ()
        self._rows_lost = False
        self._texts: dict[str, tuple[str, bool]] = {}  # by rule: what was last found, and whether it is grave
        self._reported_grave: dict[str, bool] = {}  # by rule: whether it was grave when a notice last named it

    @property
    def damaged(self) -> bool:
        """True while a finding says that updates have damaged the model."""
        return not DAMAGING.isdisjoint(self.courses.open)

    def restore(self, done: int = 0) -> None:
        """Read back the rows of this run directory; ``done`` steps were made, or as many as there are rows."""
        record = read_health(self.directory.health)
        for notice in record.notices:
            self._texts[notice.rule] = (notice.text, notice.grave)
            self._reported_grave[notice.rule] = notice.grave
        self.sight = record.sight[-1][1] if record.sight else ()
        self.held_out = ()
        try:
            for summary in self.directory.summaries():
                if summary["name"] == "eval":
                    self.evaluated(summary["step"], summary)
        except RecordError as error:
            self.held_out = ()
            self.watcher.noted(f"health does not compare with the evaluations so far, since one cannot be read: {error}")
        self.courses.advance(0, [notice.rule for notice in record.notices if notice.step == 0])
        for row in read_metrics(self.directory.metrics):
            self.history.add(row)
            found = [name.removeprefix("health/") for name in row if name.startswith("health/")]
            self.courses.advance(row["step"], found, looked="sight/shown" in row)
            done = max(done, int(row["step"]))
        self.history.resumed()
        self._rows_lost = self.history.steps < done

    def remind(self) -> None:
        """Give the watchers of a resumed run the findings from before it that last, those of step 0 included."""
        for rule, course in self.courses.open.items():
            text, grave = self._texts.get(rule, LOST)
            self.watcher.diagnosed(Notice(course.began, rule, "before", text, grave))

    def evaluated(self, step: int, summary: Mapping[str, Any]) -> None:
        """Add an evaluation on the held-out tasks."""
        accuracy, interval = summary.get("accuracy"), summary.get("interval")
        if accuracy is not None and interval:
            self.held_out += (HeldOutResult(step, accuracy, *interval),)

    def look(self, step: int, results: Sequence[SightResult]) -> dict[str, float]:
        """Add a sight check; returns its metrics."""
        self.sight = tuple(results)
        if results:
            write_sight(self.directory.health, step, list(results))
        if step == 0:
            self._report(0, examine(StepFacts(self.recipe, 0, sight=self.sight)))
        row = {f"sight/{found.kind}_blanked": found.blanked for found in results}
        return row | ({"sight/shown": results[0].shown} if results else {})

    def examine(self, step: int, row: Row, evidence: Evidence) -> dict[str, float]:
        """Judge a step; returns the metrics of what was found, ``health/<rule>`` 1 each."""
        found = examine(StepFacts(self.recipe, step, row, self.history, evidence, self.sight, self.held_out))
        self._report(step, found, looked="sight/shown" in row)
        self.history.add(row)
        return {f"health/{finding.rule}": 1.0 for finding in found}

    @property
    def idle(self) -> bool:
        """True if no step has made an update for as long as the recipe allows."""
        limit = self.recipe.health.stop_after
        return 0 < limit <= self.history.idle

    def refuse_untrained(self) -> None:
        """Raise at the end of a run that was idle, or in which nothing, or nothing of RL, was trained.

        In one or two steps it may be chance that all attempts got the same reward: that is only noted.
        """
        reason = self.untrained()
        if not reason:
            return
        chance = self.history.rl_steps < IN_A_ROW and not self.idle
        if chance and not self.courses.open.keys() & {"no_update", "no_answer"}:
            self.watcher.noted(reason)
        else:
            saved = f"What the run has is saved in '{self.directory.path}'."
            seen = "Why is in the lines “health” above, in health.jsonl and on top of the report."
            short = f"{self._stage()}. {seen} {saved}" if self.courses.open.keys() - NO_CAUSE else ""
            raise NothingTrained(f"{reason} {saved}", short)

    def untrained(self) -> str:
        """Why the run so far has trained nothing, or was stopped; empty if it has trained."""
        stage = self._stage()
        if not stage:
            return ""
        known = [self._texts.get(rule, LOST) for rule in self.courses.open if rule not in NO_CAUSE]
        if not known:
            return f"{stage}. In every step all attempts at a task got the same reward, so none was better than another."
        causes = (text[:1].upper() + text[1:] + "." for text, _ in sorted(known, key=lambda cause: not cause[1]))
        return f"{stage}. {' '.join(causes)}"

    def _stage(self) -> str:
        """Which steps have trained nothing; empty if that is unknown, since rows are lost that may have had an update."""
        history, limit = self.history, self.recipe.health.stop_after
        if self.idle and history.steps < self.recipe.total_steps:
            last = "the last step" if history.idle == 1 else f"the last {history.idle} steps"
            return f"{last} made no update, so the run was stopped (health.stop_after: {limit})"
        if self._rows_lost:
            return ""
        if history.steps and not history.trained:
            return _no_update(history.steps)
        if history.rl_steps and not history.rl_trained:
            return f"{_no_update(history.rl_steps, ' of RL')}, only the warm start did"
        return ""

    def _report(self, step: int, found: Sequence[Finding], *, looked: bool = True) -> None:
        worse = [
            f.rule for f in found if f.grave and f.rule in self.courses.open and self._reported_grave.get(f.rule) is False
        ]
        self._texts |= {finding.rule: (finding.text, finding.grave) for finding in found}
        changes = self.courses.advance(step, [finding.rule for finding in found], looked=looked)
        changes += [(rule, "goes on") for rule in worse if (rule, "goes on") not in changes]  # at once, before it is due
        for rule, state in changes:
            text, grave = self._texts.get(rule, LOST)
            notice = Notice(step, rule, state, text, grave)
            self._reported_grave[rule] = grave
            write_notice(self.directory.health, notice)
            self.watcher.diagnosed(notice)


def _no_update(steps: int, of: str = "") -> str:
    return f"the only step{of} made no update" if steps == 1 else f"none of the {steps} steps{of} made an update"


def run_untrained(directory: RunDirectory, recipe: Recipe) -> str:
    """Why the run in a directory has trained nothing; empty if it has. For a command's exit code."""
    health = Health(recipe, directory, Watcher())
    health.restore()
    return health.untrained()

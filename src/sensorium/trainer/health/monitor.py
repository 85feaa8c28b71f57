"""What can be known to go wrong before anything is spent: refused, or said, at the start."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sensorium.learner.learner_protocol import RunLearner
from sensorium.recipe.names import resolve
from sensorium.recipe.schema import Recipe
from sensorium.report.watcher import Watcher
from sensorium.runs.findings import Finding, Notice, SightResult, State, read_health, write_notice, write_sight
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.health.facts import Evidence, HeldOutResult, History, Row, StepFacts, held_out_result
from sensorium.trainer.health.rules import IN_A_ROW, LARGEST_RATE, examine
from sensorium.vocabulary.errors import NonFiniteModel, NothingTrained, RecordError, TaskError
from sensorium.vocabulary.task import Task

SMALLEST_RATE = 1e-10


def refuse_without_demonstrations(recipe: Recipe, tasks: Sequence[Task]) -> None:
    """Refuse a warm start of tasks none of which has anything to learn from; ``tasks`` are a few of each source."""
    steps = recipe.warm_start.steps
    if steps and tasks and not any(has_demonstration(task) for task in tasks):
        raise TaskError(
            f"warm_start.steps is {steps}, but none of {len(tasks)} tasks looked at has a demonstration to learn from (the "
            f"first is {tasks[0].id}). Give the rows a 'demonstration' (the response to learn, such as "
            "'<answer>7</answer>'; with columns: columns.demonstration), their environment a method demonstrate (the "
            "adapters of Gymnasium and OpenEnv have none), or set warm_start.steps: 0."
        )


def start_notes(recipe: Recipe, tasks: Sequence[Task]) -> Iterator[str]:
    """What is likely a mistake, but may be meant."""
    lacking = [task for task in tasks if not has_demonstration(task)] if recipe.warm_start.steps else []
    if lacking:
        yield (
            f"{len(lacking)} of {len(tasks)} tasks looked at have no demonstration; the warm start leaves such tasks out. "
            f"The first is {lacking[0].id}."
        )
    if recipe.cluster.environments and tasks and all(task.environment is None for task in tasks):
        yield (
            f"cluster.environments is {recipe.cluster.environments}, and the {len(tasks)} tasks looked at are questions, "
            "which the driver plays in place: unless later rows name an environment, the workers have nothing to do."
        )
    sections = {"optimizer": recipe.optimizer if recipe.steps else None}
    sections["warm_start.optimizer"] = recipe.warm_start.optimizer if recipe.warm_start.steps else None
    for name, section in sections.items():
        if section is not None and section.lr > LARGEST_RATE:
            yield (
                f"{name}.lr {section.lr:g} is larger than most weights are, and AdamW moves every weight by about as much "
                "in each update: the model will be ruined. 1e-6 to 1e-5 is usual for whole models."
            )
        if section is not None and section.lr < SMALLEST_RATE:
            yield (
                f"{name}.lr {section.lr:g} is so small that no weight will change visibly: updates are made, nothing is "
                "learned. 1e-6 to 1e-5 is usual for whole models."
            )
        steps = recipe.steps if name == "optimizer" else recipe.warm_start.steps
        if section is not None and section.warmup_steps >= steps:
            yield (
                f"{name}.warmup_steps is {section.warmup_steps} and there are {steps} steps, so the learning rate never "
                f"reaches {section.lr:g}; the last step has {section.lr * steps / (section.warmup_steps + 1):.1g} or so."
            )


def long_demonstrations(recipe: Recipe, tasks: Sequence[Task], tokens: Callable[[str], int]) -> Iterator[str]:
    """Demonstrations that the model could not write: ``tokens`` counts those of a response, its stop token included."""
    if not recipe.warm_start.steps:
        return
    limit = recipe.rollout.max_new_tokens
    lengths = [tokens(text) for task in tasks for text in task.demonstration]
    if long := [length for length in lengths if length > limit]:
        yield (
            f"{len(long)} of {len(lengths)} demonstrations looked at take up to {max(long)} tokens with the stop token, "
            f"and rollout.max_new_tokens is {limit}: responses like them will be cut. Raise it to {max(long)} at least."
        )


def has_demonstration(task: Task) -> bool:
    """True if a task, or its environment, can show how it is done."""
    if task.demonstration or task.environment is None:
        return bool(task.demonstration)
    return bool(getattr(resolve("environment", task.environment.name), "demonstrates", True))


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

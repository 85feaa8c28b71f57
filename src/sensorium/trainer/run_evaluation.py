"""Evaluation during a run: when it is due, on which tasks, and where its result is written.

A run is evaluated at its start, at the end of its warm start, every ``evaluation.every`` steps of RL and at its end.
"""

from collections.abc import Sequence

from sensorium.assembly.session import Session
from sensorium.data.mixture import SkippedRow
from sensorium.evaluation.evaluate import EvaluationResult, evaluate, nothing_scored
from sensorium.recipe.schema import Recipe
from sensorium.report.watcher import Watcher
from sensorium.runs.episodes import write_episodes
from sensorium.runs.metrics import SightResult
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.health.sight import check_sight
from sensorium.trainer.step_metrics import MediaMeter
from sensorium.trainer.task_loader import TaskLoader
from sensorium.vocabulary.errors import SensoriumError
from sensorium.vocabulary.plain import counted
from sensorium.vocabulary.task import Task


class RunEvaluator:
    """Evaluates the model in training on the held-out tasks."""

    def __init__(
        self,
        recipe: Recipe,
        session: Session,
        tasks: Sequence[Task],
        loader: TaskLoader,
        directory: RunDirectory,
        watcher: Watcher,
        meter: MediaMeter,
    ) -> None:
        self.recipe, self.session, self.loader = recipe, session, loader
        self.directory, self.watcher, self.meter = directory, watcher, meter
        self._tasks, self._unfit = tuple(tasks), list[SkippedRow]()
        self._playable: tuple[Task, ...] | None = None
        self._warned_at = -1

    def due(self, step: int) -> bool:
        """True if the model is to be evaluated after this step (0: before the first)."""
        return bool(self._tasks) and self.recipe.evaluates_after(step)

    async def evaluate(self, step: int) -> EvaluationResult:
        """Evaluate on the held-out tasks and write summary and episodes."""
        recipe = self.recipe
        self.meter.lap()
        section = recipe.evaluation
        evaluation = await evaluate(
            self.session,
            recipe,
            await self.tasks(step),
            name="eval",
            temperature=section.temperature,
            samples=section.samples,
            occasion=f"step_{step}",
        )
        self.meter.lap("media/eval")
        if problem := nothing_scored(evaluation.groups):
            self.watcher.attention(f"ATTENTION: the evaluation after step {step} measured nothing: {problem}")
        self.directory.write_summary(step, evaluation.summary)
        write_episodes(self.directory.eval_episodes_of(step), step, evaluation.groups, recipe.logging.episodes)
        self.watcher.evaluated(step, evaluation.summary)
        self.watcher.generated(step, evaluation.groups, self.session.store)
        return evaluation

    def sight_due(self, step: int) -> bool:
        """True at the start and at the end of a run that evaluates."""
        return bool(self._tasks) and self.recipe.checks_sight and step in (0, self.recipe.total_steps)

    async def check_sight(self, step: int) -> list[SightResult]:
        """Play some held-out tasks with and without each kind of media; a failed check is only noted."""
        self.meter.lap()
        try:
            return await check_sight(self.recipe, self.session, await self.tasks(step), step)
        except SensoriumError as error:
            self.watcher.noted(f"the sight check was left out, because it failed: {error}")
            return []
        finally:
            self.meter.lap("media/eval")

    async def tasks(self, step: int) -> tuple[Task, ...]:
        """The held-out tasks that can be played; others are refused, or left out with a note, as in training."""
        if self._playable is None:
            fitting, unfit = await self.loader.fitting(self._tasks, self.recipe.held_out_rollout)
            if fitting and unfit:
                self.watcher.noted(f"skipped {counted(len(unfit), 'held-out task')}; the first because: {unfit[0].reason}")
            self._playable, self._unfit = tuple(fitting), unfit
        if not self._playable and self._warned_at != step:  # each time: a missing result must not go unseen
            self._warned_at = step
            self.watcher.attention(
                f"ATTENTION: nothing is evaluated in this run: none of {len(self._unfit)} held-out tasks can be played, "
                f"the first because: {self._unfit[0].reason} Where prompts are too long, raise "
                "evaluation.max_context_tokens or take fewer frames."
            )
        return self._playable

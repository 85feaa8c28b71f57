"""The loop: plan, roll out, score, credit, update, record. trainer/schedules.py decides when a step is played.

Invariants: a step's rows are written after its update; a checkpoint is written after its step's rows; the engine never
samples while an update is in flight. A step is a function of recipe, seed, step and the state in the checkpoint, so that
a resumed run repeats the uninterrupted one.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any

import torch

from sensorium.assembly.determinism import random_state, restore_random_state, surroundings, warn_if_changed
from sensorium.assembly.playing import sampling_of
from sensorium.assembly.session import Session
from sensorium.cluster.event_loop import set_aside, set_aside_more, take_back
from sensorium.data.demonstrations import DemonstrationRows
from sensorium.data.mixture import SkippedRow
from sensorium.data.planner import Planner
from sensorium.evaluation.evaluate import EvaluationResult, check_sight, evaluate, nothing_scored
from sensorium.evaluation.summary import outcome_of, summary_metrics
from sensorium.kernels.first_use import given_up, take_untold_seconds
from sensorium.learner.credited_episode import CreditedEpisode
from sensorium.learner.learner_protocol import RunLearner
from sensorium.recipe.registry import resolve
from sensorium.recipe.schema import Recipe
from sensorium.report.watcher import RunStart, Watcher
from sensorium.rollout.play import CANCELLED, Attempt
from sensorium.runs.episodes import GIB, Retention, credits_of, write_episodes
from sensorium.runs.ledger import Ledger
from sensorium.runs.metrics import MetricsFile, SightResult
from sensorium.runs.process_table import Heartbeat, ProcessRow, run_end
from sensorium.runs.run_directory import RunDirectory, refuse_moved
from sensorium.trainer.checkpoint import Best, Checkpoints, keep_batch
from sensorium.trainer.collect import CollectedStep, Collector
from sensorium.trainer.credit import credit
from sensorium.trainer.health.facts import Evidence, answer_counts, unanswered
from sensorium.trainer.health.monitor import Health, refuse_ruined
from sensorium.trainer.health.rules import SLOW_CALL_S
from sensorium.trainer.health.start_checks import has_demonstration
from sensorium.trainer.schedules import RUN_ENDED, Schedule, make_schedule
from sensorium.trainer.step_metrics import (
    CategoryAccuracy,
    Clock,
    MediaMeter,
    environments_busy,
    episode_metrics,
    staleness_metrics,
)
from sensorium.trainer.task_loader import TaskLoader, drawn_by_position, recorded_loader, remember_media, skip_metrics
from sensorium.vocabulary.episode import Group, Status
from sensorium.vocabulary.errors import NonFiniteUpdate, SensoriumError
from sensorium.vocabulary.plain import counted
from sensorium.vocabulary.task import Task

NOTED_COMPILING_S = 5.0
ACCURACY = "eval/accuracy"
DEMONSTRATIONS_LOOKED_AT = 8
SLOW_SHARE = 0.15  # of the first rollout that is spent waiting for environments
LOOK_EVERY_S = 2.0


class Trainer:
    """A run in progress. Steps count from 1: first those of the warm start, then those of RL."""

    def __init__(
        self,
        recipe: Recipe,
        session: Session,
        learner: RunLearner,
        planner: Planner,
        held_out: Sequence[Task],
        directory: RunDirectory,
        ledger: Ledger,
        watcher: Watcher,
        recorded: DemonstrationRows | None = None,
    ) -> None:
        self.recipe, self.session, self.learner = recipe, session, learner
        self.directory, self.ledger, self.watcher = directory, ledger, watcher
        self.metrics = MetricsFile(directory.metrics)
        terms = session.scorer.terms if recipe.steps else ()  # a warm start alone has no reward
        self.loader = TaskLoader(recipe.tasks, planner, session.rollout, watcher.noted, terms, recipe.seed)
        self.shown = self.loader
        if recorded is not None:
            self.shown = recorded_loader(recipe, recorded, session.rollout, watcher.noted)
        self.meter, self.categories = MediaMeter(session), CategoryAccuracy()
        self.collector = Collector(recipe, session, self.loader, ledger, watcher)
        self.schedule = make_schedule(recipe, self.collector, lambda: Clock(session, self._announce_ahead))
        self.evaluator = RunEvaluator(recipe, session, held_out, self.loader, directory, watcher, self.meter)
        self.health = Health(recipe, directory, watcher)
        self.checkpoints = Checkpoints(directory.checkpoints, recipe.checkpoint.keep)
        logging = recipe.logging
        self.retention = Retention(directory, logging.full_steps, logging.sampled_steps, round(logging.episodes_gib * GIB))
        self.layout = resolve("layout", logging.layout)(directory, directory.path) if logging.layout else None
        self.step, self._phase = 0, "starts"
        self.best: Best | None = None
        self._noted_no_best = self.eager = False
        self._demonstrations: tuple[int, int, int] | None = None
        self.saved_at = self.sound_at = -1
        self.last_saving_s = 0.0
        self._forget_played()  # gives the engine the learner's version and weights
        self.heartbeat = Heartbeat(directory.path, self._processes, self.total_steps)
        self._froze = False

    @property
    def total_steps(self) -> int:
        return self.recipe.total_steps

    @property
    def warming(self) -> bool:
        """True while the next step belongs to the supervised warm start."""
        return self.step < self.recipe.warm_start.steps

    async def run(self) -> None:
        """Train to the last step."""
        self._froze |= set_aside()  # GC scans cost about 10 % of a small step
        batch = self.recipe.batch
        self.watcher.started(
            RunStart(
                name=self.recipe.name,
                steps=self.total_steps,
                first=self.step,
                warm_start=self.recipe.warm_start.steps,
                episodes_per_step=batch.prompts_per_step * batch.group_size,
                recipe=self.recipe.model_dump(mode="json"),
            )
        )
        if self.layout is not None:
            self.layout.begin(self.step, self.loader.state_dict()["state"])
        if self.step < self.total_steps or self.health.untrained():  # a healthy finished run has reported everything
            self.health.remind()
        if self.step == 0:
            self._note_no_accuracy(await self._evaluate(), "eval/reward", "eval/accuracy")
        first = self.step + 1
        while self.step < self.total_steps:
            self._note_compiling()
            await self.advance()
            if self._froze and self.step == first:
                set_aside_more()
            if self.health.idle:
                break
        self._note_compiling()
        await self.abandon_open()
        if self.saved_at != self.step:
            self._save()
        self.health.refuse_untrained()

    async def abandon_open(self) -> None:
        """Record what was played ahead and is not trained on, because the run ends."""
        if (dropped := await self.schedule.abandon()) is not None:
            ended = {e.id: RUN_ENDED for group in dropped.played for e in group.episodes}
            self.ledger.record(self.step + 1, dropped.played, ended | dropped.fates)

    def _note_compiling(self) -> None:
        if spent := take_untold_seconds(NOTED_COMPILING_S):
            self.watcher.noted(
                f"{spent:.0f} s were spent compiling code for this machine and capturing decode steps. That happens on "
                "first use; compiled code is kept in the user's cache for later runs."
            )

    async def advance(self) -> None:
        """One whole step: of the warm start, or of RL."""
        if self.step == self.recipe.warm_start.steps:
            self.learner.begin_rl()
        row, evidence = await (self._supervised_step() if self.warming else self._step())
        await self._close_step(row, evidence)

    async def _step(self) -> tuple[dict[str, float], Evidence]:
        """One step of RL; returns its row of metrics, and the evidence for its health."""
        clock = Clock(self.session, self._announce)
        recipe, step = self.recipe, self.step + 1
        collected = await self._collect(step, clock)
        episodes = [episode for group in collected.played for episode in group.episodes]
        if any(episode.status == Status.ABORTED and episode.failure != CANCELLED for episode in episodes):
            self._refuse_ruined()  # the engine refuses to sample from logits that are not finite
        groups, selection = collected.groups, collected.selection
        if isinstance(self.schedule, Schedule):  # the asynchronous one draws for itself
            if recipe.plays_ahead(step):
                self.session.forget_played()
                await self.schedule.play_ahead(step + 1)
            self._look_ahead(step + recipe.plays_ahead(step))
        if self.step == recipe.warm_start.steps and groups:
            self.watcher.began(groups[0])
        with clock("credit"):
            samples = await self.schedule.compute(lambda: self._credit(collected))
        stale = staleness_metrics(recipe.schedule.name, samples, self.learner.version)
        with clock("update"):
            loss = recipe.algorithm.loss.name
            learned = await self.schedule.beside_scoring(lambda: self._update(samples, loss, groups)) | stale
        with clock("record"):
            self._record(step, collected, samples)
            await self.loader.observe(groups, {group.id for group in selection.groups})
            if self.layout is not None:
                self.layout.write_step(step, collected.played)
                self.layout.write_history(self.loader.state_dict()["state"])
        measured = episode_metrics(groups, selection, mask_truncated=recipe.rollout.mask_truncated)
        measured |= self.categories.row(groups) | self.loader.planner_metrics()
        row = measured | learned | collected.metrics | clock.metrics(collected.played)
        row |= self.schedule.take_waits(row["time/step_s"]) | environments_busy(row, len(episodes))
        return row, Evidence(
            groups,
            collected.fates,
            unanswered(self.session.scorer, groups),
            given_up(),
            await self._unrewarded_demonstrations(groups),
            answer_counts(self.session.scorer, groups),
        )

    async def _collect(self, step: int, clock: Clock) -> CollectedStep:
        """Collect a step. In the first of RL, see whether environments are slow, where ``rollout.schedule`` is auto."""
        first = self.step == self.recipe.warm_start.steps and self.recipe.rollout.schedule == "auto"
        if not first or not self.session.engine.capabilities.lockstep:
            return await self.schedule.collect(step, clock)
        began, waited_s = time.perf_counter(), self.session.lockstep_waited_s
        collecting = asyncio.create_task(self.schedule.collect(step, clock))
        try:
            while not self.eager and not collecting.done():
                await asyncio.wait({collecting}, timeout=LOOK_EVERY_S)
                counted = self.session.rollout.pool.counters
                call_s, most_s = counted.ran_s / max(1, counted.calls), counted.ran_most_s
                if collecting.done():
                    row = collecting.result().metrics
                    call_s, most_s = row.get("time/environment_mean_s", 0.0), row.get("time/environment_max_s", 0.0)
                waited, seconds = self.session.lockstep_waited_s - waited_s, time.perf_counter() - began
                self._play_eagerly_if_slow(call_s, most_s, waited, seconds)
            return await collecting
        finally:
            collecting.cancel()
            await asyncio.wait({collecting})

    def _play_eagerly_if_slow(self, call_s: float, most_s: float, waited_s: float, seconds: float) -> None:
        if call_s < SLOW_CALL_S or waited_s < SLOW_SHARE * seconds:
            return
        self.eager = True
        self.session.play_eagerly()
        self.watcher.noted(
            f"environments are slow (up to {most_s:.2g} s a call): in lockstep others waited for them in {waited_s:.2g} of "
            f"{seconds:.2g} s, so rollout.schedule: auto is eager from here on, also when the run is resumed. What follows "
            "does not repeat bit for bit; rollout.schedule: lockstep would, and wait."
        )

    async def _unrewarded_demonstrations(self, groups: Sequence[Group]) -> tuple[int, int, int]:
        """See ``Evidence.demonstrations``; zeros unless a step had no reward at all.

        Played once in a run, for a few tasks, and not where that would ask judges.
        """
        episodes = [e for group in groups for e in group.episodes if e.reward is not None]
        if not episodes or any(e.reward and e.correct is not False for e in episodes):
            return 0, 0, 0
        if self._demonstrations is None:
            scorer, recipe = self.session.scorer, self.recipe
            asks = any(getattr(term, "caches_answers", False) for term, _ in scorer.terms)
            tasks = [group.task for group in groups if has_demonstration(group.task) and not asks]
            tasks = tasks[:DEMONSTRATIONS_LOOKED_AT]
            attempt = Attempt(recipe.seed, self.step + 1, "shown", demonstrate=True)
            played = await self.session.rollout.stream(tasks, 1, attempt, sampling_of(recipe.rollout)).in_order()
            shown = [(await scorer.score_group(group)).episodes[0] for group in played]
            judged = [episode for episode in shown if episode.reward is not None]
            without = sum(not episode.reward or episode.correct is False for episode in judged)
            cut = sum(bool(episode.info.get("out_of_turns")) for episode in judged)
            self._demonstrations = without, len(judged), cut
        return self._demonstrations

    def _credit(self, collected: CollectedStep) -> list[list[CreditedEpisode]]:
        assessment = self.learner.assess([group.episodes for group in collected.selection.groups])
        return credit(
            collected.selection.groups,
            assessment,
            self.recipe.algorithm,
            mask_truncated=self.recipe.rollout.mask_truncated,
            greedy=collected.greedy if self.collector.traits.greedy else None,
        )

    async def _supervised_step(self) -> tuple[dict[str, float], Evidence]:
        """One step of the warm start: play demonstrations, raise their likelihood."""
        clock = Clock(self.session, self._announce)
        recipe, step = self.recipe, self.step + 1
        with clock("draw"):
            before = self.shown.drawn
            drawn = await self.shown.draw(recipe.warm_start.prompts_per_step)
            self.ledger.plan(step, before, self.shown.drawn)
        attempt = Attempt(recipe.seed, step, "warm", demonstrate=True)
        with clock("rollout"):
            groups = await self.session.rollout.stream(drawn.tasks, 1, attempt, sampling_of(recipe.rollout)).in_order()
        self.ledger.advance(step, "rolled_out")
        self._look_ahead(step)
        groups, long = self.shown.without_long_prompts(groups)
        played = [e for group in groups for e in group.episodes if e.sampled_tokens]
        samples = [[CreditedEpisode(e, tuple(torch.ones(len(turn.response.tokens)) for turn in e.turns))] for e in played]
        with clock("update"):
            learned = self._update(samples, "likelihood", groups)
        self.ledger.advance(step, "trained")
        failed = len(groups) - len(played)
        row = learned | {"episodes/failed": failed} | skip_metrics(drawn.skipped, long) | clock.metrics(groups)
        return row, Evidence(tuple(groups), given_up=given_up())

    def _look_ahead(self, played: int) -> None:
        """Begin to read the tasks of the step after the last one played, and to decode their media."""
        section = self.recipe.warm_start
        if played < self.total_steps:
            if played < section.steps:
                self.shown.look_ahead(section.prompts_per_step)
            else:
                self.loader.look_ahead(self.recipe.selection.played(self.recipe.batch.prompts_per_step))

    def _update(self, samples: list[list[CreditedEpisode]], loss: str, groups: Sequence[Group]) -> dict[str, float]:
        """Update the policy; a non-finite update stops here with the batch kept on disk."""
        if not samples:
            self._forget_played()
            return {"policy/skipped": 1}
        try:
            learned = self.learner.step(samples, loss)
        except NonFiniteUpdate as error:
            media = self.session.store
            raise keep_batch(self.directory, self.step + 1, self.learner, media, loss, groups, samples, error) from error
        self._forget_played()
        return learned

    def _refuse_ruined(self) -> None:
        with self.meter.pause():
            refuse_ruined(self.learner, self.step, self.checkpoints.complete)

    def _forget_played(self) -> None:
        """Clear the engine's caches before every step, as in a resumed run; unless groups stream."""
        version = self.learner.version
        if version != self.session.engine.version:
            self.session.sample_with(self.learner.weights(), version, in_flight=self.schedule.streaming)
        elif not self.schedule.streaming:
            self.session.forget_played()

    def _record(self, step: int, collected: CollectedStep, samples: Sequence[Sequence[CreditedEpisode]]) -> None:
        refuse_moved(self.directory.path)
        advantages = {s.episode.id: [a.tolist() for a in s.advantages] for members in samples for s in members}
        path, limit = self.directory.episodes_of(step), self.recipe.logging.episodes
        logged = islice((e.id for group in collected.played for e in group.episodes), limit or None)
        measures = self.learner.token_measures([id for id in logged if id in advantages]) if advantages else {}
        credits = credits_of(collected.played, collected.fates, advantages, measures)
        write_episodes(path, step, collected.played, limit, credits)
        self.ledger.record(step, collected.played, collected.fates)
        self.schedule.settle(step, collected)
        self.ledger.advance(step, "trained")

    async def _close_step(self, row: dict[str, float], evidence: Evidence) -> None:
        """Evaluate and checkpoint where due, judge the step's health, and write the row."""
        refuse_moved(self.directory.path)
        self.step += 1
        row |= await self._evaluate()
        row |= self.session.judges.take_metrics()  # with those of the evaluation before the first step, which has no row
        for note in self.retention.apply(self.step):
            self.watcher.noted(note)
        if self.recipe.logging.full_steps:
            self.ledger.compact(self.step - self.recipe.logging.full_steps)
        row["time/checkpoint_s"] = self.last_saving_s
        row |= self.meter.row() | self.session.take_engine_metrics()
        for note in self.meter.notes():
            self.watcher.noted(note)
        row |= self.health.examine(self.step, row, evidence) | self.watcher.own_metrics()
        self.metrics.append(self.step, row)
        self.watcher.stepped(self.step, row)
        self._note_no_accuracy(row, "reward/mean", "accuracy")
        improved = self._improved(row)
        if improved or self.recipe.saves_after(self.step):
            self._save()

    def _improved(self, row: dict[str, float]) -> bool:
        """Whether checkpoint.best is the best so far, which is then remembered."""
        metric = self.recipe.checkpoint.best
        value, other = row.get(metric) if metric else None, ""
        if metric.startswith("eval/") and value is None and "eval/reward" in row:
            if metric == ACCURACY and (self.best is None or self.best.metric == "eval/reward"):
                value, other = row["eval/reward"], "eval/reward"
                self._note_no_accuracy(row, "eval/reward", ACCURACY)
            elif not self._noted_no_best:
                self._noted_no_best = True
                self.watcher.noted(
                    f"checkpoint.best is {metric}, which the evaluation at step {self.step} does not have, so that step is "
                    "not compared with others. To choose by another metric, set checkpoint.best, to eval/reward for one."
                )
        if value is None or (self.best is not None and other == self.best.metric and value <= self.best.value):
            return False
        self.best = Best(self.step, value, other)
        return True

    def _note_no_accuracy(self, row: dict[str, float], rewarded: str, accuracy: str) -> None:
        """Note once, as soon as rewards show it, that there is no accuracy, and what chooses the best checkpoint."""
        wanted = self.recipe.checkpoint.best == ACCURACY and self.recipe.evaluation.every
        if self._noted_no_best or not wanted or rewarded not in row or accuracy in row:
            return
        self._noted_no_best = True
        self.watcher.noted(
            f"no reward term says right or wrong, so there is no {accuracy}; where evaluations have none, checkpoint.best "
            "falls back to eval/reward. For accuracy let your reward function return True or False, or sn.reward(value, "
            "correct=…), or add {name: exact, weight: 0} to rewards.terms. Another metric: set checkpoint.best."
        )

    async def _evaluate(self) -> dict[str, float]:
        """Evaluate and check sight where due; returns the metrics."""
        row: dict[str, float] = {}
        with self.session.judges.meter.phase("eval"):
            if self.evaluator.due(self.step):
                self._announce("evaluate")
                self._refuse_ruined()
                summary = (await self.evaluator.evaluate(self.step)).summary
                self.health.evaluated(self.step, summary)
                row |= summary_metrics(summary)
                self._forget_played()
            if self.evaluator.sight_due(self.step):
                self._announce("sight check")
                row |= self.health.look(self.step, await self.evaluator.check_sight(self.step))
        return row

    def _save(self) -> None:
        refuse_moved(self.directory.path)
        self._announce("checkpoint")
        started = time.perf_counter()
        if not self.health.damaged:
            self.sound_at = self.saved_at  # the last checkpoint has since sampled well
        state = {
            "step": self.step,
            **self.schedule.state_dict(),
            "best": None if self.best is None else self.best.plain(),
            "sound_at": self.sound_at,
            "eager": self.eager,
            "categories": list(self.categories.names),
            **({} if self.shown is self.loader else {"demonstrations": self.shown.state_dict()}),
            "random": random_state(),
            "surroundings": surroundings(),
        }
        remember_media(self.directory, self.session.store)
        with self.meter.pause():
            self.checkpoints.save(self.step, self.learner, state, self.best, protect=self.sound_at)
        if self.layout is not None:
            self.layout.link_checkpoints()
        oldest = self.checkpoints.complete()[-self.recipe.checkpoint.keep :][0]
        if self.recipe.logging.full_steps:
            self.ledger.forget_judgements(min(oldest, self.step - self.recipe.logging.full_steps))
        self.saved_at = self.step
        self.last_saving_s = time.perf_counter() - started

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state; rows past it are dropped and rolled out again."""
        warn_if_changed(state["surroundings"])
        self.step = self.saved_at = state["step"]
        self.heartbeat.at(self.step)
        if "tasks" not in state:
            state = {**state, "tasks": drawn_by_position(state["position"])}
        if state["tasks"] is not None:  # of a fork with other tasks
            self.schedule.load_state_dict(state)
        if self.shown is not self.loader and "demonstrations" in state:
            self.shown.load_state_dict(state["demonstrations"])
        self.best = None if state["best"] is None else Best(**state["best"])
        self.sound_at, self.categories.names = state["sound_at"], list(state.get("categories", ()))
        self.learner.load(self.checkpoints.path(self.step))
        self._forget_played()
        if state.get("eager") and self.recipe.rollout.schedule == "auto" and self.session.engine.capabilities.lockstep:
            self.eager = True
            self.session.play_eagerly()
            self.watcher.noted("environments were slow in the first step, so rollout.schedule: auto is eager, as before.")
        restore_random_state(state["random"])
        self.directory.drop_after(self.step)
        self.health.restore(self.step)
        self.checkpoints.clear_after(self.step, self.best)
        self.ledger.rewind(self.step + 1)

    def close(self, error: BaseException | None = None) -> None:
        """Close watchers, threads and ledger. ``error`` is what ended the run, if anything did."""
        end = run_end(error, finished=self.step >= self.total_steps)
        with ExitStack() as closing:  # all of them, whatever one of them raises; the last first
            if self._froze:
                closing.callback(take_back)  # a process may train more than once
            for part in (self.ledger, self.session, self.learner, self.schedule, self.loader, self.shown):
                closing.callback(part.close)
            closing.callback(self.watcher.finished)
            closing.callback(self.heartbeat.close, end)

    def _processes(self) -> tuple[ProcessRow, ...]:
        others = (*self.session.processes, *getattr(self.learner, "processes", ()))
        return (ProcessRow("driver", os.getpid(), self._phase), *others) if others else ()

    def _announce(self, phase: str, total: int = 0) -> None:
        self._phase = phase
        self.heartbeat.at(min(self.step + 1, self.total_steps))
        self.watcher.phase(self.step + 1, phase, total)

    def _announce_ahead(self, phase: str, total: int = 0) -> None:
        self.watcher.phase(self.step + 2, phase, total)


class RunEvaluator:
    """Evaluates the model in training on the held-out tasks.

    It is due at the start of a run, at the end of the warm start, every ``evaluation.every`` steps of RL and at the end.
    """

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
        section, tasks = recipe.evaluation, await self.tasks(step)
        evaluation = await evaluate(
            self.session,
            recipe,
            tasks,
            name="eval",
            temperature=section.temperature,
            samples=section.samples,
            occasion=f"step_{step}",
            progress=self._begin(step, "evaluate", len(tasks) * section.samples),
        )
        self.meter.lap("media/eval")
        if problem := nothing_scored(evaluation.groups):
            self.watcher.attention(f"ATTENTION: the evaluation after step {step} measured nothing: {problem}")
        self.directory.write_outcomes(step, map(outcome_of, evaluation.samples))
        self.directory.write_summary(step, evaluation.summary)
        write_episodes(self.directory.eval_episodes_of(step), step, evaluation.groups, recipe.logging.episodes)
        self.watcher.evaluated(step, evaluation.summary)
        self.watcher.generated(step, evaluation.groups, self.session.store)
        return evaluation

    def _begin(self, step: int, phase: str, episodes: int) -> Callable[[int], None]:
        """Say how many episodes a phase plays; returns what is called with the number that are done."""
        self.watcher.phase(step + 1, phase, episodes)
        return self.watcher.progress

    def sight_due(self, step: int) -> bool:
        """True at the start and at the end of a run that evaluates."""
        return bool(self._tasks) and self.recipe.checks_sight and step in (0, self.recipe.total_steps)

    async def check_sight(self, step: int) -> list[SightResult]:
        """Play some held-out tasks with and without each kind of media; a failed check is only noted."""
        self.meter.lap()
        try:
            tasks = await self.tasks(step)
            return await check_sight(
                self.recipe, self.session, tasks, step, lambda of: self._begin(step, "sight check", of)
            )
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

"""Collect the groups a step trains on: draw tasks, play them, score them, select; in rounds where sampling is dynamic.

Invariants: a collected step is a function of recipe, seed, step, weights and the planner's draws (in lockstep; an eager
schedule with early stop depends on timing). Every episode that began is in ``CollectedStep.played``, and has a fate unless
it is trained on. A round draws as many tasks as groups are still missing, times ``oversample``.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from sensorium.assembly.playing import sampling_of
from sensorium.assembly.session import Session
from sensorium.data.mixture import SkippedRow
from sensorium.engines.protocol import Sampling
from sensorium.recipe.estimators_and_losses import estimator_traits
from sensorium.recipe.schema import Recipe
from sensorium.report.watcher import Watcher
from sensorium.rewards.scorer import GroupScoring
from sensorium.rollout.play import CANCELLED, Attempt, Deadlines, EarlyStop
from sensorium.runs.ledger import Ledger
from sensorium.trainer.credit import groups_with_signal
from sensorium.trainer.selection import NO_SIGNAL, Selection, first, masked, most_varied, select, why_unfit
from sensorium.trainer.step_metrics import environment_metrics
from sensorium.trainer.task_loader import TaskLoader, prompt_too_long, skip_metrics
from sensorium.vocabulary.episode import Group
from sensorium.vocabulary.task import Task

Clock = Callable[..., AbstractContextManager[None]]  # times a phase, given its name and how many items it has
BASELINE = "greedy: what its group is compared with"


@dataclass(frozen=True)
class CollectedStep:
    """The groups of a step. ``groups`` were played to their end and scored; ``selection`` of them is trained on.

    ``aside`` are cancelled groups and greedy episodes. ``fates`` are those of all episodes that are not trained on.
    ``greedy``: by group id, the reward of the task's greedy episode, for estimators that need it. ``drawn`` counts the rows
    that were drawn for the step, skipped ones included.
    """

    selection: Selection
    groups: tuple[Group, ...]
    aside: tuple[Group, ...]
    fates: dict[str, str]
    greedy: dict[str, float]
    drawn: int
    metrics: dict[str, float]

    @property
    def played(self) -> tuple[Group, ...]:
        """Everything that was begun."""
        return self.groups + self.aside


@dataclass
class _RoundsSoFar:
    """``first`` is the number of rows drawn before; ``ranks``: by group id, the round and the moment it was complete."""

    first: int
    deadlines: Deadlines
    rounds: int = 0
    tasks: list[Task] = field(default_factory=list)
    skipped: list[SkippedRow] = field(default_factory=list)
    long: int = 0
    groups: list[Group] = field(default_factory=list)
    cancelled: list[Group] = field(default_factory=list)
    ranks: dict[str, tuple[int, int]] = field(default_factory=dict)
    selection: Selection = field(default_factory=Selection)
    without_signal: int = 0
    baselines: list[Group] = field(default_factory=list)
    greedy: dict[str, float] = field(default_factory=dict)


class Collector:
    """Collects what the steps of a run train on."""

    def __init__(self, recipe: Recipe, session: Session, loader: TaskLoader, ledger: Ledger, watcher: Watcher) -> None:
        self.recipe, self.session, self.loader = recipe, session, loader
        self.ledger, self.watcher = ledger, watcher
        session.tell_by(watcher.noted)
        self.traits = estimator_traits(recipe.algorithm.advantage.name)

    async def collect(
        self,
        step: int,
        clock: Clock,
        played: Callable[[], None] = lambda: None,
        drawn: Callable[[], None] = lambda: None,
    ) -> CollectedStep:
        """Play rounds until there are enough groups to train on, or as many rounds as the recipe allows.

        ``drawn`` is called when a round's tasks are drawn; ``played`` as soon as the step samples nothing more, though
        scores may still be missing.
        """
        so_far = _RoundsSoFar(self.loader.drawn, Deadlines(known=self.ledger.deadlines()))
        self.session.scorer.take_counts()  # of an evaluation before this step
        self.session.rollout.pool.take_counters()
        wanted = self.recipe.batch.prompts_per_step
        while so_far.rounds < self.recipe.selection.rounds and len(so_far.selection.groups) < wanted:
            missing = wanted - len(so_far.selection.groups)
            so_far.rounds += 1
            plays_on = self.recipe.selection.dynamic or self.traits.greedy  # what else is played depends on scores
            complete = await self._play(step, missing, so_far, clock, (lambda: None) if plays_on else played, drawn)
            await self._select(step, complete, so_far, clock)
        return self._collected(so_far)

    async def _play(
        self,
        step: int,
        missing: int,
        so_far: _RoundsSoFar,
        clock: Clock,
        played: Callable[[], None],
        begun: Callable[[], None],
    ) -> list[Group]:
        """Draw, play and score a round; returns the groups that were played to their end."""
        recipe = self.recipe
        with clock("draw"):
            drawn = await self.loader.draw(recipe.selection.played(missing))
            self.ledger.plan(step, so_far.first, self.loader.drawn)
        begun()
        stop = EarlyStop(missing) if len(drawn.tasks) > missing else None
        groups, scored = await self._scored_as_complete(
            drawn.tasks, recipe.batch.group_size, Attempt(recipe.seed, step), sampling_of(recipe.rollout), so_far, clock,
            before=so_far.tasks, stop=stop, played_all=played,
        )  # fmt: skip
        groups, long = self.loader.without_long_prompts(groups)
        so_far.long += long
        so_far.tasks += drawn.tasks
        so_far.skipped += drawn.skipped
        moments = stop.complete if stop is not None else {group.id: 0 for group in groups}
        so_far.ranks |= {id: (so_far.rounds, moment) for id, moment in moments.items()}
        so_far.cancelled += [group for group in groups if group.id not in moments]
        return [scored[group.id] for group in groups if group.id in moments]

    async def _scored_as_complete(
        self,
        tasks: Sequence[Task],
        size: int,
        attempt: Attempt,
        sampling: Sampling,
        so_far: _RoundsSoFar,
        clock: Clock,
        *,
        before: Sequence[Task],
        stop: EarlyStop | None = None,
        played_all: Callable[[], None] = lambda: None,
    ) -> tuple[list[Group], dict[str, Group]]:
        """Play tasks and score each group as soon as it is complete; returns all groups, and the scored ones by id.

        A group that was cancelled, or whose prompt is too long, is not scored.
        """
        played: dict[int, Group] = {}
        async with GroupScoring(self.session.scorer) as scoring:
            with clock("rollout", len(tasks) * size):
                stream = self.session.rollout.stream(
                    tasks, size, attempt, sampling, so_far.deadlines, self.watcher.progress, before=before, stop=stop
                )
                async with stream:
                    async for place, group in stream:
                        played[place] = group
                        if (stop is None or group.id in stop.complete) and not prompt_too_long(group):
                            scoring.begin(group)
            self.ledger.keep_deadlines(so_far.deadlines.fired)
            self.ledger.advance(attempt.step, "rolled_out")
            played_all()
            with clock("score"):
                scored = await scoring.finish()
        self.ledger.advance(attempt.step, "scored")
        return [played[place] for place in sorted(played)], scored

    async def _select(self, step: int, groups: Sequence[Group], so_far: _RoundsSoFar, clock: Clock) -> None:
        recipe = self.recipe
        so_far.groups += groups
        chosen = select(groups, recipe.rewards.on_missing, smallest=2 if self.traits.compares else 1)
        if self.traits.greedy:
            chosen = await self._compared(step, chosen, so_far, clock)
        if recipe.selection.dynamic:
            loud = groups_with_signal(chosen.groups, recipe.algorithm.advantage, so_far.greedy)
            alike = [group.id for group in chosen.groups if group.id not in loud]
            chosen = chosen.without(dict.fromkeys(alike, NO_SIGNAL))
            so_far.without_signal += len(alike)
        so_far.selection = so_far.selection.joined(chosen)

    async def _compared(self, step: int, chosen: Selection, so_far: _RoundsSoFar, clock: Clock) -> Selection:
        """Play each group's task once greedily; a group without a greedy score has nothing to be compared with."""
        recipe, tasks = self.recipe, [group.task for group in chosen.groups]
        attempt, greedy = Attempt(recipe.seed, step, "greedy"), sampling_of(recipe.rollout, 0.0)
        before = [group.task for group in so_far.baselines]
        played, scored = await self._scored_as_complete(tasks, 1, attempt, greedy, so_far, clock, before=before)
        baselines = [scored.get(group.id, group) for group in played]
        so_far.baselines += baselines
        reasons = {}
        for group, baseline in zip(chosen.groups, baselines, strict=True):
            (episode,) = baseline.episodes
            why = why_unfit(episode)
            if why or episode.reward is None:
                reasons[group.id] = f"dropped: no greedy episode to compare it with ({why})"
            else:
                so_far.greedy[group.id] = episode.reward
        return chosen.without(reasons)

    def _collected(self, so_far: _RoundsSoFar) -> CollectedStep:
        """Select at most ``prompts_per_step`` groups, the first complete first, then those that vary most."""
        section, wanted = self.recipe.selection, self.recipe.batch.prompts_per_step
        taken = first(so_far.selection, wanted, so_far.ranks)
        kept = most_varied(taken, section.kept(len(taken.groups))) if section.variance_share < 1 else taken
        fates = kept.fates | {e.id: CANCELLED for group in so_far.cancelled for e in group.episodes}
        fates |= masked(kept.groups) if self.recipe.rollout.mask_truncated else {}
        fates |= {e.id: BASELINE for group in so_far.baselines for e in group.episodes}
        row = skip_metrics(so_far.skipped, so_far.long) | self.session.scorer.take_metrics()
        begun = (*so_far.groups, *so_far.cancelled, *so_far.baselines)
        row |= environment_metrics(self.session.rollout.pool, sum(len(group.episodes) for group in begun))
        if section.dynamic:
            row["groups/rounds"] = so_far.rounds
            row["groups/without_signal"] = so_far.without_signal
            row["groups/short"] = wanted - len(taken.groups)
        if section.oversample > 1:
            row["groups/cancelled"] = len(so_far.cancelled)
            row["groups/unused"] = len(so_far.selection.groups) - len(taken.groups)
        if section.variance_share < 1:
            row["groups/too_alike"] = len(taken.groups) - len(kept.groups)
        rewards = [e.reward for group in so_far.baselines for e in group.episodes if e.reward is not None]
        if rewards:
            row["reward/greedy"] = sum(rewards) / len(rewards)
        return CollectedStep(
            selection=kept,
            groups=tuple(so_far.groups),
            aside=(*so_far.cancelled, *so_far.baselines),
            fates=fates,
            greedy={group.id: so_far.greedy[group.id] for group in kept.groups if group.id in so_far.greedy},
            drawn=self.loader.drawn - so_far.first,
            metrics=row,
        )

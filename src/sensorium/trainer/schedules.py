"""Schedules: a step is collected when it is due, one step ahead of the update, or continuously (asynchronous).

    synchronous     collect 1 · update 1 · collect 2 · update 2 · …
    one_step_off    collect 1 · play 2 · update 1 beside scoring 2 · play 3 · update 2 beside scoring 3 · …
    … eager         collect 1 · update 1 beside playing 2 · update 2 beside playing 3 · …

With one_step_off a step is trained on episodes of the policy before its last update. The engine still never samples while
an update is in flight: scoring of one step (judges, reward services) overlaps with the update of another. Where the rollout
is eager and environments are slow, those overlap too: engine and update take turns, and what is sampled after the update
has its weights (``Segment.versions``). Before a checkpoint or an evaluation nothing is played ahead
(``Recipe.plays_ahead``): what follows depends on the checkpoint alone.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch

from sensorium.assembly.playing import sampling_of
from sensorium.assembly.session import Session
from sensorium.data.mixture import SkippedRow
from sensorium.engines.protocol import InFlightEngine
from sensorium.recipe.schema import Recipe
from sensorium.rewards.scorer import GroupScoring
from sensorium.rollout.play import Attempt, Deadlines
from sensorium.trainer.collect import CollectedStep, Collector
from sensorium.trainer.health.rules import SLOW_CALL_S
from sensorium.trainer.selection import Selection, masked, select
from sensorium.trainer.step_metrics import Clock, environment_metrics, length_metrics
from sensorium.trainer.task_loader import prompt_too_long, skip_metrics
from sensorium.vocabulary.episode import Group
from sensorium.vocabulary.errors import RecipeError
from sensorium.vocabulary.task import Task

Result = TypeVar("Result")

PREFIX = "stream"
RUN_ENDED = "dropped: the run ended before it was trained on"


@dataclass(eq=False)
class OpenGroup:
    """A task that was drawn and is in no step yet. ``number`` counts the rows drawn in the run.

    ``before`` is the task loader's state before the draw, from which a resumed run repeats it. ``began`` is the number of
    updates in this process when it began to be played. ``selection`` is set once it is played and scored.
    """

    number: int
    before: dict[str, Any]
    task: Task
    began: int | None = None
    played: bool = False
    group: Group | None = None
    selection: Selection | None = None

    @property
    def fit(self) -> bool:
        """True if it is complete and can be trained on."""
        return self.selection is not None and bool(self.selection.groups)

    @property
    def dropped(self) -> bool:
        """True if it is complete and cannot be trained on."""
        return self.selection is not None and not self.selection.groups


@dataclass
class Waits:
    """Since the last row: seconds that the learner waited for episodes and for scores, and that nothing was played."""

    episodes_s: float = 0.0
    scores_s: float = 0.0
    idle_s: float = 0.0
    skipped: list[SkippedRow] = field(default_factory=list)
    long: int = 0


class AsynchronousSchedule:
    """Collects steps from groups that are played continuously. It has the interface of ``Schedule``.

    A group's age counts from the weights that it began with. With ``max_staleness`` 1 and two groups a step (P = 2):

        weights      0                 1                   2
        played       a b c d           c e f g             g h i …
        trained           step 1: a b      step 2: c d         step 3: e f

    Here d was complete after step 1 was taken, and c was played across the update: its first tokens are of weights 0, its
    last of weights 1. Step 2 must train on c, or c would be too old, so step 2 waits for it. Nothing is ever cut short.

    Invariants, with S = ``max_staleness`` and v the weights that a step trains:
    - a group that began with weights b is trained by weights b + S at the latest: a step is taken only if, after it, at
      most k·P groups must be trained within the next k steps (k = 0 … S);
    - waiting always reaches that, because at most (S + 1)·P groups are open when a step is taken, and until its update is
      done none beyond S·P begins. So a learner that waits while nothing is played, scored or drawn would wait for ever:
      that is a defect, and ends the run at once.
    """

    def __init__(self, recipe: Recipe, collector: Collector) -> None:
        self.recipe, self.collector = recipe, collector
        self.session, self.loader, self.ledger = collector.session, collector.loader, collector.ledger
        self.streaming = False
        engine = self.session.engine
        if self.loader.waits_for_outcomes:
            raise RecipeError(
                f"schedule: asynchronous draws tasks before earlier ones are trained, and the planner "
                f"'{recipe.tasks.planner.name}' decides by what became of those. Use schedule: synchronous."
            )
        if not engine.capabilities.in_flight:
            raise RecipeError(
                f"schedule: asynchronous updates weights while responses are open, and engine "
                f"'{recipe.rollout.engine.name}' cannot. Use rollout.engine: process, vllm or native."
            )
        threads = torch.get_num_threads()
        self._thread = ThreadPoolExecutor(1, "update", lambda: torch.set_num_threads(threads))
        self._staleness = recipe.schedule.max_staleness
        self._wanted = recipe.batch.prompts_per_step
        self._size = recipe.batch.group_size
        self._open: list[OpenGroup] = []
        self._plays: set[asyncio.Task[None]] = set()
        self._filling: asyncio.Task[None] | None = None
        self._full = False  # drawing and beginning wait for room
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._updating = False
        self._updates = 0
        self._step = 0
        self._drawn: dict[str, Any] | None = None
        self._restored: list[dict[str, Any]] = []
        self._known: dict[tuple[str, int], str] = {}
        self._waits = Waits()
        self._call_s = 0.0  # seconds of an environment's call in the last step, on average
        self._idle_since: float | None = None

    async def collect(self, step: int, clock: Clock) -> CollectedStep:
        """Take a step's groups, complete ones, the oldest first; waits until no other group would grow too old."""
        first = self.loader.drawn
        self._step = step
        if self._filling is None:
            self.session.scorer.take_counts()  # of an evaluation before this step
            self.session.rollout.pool.take_counters()
            self._known = self.ledger.deadlines()
            self._changed = asyncio.Event()
            self._count_idle()
            self.streaming = True
            self._filling = asyncio.create_task(self._fill(), name="groups")
            self._filling.add_done_callback(self._ended)
        self._stir()
        with clock("rollout", self._wanted * self._size):
            while (chosen := self._choose()) is None:
                self._refuse_standstill()
                started, playing = time.perf_counter(), self._playing
                await self._change()
                waited = time.perf_counter() - started
                if playing:
                    self._waits.episodes_s += waited
                else:
                    self._waits.scores_s += waited
        dropped = [group for group in self._open if group.dropped]
        self._open = [group for group in self._open if group not in chosen and not group.dropped]
        self._updating = True
        self.ledger.plan(step, first, self.loader.drawn)
        return self._collected(sorted([*chosen, *dropped], key=lambda group: group.number), self.loader.drawn - first)

    def take_waits(self, step_s: float) -> dict[str, float]:
        """The waits are already in the collected step's metrics."""
        return {}

    async def compute(self, work: Callable[[], Result]) -> Result:
        """Run what the learner does, beside environments and scoring; and beside the engine if it has weights of its own.

        An engine that samples with the learner's weights takes turns with it, so that neither slows the other down: whole
        updates, or where environments are slow micro-batches.
        """
        return await compute_beside(self.session, self._thread, work, turns=self._call_s >= SLOW_CALL_S)

    async def beside_scoring(self, update: Callable[[], Result]) -> Result:
        """Run a step's update; groups are played beside it as far as ``compute`` allows."""
        result = await self.compute(update)
        self._updates += 1
        self._updating = False
        self._stir()
        return result

    def settle(self, step: int, collected: CollectedStep) -> None:
        """Record the fate of every task that was drawn for a step."""
        for group in collected.played:
            reasons = [collected.fates.get(episode.id) for episode in group.episodes]
            fate = "trained" if None in reasons or not reasons else str(reasons[0])
            self.ledger.settle_draw(int(group.id.split("/")[1]), step, fate)  # its number among all rows drawn

    async def abandon(self) -> CollectedStep | None:
        """End playing at the run's end, and record that open groups are not trained on."""
        running = [*self._plays, *([self._filling] if self._filling is not None else [])]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        self._plays.clear()
        self._filling = None
        for group in self._open:
            self.ledger.settle_draw(group.number, self._step + 1, RUN_ENDED)
        self._open = []
        self.streaming = False
        return None

    def close(self) -> None:
        self._thread.shutdown()

    def state_dict(self) -> dict[str, Any]:
        """Where drawing continues, and the open groups, which a resumed run plays first."""
        if self._drawn is None:
            return {"tasks": self.loader.state_dict(), "open": deepcopy(self._restored)}
        waiting = [{"number": group.number, "before": group.before} for group in self._open]
        return deepcopy({"tasks": self._drawn, "open": [*waiting, *self._restored]})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state["tasks"])
        self._restored = list(state.get("open", ()))

    async def _fill(self) -> None:
        after = deepcopy(self.loader.state_dict())
        restored = self._restored
        while restored:
            self.loader.load_state_dict(restored[0]["before"])
            groups = await self._draw(1)
            restored.pop(0)
            self._drawn = after
            await self._begin(groups)
        if self._drawn is not None:
            self.loader.load_state_dict(after)
        self._drawn = after
        while True:
            await self._until_room()
            groups = await self._draw(min(self._room, self._wanted))
            self._drawn = deepcopy(self.loader.state_dict())
            await self._begin(groups)

    async def _draw(self, count: int) -> list[OpenGroup]:
        """Draw the next tasks; the ledger records them and the rows that were skipped.

        Together, because an engine in this process advances while drawing waits: drawn one by one, few are played at once.
        """
        groups = []
        for draw in await self.loader.draw_each(count):
            number = draw.before["drawn"]
            for row in draw.skipped:
                self.ledger.draw(number, self._step, "")
                self.ledger.settle_draw(number, self._step, f"skipped: {row.reason}")
                number += 1
            self._waits.skipped += draw.skipped
            if draw.task is not None:
                self.ledger.draw(number, self._step, draw.task.id)
                groups.append(OpenGroup(number, draw.before, draw.task))
        self._open += groups
        return groups

    async def _begin(self, groups: Sequence[OpenGroup]) -> None:
        for group in groups:
            await self._until_room()
            group.began = self._updates
            self._count_idle()
            play = asyncio.create_task(self._play(group), name=f"group {group.number}")
            self._plays.add(play)
            play.add_done_callback(self._plays.discard)
            play.add_done_callback(self._ended)
            self._stir()

    async def _until_room(self) -> None:
        while not self._room:
            if not self._full:
                self._full = True
                self._stir()  # a learner that waits looks whether anything can still happen
            await self._change()
        self._full = False

    @property
    def _room(self) -> int:
        """How many more groups may begin."""
        begun = [group for group in self._open if group.began is not None and not group.dropped]
        left = self.recipe.total_steps - self._step + (not self._updating)  # steps that are still to be taken
        limit = self._wanted * min(self._staleness + (not self._updating), left)
        concurrency = self.recipe.rollout.concurrency
        playing = sum(not group.played for group in begun)
        room = limit - len(begun)
        return max(0, min(room, max(1, concurrency // self._size) - playing) if concurrency else room)

    async def _play(self, group: OpenGroup) -> None:
        """Play and score a group, and select its episodes to train on."""
        recipe = self.recipe
        attempt, deadlines = Attempt(recipe.seed, group.number, PREFIX, first=group.number), Deadlines(known=self._known)
        stream = self.session.rollout.stream([group.task], self._size, attempt, sampling_of(recipe.rollout), deadlines)
        (played,) = await stream.in_order()
        self.ledger.keep_deadlines(deadlines.fired)
        group.played = True
        self._count_idle()
        self._stir()
        if prompt_too_long(played):
            _, long = self.loader.without_long_prompts([played])
            self._waits.long += long
            group.group, group.selection = played, select([played], "drop_group", smallest=1)
            return
        async with GroupScoring(self.session.scorer) as scoring:
            scoring.begin(played)
            scored = (await scoring.finish())[played.id]
        smallest = 2 if self.collector.traits.compares else 1
        group.group, group.selection = scored, select([scored], recipe.rewards.on_missing, smallest=smallest)
        self.collector.watcher.progress(self._size * sum(one.fit for one in self._open))

    def _choose(self) -> list[OpenGroup] | None:
        """The groups of the next step, or None as long as it must wait.

        A step is short only where as many groups as it wants were played and could not be trained on.
        """
        if self._error is not None:
            raise self._error
        fit = sorted((group for group in self._open if group.fit), key=lambda group: (group.began, group.number))
        if len(fit) < self._wanted and sum(group.dropped for group in self._open) < self._wanted:
            return None
        chosen = fit[: self._wanted]
        left = [group for group in self._open if group.began is not None and not group.dropped and group not in chosen]
        last = [group.began + self._staleness - self._updates for group in left if group.began is not None]
        for steps in range(self._staleness + 1):
            if sum(latest <= steps for latest in last) > steps * self._wanted:
                return None
        return chosen

    def _refuse_standstill(self) -> None:
        """Raise where the learner waits for groups and drawing waits for the learner."""
        if self._plays or not self._full or self._room:
            return
        begun = [group for group in self._open if group.began is not None]
        ages = ", ".join(f"{group.number} ({self._updates - (group.began or 0)})" for group in begun)
        raise RuntimeError(
            f"step {self._step} would wait for ever: {len(begun)} groups are open and complete, no {self._wanted} of them "
            f"can be trained without others growing older than schedule.max_staleness {self._staleness}, and no group "
            f"is begun before a step is trained. Open groups with their age in updates: {ages}. This is a defect of "
            "schedule: asynchronous; please report it. schedule: synchronous trains the same recipe."
        )

    def _collected(self, groups: list[OpenGroup], drawn: int) -> CollectedStep:
        selection, waits = Selection(), self._waits
        for group in groups:
            assert group.selection is not None
            selection = selection.joined(group.selection)
        self._waits = Waits()
        self._count_idle()
        played = tuple(group.group for group in groups if group.group is not None)
        fates = selection.fates | (masked(selection.groups) if self.recipe.rollout.mask_truncated else {})
        row = skip_metrics(waits.skipped, waits.long) | self.session.scorer.take_metrics()
        row |= environment_metrics(self.session.rollout.pool, len(groups) * self._size) | length_metrics(played, fates)
        self._call_s = row.get("time/environment_mean_s", 0.0)
        row["wait/learner_for_episodes_s"] = waits.episodes_s
        row["wait/learner_for_scores_s"] = waits.scores_s
        row["wait/engine_for_learner_s"] = waits.idle_s
        row["groups/open"] = len(self._open)
        return CollectedStep(selection, played, (), fates, {}, drawn, row)

    def _count_idle(self) -> None:
        now = time.perf_counter()
        if self._idle_since is not None:
            self._waits.idle_s += now - self._idle_since
        self._idle_since = None if self._playing else now

    @property
    def _playing(self) -> bool:
        return any(group.began is not None and not group.played for group in self._open)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            self._error = self._error or task.exception()
        self._stir()

    def _stir(self) -> None:
        """Wake up whoever waits for a change."""
        self._changed.set()

    async def _change(self) -> None:
        event = self._changed
        await event.wait()
        if self._changed is event:
            self._changed = asyncio.Event()


class EngineTurns:
    """Called between the micro-batches of an update: where environments are slow, the engine answers them meanwhile.

    A turn takes as long as the micro-batch before it at most, and ends as soon as every episode waits for its environment.
    """

    def __init__(self, engine: InFlightEngine) -> None:
        self._engine, self._loop, self._ended = engine, asyncio.get_running_loop(), time.perf_counter()

    def __call__(self) -> None:
        turn = asyncio.run_coroutine_threadsafe(self._engine.take_turn(time.perf_counter() - self._ended), self._loop)
        while not turn.done() and self._loop.is_running():  # it stops where the run is interrupted
            wait([turn], timeout=0.2)
        if turn.done() and not turn.cancelled():
            turn.result()  # raises what went wrong
        self._ended = time.perf_counter()


async def compute_beside(session: Session, thread: Executor, work: Callable[[], Result], *, turns: bool) -> Result:
    """Run what the learner does in a thread, beside environments and scoring; and beside an engine with own weights.

    An engine that samples with the learner's weights waits meanwhile, or takes ``turns`` with it.
    """
    loop, policy = asyncio.get_running_loop(), session.policy
    if session.engine.capabilities.own_weights:
        return await loop.run_in_executor(thread, work)
    engine, nothing = cast(InFlightEngine, session.engine), policy.give_way
    with engine.paused():
        policy.give_way = EngineTurns(engine) if turns else nothing
        try:
            return await loop.run_in_executor(thread, work)
        finally:
            policy.give_way = nothing


def make_schedule(
    recipe: Recipe, collector: Collector, new_clock: Callable[[], Clock]
) -> "Schedule | AsynchronousSchedule":
    if recipe.schedule.name == "asynchronous":
        return AsynchronousSchedule(recipe, collector)
    return Schedule(recipe, collector, new_clock)


class Schedule:
    """Collects steps for a run. ``new_clock`` times a step that is played ahead.

    ``streaming``: responses may be open when weights change next.
    """

    def __init__(self, recipe: Recipe, collector: Collector, new_clock: Callable[[], Clock]) -> None:
        self.recipe, self.collector, self.new_clock = recipe, collector, new_clock
        self.streaming = False
        self._played = asyncio.Event()
        self._call_s = 0.0  # seconds of an environment's call in the last step, on average
        self._ahead: tuple[asyncio.Task[CollectedStep], Clock] | None = None
        self._for_episodes_s = self._for_scores_s = 0.0
        self._updating: ThreadPoolExecutor | None = None
        if recipe.schedule.name == "one_step_off":
            if collector.loader.waits_for_outcomes:
                raise RecipeError(
                    f"schedule: one_step_off draws a step's tasks before the step before it is trained, and the planner "
                    f"'{recipe.tasks.planner.name}' decides by what became of that one. Use schedule: synchronous."
                )
            threads = torch.get_num_threads()
            self._updating = ThreadPoolExecutor(1, "update", lambda: torch.set_num_threads(threads))

    async def collect(self, step: int, clock: Clock) -> CollectedStep:
        """Collect a step, unless it was played ahead."""
        if self._ahead is None:
            collected = await self.collector.collect(step, clock)
            self._for_episodes_s += clock.seconds.get("rollout", 0.0)
            self._for_scores_s += clock.seconds.get("score", 0.0)
            self._call_s = collected.metrics.get("time/environment_mean_s", 0.0)
            return collected
        (task, its_clock), self._ahead = self._ahead, None
        await self._until_played()
        started = time.perf_counter()
        collected = await task
        self.streaming = False
        self._call_s = collected.metrics.get("time/environment_mean_s", 0.0)
        self._for_scores_s += time.perf_counter() - started
        clock.seconds |= its_clock.seconds
        return collected

    def take_waits(self, step_s: float) -> dict[str, float]:
        """Who waited for whom in a step of ``step_s`` seconds. The engine is idle unless the learner waits for it."""
        row = {
            "wait/learner_for_episodes_s": self._for_episodes_s,
            "wait/learner_for_scores_s": self._for_scores_s,
            "wait/engine_for_learner_s": max(0.0, step_s - self._for_episodes_s),
        }
        self._for_episodes_s = self._for_scores_s = 0.0
        return row

    async def play_ahead(self, step: int) -> None:
        """Begin to collect a step; returns when it is played, though scores may still be missing.

        Where environments are slow, the rollout is eager and the step is one round, it returns once the tasks are drawn and
        had as long as a call takes: then most environments are in their first call when the update begins.
        """
        self._played = played = asyncio.Event()
        drawn, clock = asyncio.Event(), self.new_clock()
        task = asyncio.create_task(self.collector.collect(step, clock, played.set, drawn.set))
        task.add_done_callback(lambda _: drawn.set())
        task.add_done_callback(lambda _: played.set())
        self._ahead = (task, clock)
        capabilities, traits = self.collector.session.engine.capabilities, self.collector.traits
        slow = self._call_s >= SLOW_CALL_S and capabilities.in_flight and not capabilities.lockstep
        self.streaming = slow and self.recipe.selection.rounds == 1 and not traits.greedy
        if not self.streaming:
            return await self._until_played()
        await drawn.wait()
        await asyncio.wait({task}, timeout=self._call_s)

    async def _until_played(self) -> None:
        started = time.perf_counter()
        await self._played.wait()
        self._for_episodes_s += time.perf_counter() - started

    async def compute(self, work: Callable[[], Result]) -> Result:
        """Run what the learner does before an update."""
        return work()

    def settle(self, step: int, collected: CollectedStep) -> None:
        """The ledger has the step already; there are no draws to record."""

    def state_dict(self) -> dict[str, Any]:
        """The task loader's state: nothing is open when a checkpoint is written."""
        return {"tasks": self.collector.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.collector.loader.load_state_dict(state["tasks"])

    async def beside_scoring(self, update: Callable[[], Result]) -> Result:
        """Run an update, in a thread while the step ahead is scored, and played where the rollout is eager.

        Returns when both are done, or where the next is still played.
        """
        if self._ahead is None or self._updating is None:
            return update()
        if self.streaming:
            return await compute_beside(self.collector.session, self._updating, update, turns=True)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._updating, update)
        finally:
            started = time.perf_counter()
            await asyncio.wait([self._ahead[0]])
            self._for_scores_s += time.perf_counter() - started

    async def abandon(self) -> CollectedStep | None:
        """At the run's end: a step that was played ahead and is not trained on."""
        if self._ahead is None:
            return None
        (task, _), self._ahead = self._ahead, None
        return await task

    def close(self) -> None:
        if self._updating is not None:
            self._updating.shutdown()

"""A simulation of a run's schedule: engines with continuous batching, and the learner.

An engine's rows decode together, and free rows are filled from a queue. For example rows of 2 and 5 tokens: both take steps
of s(2); after two steps the first ends, the next group is prefilled, and so on. Time advances from end to end, not from
token to token: 16,000 responses take a second to simulate, however long they are.

    synchronous    play 1 · score 1 · update 1, push · play 2 · …     everything waits for the slowest response
    one_step_off   play 2 · (update 1, push beside scoring 2) · play 3 · …     engines never sample during an update
    asynchronous   engines play on while ranks update; a step trains on the oldest complete groups

With staleness S and P groups a step, at most (S + 1)·P groups of an asynchronous run are open, and a step waits until after
it at most k·P groups must be trained within the next k steps. A push pauses the engines, and open groups continue with the
new weights. An engine without its own GPU pauses during updates.
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sensorium.forecast.costs import Costs, Push, StepWork

SHARING_ROWS = 8  # rows of a group for which a shared prompt is read once


@dataclass
class PlayedGroup:
    """A group of episodes: lengths of its responses, and their times."""

    lengths: list[int]
    began_s: float = 0.0
    ended_s: float = 0.0
    version: int = 0
    open_rows: int = 0

    @property
    def written(self) -> int:
        return sum(self.lengths)


@dataclass
class Engine:
    """One engine. ``now_s`` is when its next steps begin; ``busy_s`` the seconds in which it computed.

    ``rows`` is a heap of (step at which the row ends, number, length, group); ``waiting`` are rows without a place yet.
    """

    costs: Costs
    work: StepWork
    max_rows: int
    now_s: float = 0.0
    busy_s: float = 0.0
    rows: list[tuple[int, int, int, PlayedGroup]] = field(default_factory=list)
    steps: int = 0
    groups: int = 0
    waiting: deque[tuple[int, PlayedGroup]] = field(default_factory=deque)
    _numbers: int = 0
    _own_tokens: float = 0.0

    @property
    def room(self) -> int:
        return self.max_rows - len(self.rows) - len(self.waiting)

    @property
    def idle(self) -> bool:
        return not self.rows

    def admit(self, groups: list[PlayedGroup], version: int) -> None:
        """Prefill groups and start their rows; those without a place wait."""
        if not groups:
            return
        took = self.costs.prefill(len(groups), self.work)
        for group in groups:
            group.began_s, group.version, group.open_rows = self.now_s, version, len(group.lengths)
            self.waiting.extend((length, group) for length in group.lengths)
        self.now_s += took
        self.busy_s += took
        self.groups += len(groups)
        self._fill()

    def next_end_s(self) -> float:
        """When the next row will end."""
        return self.now_s + self._steps_ahead() * self._step_s()

    def run_to_next_end(self) -> list[PlayedGroup]:
        """Decode until a row ends; returns the groups that are complete then."""
        ahead = self._steps_ahead()
        self._advance(ahead, self._step_s())
        complete = []
        while self.rows and self.rows[0][0] <= self.steps:
            _, _, length, group = heapq.heappop(self.rows)
            self._own_tokens -= length
            group.open_rows -= 1
            if not group.open_rows:
                group.ended_s = self.now_s
                self.groups -= 1
                complete.append(group)
        self._fill()
        return complete

    def run_until(self, when_s: float) -> None:
        """Decode whole steps up to a moment before the next row ends; an engine without rows waits."""
        if self.idle:
            self.now_s = max(self.now_s, when_s)
            return
        step_s = self._step_s()
        self._advance(min(self._steps_ahead() - 1, int(max(0.0, when_s - self.now_s) / step_s)), step_s)

    def pause(self, seconds: float) -> None:
        """Wait for new weights; open rows are then prefilled again with them."""
        self.now_s += seconds
        if self.rows:
            took = self.costs.prefill_tokens(self.groups * self.work.prompt + self._own_tokens)
            self.now_s += took
            self.busy_s += took

    def _advance(self, ahead: int, step_s: float) -> None:
        self.now_s += ahead * step_s
        self.busy_s += ahead * step_s
        self.steps += ahead
        self._own_tokens += ahead * len(self.rows)

    def _fill(self) -> None:
        while self.waiting and len(self.rows) < self.max_rows:
            length, group = self.waiting.popleft()
            self._numbers += 1
            heapq.heappush(self.rows, (self.steps + length, self._numbers, length, group))

    def _steps_ahead(self) -> int:
        return self.rows[0][0] - self.steps

    def _step_s(self) -> float:
        # At the mean context until the next end; a group's prompt is read once for eight rows.
        prompts = max(self.groups, len(self.rows) / SHARING_ROWS)
        own = self._own_tokens + len(self.rows) * self._steps_ahead() / 2
        return self.costs.decode_step(len(self.rows), prompts * self.work.prompt + own)


def play(engines: list[Engine], groups: Iterable[PlayedGroup], version: int = 0) -> float:
    """Play all groups, distributed in turn, and return when the last one ends."""
    dealt: list[list[PlayedGroup]] = [[] for _ in engines]
    for i, group in enumerate(groups):
        dealt[i % len(engines)].append(group)
    for engine, own in zip(engines, dealt, strict=True):
        engine.admit(own, version)
        while not engine.idle:
            engine.run_to_next_end()
    return max(engine.now_s for engine in engines)


ScheduleName = Literal["synchronous", "one_step_off", "asynchronous"]
SCHEDULES: tuple[ScheduleName, ...] = ("synchronous", "one_step_off", "asynchronous")


@dataclass(frozen=True)
class Deployment:
    """How GPUs are divided: ``engines`` of ``engine_gpus`` GPUs each, and ranks of the learner.

    ``apart``: engines and ranks have their own GPUs; else one GPU does both in turn. ``sequence_parallel`` ranks share the
    tokens of each micro-batch. ``check_s``: the comparison of vLLM with the policy after a push.
    """

    engines: int = 1
    learners: int = 1
    sequence_parallel: int = 1
    engine_gpus: int = 1
    apart: bool = False
    schedule: ScheduleName = "synchronous"
    staleness: int = 1
    max_rows: int = 512
    scoring_s: float = 0.0
    pushed_bytes: float = 0.0
    push: Push = "file"
    check_s: float = 0.0

    @property
    def gpus(self) -> int:
        return self.engines * self.engine_gpus + self.learners if self.apart else self.learners


@dataclass(frozen=True)
class SimulatedRun:
    """Means over the steps of a run, in seconds per step; ``rollout_s`` to ``other_s`` are each part's own time.

    ``engines_busy`` and ``learners_busy`` are shares. Staleness: updates between a group's first token and its training.
    """

    step_s: float
    rollout_s: float
    scoring_s: float
    update_s: float
    gather_s: float
    push_s: float
    other_s: float
    tokens_per_s: float
    engines_busy: float
    learners_busy: float
    stale_mean: float
    stale_max: int


def simulate(
    sampling: Costs, learning: Costs, work: StepWork, plan: Deployment, *, steps: int = 6, seed: int = 0
) -> SimulatedRun:
    """Simulate so many steps; of an asynchronous run, after those in which it fills up."""
    run = _Run(sampling, learning, work, plan, seed)
    if plan.schedule == "asynchronous":
        return _Asynchronous(run, steps, filling=plan.staleness + 2).result()
    return run.in_turn(steps)


@dataclass
class _Update:
    """An update's seconds: computing, and beside it gathering weights and reducing gradients."""

    computing_s: float
    gathering_s: float

    @property
    def seconds(self) -> float:
        return max(self.computing_s, self.gathering_s)


class _Run:
    def __init__(self, sampling: Costs, learning: Costs, work: StepWork, plan: Deployment, seed: int) -> None:
        self.sampling, self.learning, self.work, self.plan = sampling, learning, work, plan
        self.seed = seed
        gpus = plan.engines * plan.engine_gpus
        sent_s = learning.push(plan.pushed_bytes, plan.engines, gpus, plan.push) if plan.pushed_bytes else 0.0
        self.push_s = sent_s + plan.check_s
        self.other_s = learning.other(work.episodes)

    def groups(self, step: int) -> list[PlayedGroup]:
        return [PlayedGroup(row) for row in self.work.lengths(self.work.prompts, self.seed + step).tolist()]

    def engines(self) -> list[Engine]:
        return [Engine(self.sampling, self.work, self.plan.max_rows) for _ in range(self.plan.engines)]

    def update(self, groups: list[PlayedGroup]) -> _Update:
        """All updates of a step: the rank with most work decides; ranks that share tokens exchange keys and values."""
        work, ranks, sharing = self.work, self.plan.learners, self.plan.sequence_parallel
        found = _Update(0.0, 0.0)
        for part in np.array_split(np.arange(len(groups)), work.updates):
            own = [groups[i] for i in part]
            count, written = _fullest(own, work.prompt, max(1, ranks // sharing))
            exchanged_s = self.learning.exchange(count, written, work, sharing)
            found.computing_s += work.epochs * (self.learning.update(count, written, work, ranks, sharing) + exchanged_s)
            found.gathering_s += work.epochs * self.learning.gathering(count, written, work, ranks)
        return found

    def in_turn(self, steps: int) -> SimulatedRun:
        """Synchronous, or one step off: phases follow each other, so a step's time is a sum."""
        off = self.plan.schedule == "one_step_off"
        rows = []
        for step in range(steps):
            groups, engines = self.groups(step), self.engines()
            rollout = play(engines, groups) + self.sampling.machine.constants.rollout_fixed_s
            scoring = max(0.0, max(group.ended_s + self.plan.scoring_s for group in groups) - rollout)
            update = self.update(groups)
            pushed = update.seconds + self.push_s
            step_s = rollout + (max(pushed, scoring) if off else scoring + pushed) + self.other_s
            busy = sum(engine.busy_s for engine in engines) / len(engines)
            written = sum(group.written for group in groups)
            rows.append((step_s, rollout, scoring, update.computing_s, update.gathering_s, written, busy, update.seconds))
        step_s, rollout, scoring, computing, gathering, written, busy, updating = np.array(rows).mean(0).tolist()
        return SimulatedRun(
            step_s=step_s,
            rollout_s=rollout,
            scoring_s=scoring,
            update_s=computing,
            gather_s=gathering,
            push_s=self.push_s,
            other_s=self.other_s,
            tokens_per_s=written / step_s,
            engines_busy=busy / step_s,
            learners_busy=updating / step_s,
            stale_mean=float(off),
            stale_max=int(off),
        )


class _Asynchronous:
    """An asynchronous run. Events, in order of time: a row's end, a group's score, an update's end."""

    def __init__(self, run: _Run, steps: int, filling: int) -> None:
        self.run, self.steps, self.filling = run, steps + filling, filling
        self.engines = run.engines()
        self.events: list[tuple[float, int, str, int, int]] = []
        self.numbers = 0
        self.scored: list[PlayedGroup] = []
        self.coming: dict[int, PlayedGroup] = {}
        self.drawn: list[PlayedGroup] = []
        self.open: Counter[int] = Counter()  # groups that are not in a step yet, by their first version
        self.draws = self.begun = self.trained = self.version = 0
        self.updating: tuple[list[PlayedGroup], _Update] | None = None
        self.pushed_s = 0.0  # when the last push is over
        self.ends: list[float] = []
        self.ages: list[int] = []
        self.written: list[int] = []
        self.computed: list[_Update] = []
        self.epochs = [0] * len(self.engines)  # a pause voids an engine's earlier events

    def result(self) -> SimulatedRun:
        for index in range(len(self.engines)):
            self._feed(index)
        while len(self.ends) < self.steps:
            when, _, what, index, epoch = heapq.heappop(self.events)
            if what == "row" and epoch == self.epochs[index]:
                for group in self.engines[index].run_to_next_end():
                    self.coming[self.numbers + 1] = group
                    self._push_event(group.ended_s + self.run.plan.scoring_s, "scored", self.numbers + 1)
                self._feed(index)
            elif what == "scored":
                self.scored.append(self.coming.pop(index))
                self._begin_update(when)
            elif what == "updated":
                self._updated(when)
        skip = self.filling
        span = self.ends[-1] - self.ends[skip - 1]
        count = self.steps - skip
        whole = self.ends[-1]
        return SimulatedRun(
            step_s=span / count,
            rollout_s=float(np.mean([engine.busy_s for engine in self.engines])) / len(self.ends),
            scoring_s=self.run.plan.scoring_s,
            update_s=float(np.mean([one.computing_s for one in self.computed])),
            gather_s=float(np.mean([one.gathering_s for one in self.computed])),
            push_s=self.run.push_s,
            other_s=self.run.other_s,
            tokens_per_s=sum(self.written[skip:]) / span,
            engines_busy=min(1.0, float(np.mean([engine.busy_s for engine in self.engines])) / whole),
            learners_busy=min(1.0, sum(one.seconds for one in self.computed) / whole),
            stale_mean=float(np.mean(self.ages)),
            stale_max=max(self.ages),
        )

    def _push_event(self, when: float, what: str, index: int = 0, epoch: int = 0) -> None:
        self.numbers += 1
        heapq.heappush(self.events, (when, self.numbers, what, index, epoch))

    def _feed(self, index: int) -> None:
        """Start groups on an engine within its room and the staleness bound, and schedule the end of its next row."""
        engine, plan, work = self.engines[index], self.run.plan, self.run.work
        bound = (plan.staleness + 1) * work.prompts - (self.begun - self.trained)
        share = -(-(plan.staleness + 1) * work.prompts // len(self.engines))  # for the other engines
        count = max(0, min(engine.room // work.group, bound, share - engine.groups))
        if count:
            engine.admit([self._draw() for _ in range(count)], self.version)
            self.begun += count
            self.open[self.version] += count
        if not engine.idle:
            self._push_event(engine.next_end_s(), "row", index, self.epochs[index])

    def _draw(self) -> PlayedGroup:
        if not self.drawn:
            self.drawn = self.run.groups(self.draws)[::-1]
            self.draws += 1
        return self.drawn.pop()

    def _begin_update(self, now: float) -> None:
        """Train on the oldest complete groups, if there are enough and no other group would grow too old."""
        wanted = self.run.work.prompts
        if self.updating is not None or len(self.scored) < wanted:
            return
        self.scored.sort(key=lambda group: group.version)
        groups = self.scored[:wanted]
        left = self.open - Counter(group.version for group in groups)
        for ahead in range(self.run.plan.staleness + 1):
            due = sum(count for version, count in left.items() if version + self.run.plan.staleness <= self.version + ahead)
            if due > ahead * wanted:
                return
        self.open, self.scored = left, self.scored[wanted:]
        update = self.run.update(groups)
        self.updating = groups, update
        busy = self.run.other_s + update.seconds
        begins = max(now, self.pushed_s)
        if not self.run.plan.apart:
            self._pause(begins, busy)
        self._push_event(begins + busy, "updated")

    def _pause(self, now: float, seconds: float) -> None:
        for index, engine in enumerate(self.engines):
            self.epochs[index] += 1
            engine.run_until(now)
            engine.pause(seconds)
            self._feed(index)

    def _updated(self, now: float) -> None:
        assert self.updating is not None
        groups, update = self.updating
        self.updating = None
        self.ages += [self.version - group.version for group in groups]
        self.written.append(sum(group.written for group in groups))
        self.computed.append(update)
        self.ends.append(now)
        self.trained += len(groups)
        self.version += 1
        self.pushed_s = now + self.run.push_s
        self._pause(now, self.run.push_s)
        self._begin_update(self.pushed_s)


def _fullest(groups: list[PlayedGroup], prompt: int, ranks: int) -> tuple[int, int]:
    """Groups and written tokens of the rank with most work, if the costliest groups go first to the least loaded rank."""
    loads = [(0, rank, 0, 0) for rank in range(ranks)]
    for cost, written in sorted(((prompt + group.written, group.written) for group in groups), reverse=True):
        load, rank, count, tokens = loads[0]
        heapq.heapreplace(loads, (load + cost, rank, count + 1, tokens + written))
    _, _, count, written = max(loads)
    return count, written

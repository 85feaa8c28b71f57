"""An engine with continuous batching, in simulated time: rows decode together, and free rows are filled from a queue.

A worked example: two rows of 2 and 5 tokens and one place each. Both take steps of s(2); after two steps the first ends,
the queue's next group is prefilled, and so on. Between two ends the engine takes as many steps as the shortest row needs.
So time goes from end to end and not from token to token: 16,000 responses take a second to simulate, however long.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from sensorium.forecast.costs import Costs
from sensorium.forecast.step_work import StepWork

SHARING_ROWS = 8  # rows of a group for which a shared prompt is read once


@dataclass
class PlayedGroup:
    """A group of episodes on its way: lengths of its responses, and what became of it."""

    lengths: list[int]
    began_s: float = 0.0
    ended_s: float = 0.0
    version: int = 0
    open_rows: int = 0

    @property
    def written(self) -> int:
        """Tokens of its responses."""
        return sum(self.lengths)


@dataclass
class Engine:
    """One engine. ``now_s`` is when its next steps begin; ``busy_s`` counts the seconds in which it computed."""

    costs: Costs
    work: StepWork
    max_rows: int
    now_s: float = 0.0
    busy_s: float = 0.0
    rows: list[tuple[int, int, int, PlayedGroup]] = field(default_factory=list)
    """A heap of (step at which the row ends, number, length, its group)."""
    steps: int = 0
    groups: int = 0
    waiting: deque[tuple[int, PlayedGroup]] = field(default_factory=deque)
    """Rows of groups that have begun and found no place yet."""
    _numbers: int = 0
    _own_tokens: float = 0.0

    @property
    def room(self) -> int:
        """Rows that are free."""
        return self.max_rows - len(self.rows) - len(self.waiting)

    @property
    def idle(self) -> bool:
        """True if it has nothing to do."""
        return not self.rows

    def admit(self, groups: list[PlayedGroup], version: int) -> None:
        """Prefill groups and begin their rows; those that find no place wait for one."""
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
        took = ahead * self._step_s()
        self.now_s += took
        self.busy_s += took
        self.steps += ahead
        self._own_tokens += ahead * len(self.rows)
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
        ahead = min(self._steps_ahead() - 1, int(max(0.0, when_s - self.now_s) / step_s))
        self.now_s += ahead * step_s
        self.busy_s += ahead * step_s
        self.steps += ahead
        self._own_tokens += ahead * len(self.rows)

    def pause(self, seconds: float) -> None:
        """Stand still for new weights; what is open is then prefilled again with them."""
        self.now_s += seconds
        if self.rows:
            took = self.costs.prefill_tokens(self.groups * self.work.prompt + self._own_tokens)
            self.now_s += took
            self.busy_s += took

    def _fill(self) -> None:
        while self.waiting and len(self.rows) < self.max_rows:
            length, group = self.waiting.popleft()
            self._numbers += 1
            heapq.heappush(self.rows, (self.steps + length, self._numbers, length, group))

    def _steps_ahead(self) -> int:
        return self.rows[0][0] - self.steps

    def _step_s(self) -> float:
        """Seconds of a step at the mean context until the next end; a group's prompt is read once for eight rows."""
        prompts = max(self.groups, len(self.rows) / SHARING_ROWS)
        own = self._own_tokens + len(self.rows) * self._steps_ahead() / 2
        return self.costs.decode_step(len(self.rows), prompts * self.work.prompt + own)


def play(engines: list[Engine], groups: Iterable[PlayedGroup], version: int = 0) -> float:
    """Play all groups, dealt out in turn, and return when the last one ends."""
    dealt: list[list[PlayedGroup]] = [[] for _ in engines]
    for i, group in enumerate(groups):
        dealt[i % len(engines)].append(group)
    for engine, own in zip(engines, dealt, strict=True):
        engine.admit(own, version)
        while not engine.idle:
            engine.run_to_next_end()
    return max(engine.now_s for engine in engines)

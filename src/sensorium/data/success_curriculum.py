"""A curriculum by observed success: tasks that some attempts solve and others do not are drawn again.

Example with ``revisit: 0.5`` and groups of 4. Step 1 draws a, b, c, d from the mixture. a was solved by 2 of 4 attempts, b
by 1, c by none and d by all. In step 2 every second task, on average, is a or b again, a with the higher weight (2·2 to
1·3); the others come from the mixture, e, f and so on. c and d are not lost: they come when the mixture comes back to them.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from sensorium.data.lru import LRU
from sensorium.data.mixture import SkippedRow, TaskStream
from sensorium.data.planner import GroupOutcome, PlannedTasks
from sensorium.vocabulary.errors import MediaError, RecipeError, TaskError
from sensorium.vocabulary.task import Task


class SuccessCurriculum:
    """Draws a share of its tasks from those whose last group succeeded in part, weighted by p · (1 - p).

    ``revisit`` is that share; the rest, and everything while no task is known to succeed in part, comes from the mixture
    in its order. Of the tasks that succeed in part the ``memory`` observed last are known. No task comes twice in a step
    by revisiting.
    """

    observes = True

    def __init__(self, stream: TaskStream, revisit: float = 0.5, memory: int = 4096) -> None:
        if not 0 <= revisit < 1:
            raise RecipeError(f"tasks.planner: revisit is {revisit:g}; it is a share of the draws, from 0 to below 1.")
        if memory < 1:
            raise RecipeError(f"tasks.planner: memory is {memory}; at least one task must be known to be drawn again.")
        self.stream, self.revisit = stream, revisit
        self.position = self.draws = 0
        self.known: LRU[str, tuple[int, int, float]] = LRU(memory)
        """Tasks that succeed in part, by id: source, row and success; those observed last stand last."""
        self.open: LRU[str, tuple[int, int]] = LRU(memory)
        """Tasks drawn since the last observation, by id: source and row (bounded: a warm start observes nothing)."""

    def whole_pass(self) -> int:
        """Draws within which every task comes up, as long as none that was played before fits."""
        return self.stream.whole_pass()

    def turns(self) -> list[int]:
        """How many rows of each source came from the mixture."""
        return self.stream.turns(self.position)

    def draw(self, count: int) -> PlannedTasks:
        """Tasks to revisit and tasks from the mixture, mixed by a coin whose throws the seed decides."""
        tasks: list[Task] = []
        skipped: list[SkippedRow] = []
        for _ in range(count):
            again = self._revisited(skipped) if self._chance("coin") < self.revisit else None
            tasks.append(again if again is not None else self._fresh(skipped))
            self.draws += 1
        return PlannedTasks(tuple(tasks), tuple(skipped))

    def observe(self, groups: Sequence[GroupOutcome]) -> None:
        """Know the tasks that succeeded in part, and forget those that did not or no longer do."""
        for outcome in groups:
            place, success = self.open.peek(outcome.task_id), outcome.success
            if place is None or success is None:
                continue
            self.known.pop(outcome.task_id)
            if 0 < success < 1:
                self.known.put(outcome.task_id, (*place, success))
        self.open.clear()

    def state_dict(self) -> dict[str, Any]:
        """Position, number of draws, and what is known of tasks."""
        return {
            "position": self.position,
            "draws": self.draws,
            "known": [[id, *entry] for id, entry in self.known.items()],
            "open": [[id, *place] for id, place in self.open.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.position, self.draws = state["position"], state["draws"]
        self.known.clear()
        self.open.clear()
        for id, source, row, success in state["known"]:
            self.known.put(id, (source, row, success))
        for id, source, row in state["open"]:
            self.open.put(id, (source, row))

    def _fresh(self, skipped: list[SkippedRow]) -> Task:
        """The next task of the mixture."""
        drawn = self.stream.draw(self.position, 1)
        self.position = drawn.position
        skipped += drawn.skipped
        (task,) = drawn.tasks
        self.open.put(task.id, self.stream.at(self.position - 1))
        return task

    def _revisited(self, skipped: list[SkippedRow]) -> Task | None:
        """A task that succeeds in part; None if there is none that was not drawn since the last observation."""
        candidates = [(id, entry) for id, entry in self.known.items() if id not in self.open]
        if not candidates:
            return None
        ends = list(accumulate(success * (1 - success) for _, (_, _, success) in candidates))
        chosen = min(bisect_right(ends, self._chance("task") * ends[-1]), len(ends) - 1)
        id, (source, row, _) = candidates[chosen]
        try:
            task = self.stream.sources[source][row]
        except (TaskError, MediaError) as error:
            if self.stream.on_bad_row == "refuse":
                raise
            skipped.append(SkippedRow(source, row, str(error)))
            self.known.pop(id)
            return None
        self.open.put(id, (source, row))
        return task

    def _chance(self, use: str) -> float:
        """A number from 0 to below 1 that depends on the seed, the draw and the use, and on nothing else."""
        digest = hashlib.blake2b(f"{self.stream.seed}/{use}/{self.draws}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) / 2**53

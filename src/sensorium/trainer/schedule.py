"""When a step is collected: as its turn comes, before the update of the step before it, or from groups played all the time.

    synchronous     collect 1 · update 1 · collect 2 · update 2 · …
    one_step_off    collect 1 · play 2 · update 1 beside scoring 2 · play 3 · update 2 beside scoring 3 · …

With one_step_off a step is trained on what the policy before its last update wrote. The engine still never samples while an
update is in flight, so what overlaps is the scoring (judges, reward services) of one step and the update of another. Before
a checkpoint or an evaluation nothing is played ahead (``Recipe.plays_ahead``): what follows one is a function of it alone.
``trainer/asynchronous.py`` has the third schedule.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from sensorium.recipe.schema import Recipe
from sensorium.trainer.asynchronous import AsynchronousSchedule
from sensorium.trainer.collect import CollectedStep, Collector
from sensorium.trainer.step_metrics import Clock
from sensorium.vocabulary.errors import RecipeError

Result = TypeVar("Result")


def make_schedule(
    recipe: Recipe, collector: Collector, new_clock: Callable[[], Clock]
) -> "Schedule | AsynchronousSchedule":
    """The schedule that a recipe names."""
    if recipe.schedule.name == "asynchronous":
        return AsynchronousSchedule(recipe, collector)
    return Schedule(recipe, collector, new_clock)


class Schedule:
    """Collects steps for a run. ``new_clock`` times a step that is played ahead.

    ``streaming``: responses may be open whenever weights change, which is so of the asynchronous schedule alone.
    """

    streaming = False

    def __init__(self, recipe: Recipe, collector: Collector, new_clock: Callable[[], Clock]) -> None:
        self.recipe, self.collector, self.new_clock = recipe, collector, new_clock
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
        """What a step trains on: played ahead, or now."""
        if self._ahead is None:
            collected = await self.collector.collect(step, clock)
            self._for_episodes_s += clock.seconds.get("rollout", 0.0)
            self._for_scores_s += clock.seconds.get("score", 0.0)
            return collected
        (task, its_clock), self._ahead = self._ahead, None
        started = time.perf_counter()
        collected = await task
        self._for_scores_s += time.perf_counter() - started
        clock.seconds |= its_clock.seconds
        return collected

    def take_waits(self, step_s: float) -> dict[str, float]:
        """Who waited for whom in a step of so many seconds. Nothing is played while the learner does not wait for it."""
        row = {
            "wait/learner_for_episodes_s": self._for_episodes_s,
            "wait/learner_for_scores_s": self._for_scores_s,
            "wait/engine_for_learner_s": max(0.0, step_s - self._for_episodes_s),
        }
        self._for_episodes_s = self._for_scores_s = 0.0
        return row

    async def play_ahead(self, step: int) -> None:
        """Begin to collect a step, and come back when it is played; its scores may still be missing."""
        played, clock = asyncio.Event(), self.new_clock()
        task = asyncio.create_task(self.collector.collect(step, clock, played.set))
        task.add_done_callback(lambda _: played.set())
        self._ahead = (task, clock)
        started = time.perf_counter()
        await played.wait()
        self._for_episodes_s += time.perf_counter() - started

    async def compute(self, work: Callable[[], Result]) -> Result:
        """Run what the learner does before an update."""
        return work()

    def settle(self, step: int, collected: CollectedStep) -> None:
        """A step is on record; there is nothing to add."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to draw on exactly: at this moment nothing is open."""
        return {"tasks": self.collector.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        self.collector.loader.load_state_dict(state["tasks"])

    async def beside_scoring(self, update: Callable[[], Result]) -> Result:
        """Run an update: in a thread while a step that was played ahead is scored, and come back when both are done."""
        if self._ahead is None or self._updating is None:
            return update()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._updating, update)
        finally:
            started = time.perf_counter()
            await asyncio.wait([self._ahead[0]])
            self._for_scores_s += time.perf_counter() - started

    async def abandon(self, then: Callable[[CollectedStep], Awaitable[None] | None]) -> None:
        """The run ends here: a step that was played ahead is not trained on; ``then`` puts it on record."""
        if self._ahead is not None:
            (task, _), self._ahead = self._ahead, None
            then(await task)

    def close(self) -> None:
        """Give the thread back."""
        if self._updating is not None:
            self._updating.shutdown()

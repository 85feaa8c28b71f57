"""The workers of a run beside engines and learners: those that play environments, and those that score."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from sensorium.assembly.environment_workers import EnvironmentWorkers
from sensorium.assembly.hosts import driver_address, open_host
from sensorium.engines.pool import PooledEngine
from sensorium.recipe.schema import Recipe
from sensorium.record.processes import ProcessRow
from sensorium.rewards.placed import MODULE, placeable, placed_term
from sensorium.rewards.scorer import Scorer
from sensorium.vocabulary.errors import RewardFailure, WorkersLost
from sensorium.workers.placed_workers import PlacedWorker, PlacedWorkers


def process_work(place: PlacedWorker | PooledEngine, work: str) -> str:
    """What the process of a place does: its work; or it is being replaced, or nothing is left of it, and why."""
    if place.ready:
        return work
    return f"is lost: {place.lost}" if place.lost else "is being replaced"


@dataclass(frozen=True)
class RunWorkers:
    """The workers of a run, as far as there are any."""

    environments: EnvironmentWorkers | None = None
    rewards: PlacedWorkers | None = None

    @property
    def kinds(self) -> dict[str, PlacedWorkers]:
        """Those that there are, by the key of their metrics."""
        found = {} if self.environments is None else {"environment": self.environments.placed}
        return found if self.rewards is None else found | {"reward": self.rewards}

    @property
    def processes(self) -> tuple[ProcessRow, ...]:
        """What each does."""
        return tuple(
            ProcessRow(
                f"{kind} worker {worker.number}",
                None if worker.process is None else worker.process.pid,
                process_work(worker, "works"),
                worker.replaced,
                lost=bool(worker.lost),
            )
            for kind, placed in self.kinds.items()
            for worker in placed.workers
        )

    def metrics(self, rolled_again: int) -> dict[str, float]:
        """How many take work, how many were replaced, and what was done again or given up because of that."""
        row: dict[str, float] = {}
        for kind, placed in self.kinds.items():
            row[f"worker/{kind}_ready"] = float(sum(worker.ready for worker in placed.workers))
            row[f"worker/{kind}_replaced"] = float(placed.replaced)
        if self.environments is not None:
            row["worker/rolled_again"] = float(rolled_again)
        if self.rewards is not None:
            row["worker/asked_again"] = float(self.rewards.asked_again)
            row["worker/given_up"] = float(self.rewards.given_up)
        return row

    def tell_by(self, noted: Callable[[str], None]) -> None:
        """Say by this which workers were lost."""
        for placed in self.kinds.values():
            placed.noted = noted


def open_workers(recipe: Recipe, scorer: Scorer, opened: ExitStack) -> RunWorkers:
    """Start what the recipe's cluster section asks for; slow terms of the scorer are then asked in workers."""
    section = recipe.cluster
    limits: dict[str, Any] = {"restarts": section.restarts, "start_s": section.start_s, "hang_s": section.hang_s}
    environments = rewards = None
    if section.environments:
        host = open_host(recipe, "an environment worker", WorkersLost)
        opened.callback(host.close)
        deadline_s, toward = recipe.rollout.environment_deadline_s, driver_address(recipe)
        environments = EnvironmentWorkers(host, section.environments, deadline_s, toward=toward, **limits)
        environments.start()
        opened.callback(environments.close)
    if section.rewards:
        settings = placeable(recipe.rewards, [term for term, _ in scorer.terms])
        host = open_host(recipe, "a reward worker", WorkersLost)
        opened.callback(host.close)
        rewards = PlacedWorkers(host, MODULE, settings, section.rewards, "reward worker", RewardFailure, **limits)
        rewards.start()
        opened.callback(rewards.close)
        scorer.terms = tuple(
            (placed_term(term, number, rewards) if number in settings else term, weight)
            for number, (term, weight) in enumerate(scorer.terms)
        )
    return RunWorkers(environments, rewards)

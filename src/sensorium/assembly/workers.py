"""The processes beside a run's driver: engines here or elsewhere, and workers that play environments or score."""

import asyncio
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sensorium.cluster.placed_workers import PlacedWorker, PlacedWorkers
from sensorium.cluster.python_process import ProcessHost, ThisMachine
from sensorium.data.media_store import MediaStore
from sensorium.engines.options import refuse_unable
from sensorium.engines.pool import EnginePool, PooledEngine
from sensorium.engines.protocol import Engine
from sensorium.envs.protocol import Environment
from sensorium.envs.remote.client import EnvironmentClient, PlacedEnvironment, Server
from sensorium.models.policy import Policy
from sensorium.recipe.checks import OWN_WEIGHTS, engine_gpus, ray_needs
from sensorium.recipe.registry import build, needs_a_row, parameters_of, resolve
from sensorium.recipe.schema import Recipe
from sensorium.rewards.placed import MODULE, placeable, placed_term
from sensorium.rewards.scorer import Scorer
from sensorium.runs.process_table import ProcessRow
from sensorium.vocabulary.errors import (
    EngineLost,
    EnvironmentFailure,
    RecipeError,
    RewardFailure,
    SensoriumError,
    WorkersLost,
)
from sensorium.vocabulary.task import Task

ENVIRONMENT_WORKER = "sensorium.services.environment_service"


def open_host(
    recipe: Recipe, what: str, lost: type[SensoriumError], folder: Path | None = None, gpus: float = 0.0
) -> ProcessHost:
    """This machine, or Ray. ``gpus`` is how many each process has, where the run's models are on GPUs."""
    section = recipe.cluster
    if section.placement != "ray":
        return ThisMachine()
    from sensorium.cluster.ray_host import RayHost

    seen = Path(folder or ".").absolute() if section.address else None
    needs = ray_needs(recipe, gpus=gpus > 0)
    return RayHost(section.address, needs, seen, what, lost, gpus=gpus, start_s=section.start_s)


class EnvironmentWorkers:
    """``count`` environment services in processes, and the client that plays with them."""

    def __init__(self, host: ProcessHost, count: int, deadline_s: float, pool: int = 0, **limits: Any) -> None:
        key = secrets.token_urlsafe()
        self._deadline_s = deadline_s
        self._client = EnvironmentClient([], key)
        self._servers: dict[PlacedWorker, Server] = {}
        settings = {
            "key": key,
            "deadline_s": deadline_s,
            "toward": "" if host.folder is None else host.address,
            "pool": pool,
        }
        kind = (ENVIRONMENT_WORKER, settings, count, "environment worker", EnvironmentFailure)
        self.placed = PlacedWorkers(host, *kind, **limits, changed=self._changed)

    def environment(self, task: Task, store: MediaStore) -> Environment:
        """A task's environment, played by one of the workers."""
        spec = task.environment
        assert spec is not None
        kind = resolve("environment", spec.name)
        if needs_a_row(kind) or ("task" in parameters_of(kind) and task.messages):
            raise RecipeError(
                f"task {task.id}: environment '{spec.name}' plays the question of its row, and cluster.environments plays "
                "by seeds alone. Leave cluster.environments out."
            )
        return PlacedEnvironment(store, self._client, spec.name, spec.options, self._deadline_s)

    async def available(self) -> None:
        """Wait until a worker takes episodes. WorkersLost if none is left."""
        if not any(worker.ready for worker in self.placed.workers):
            await asyncio.to_thread(self.placed.wait)

    def close(self) -> None:
        """End all."""
        self.placed.close()
        self._client.close()

    def _changed(self, worker: PlacedWorker, ready: bool) -> None:
        server = self._servers.pop(worker, None)
        if server is not None:
            self._client.drop(server)
        if ready:
            self._servers[worker] = self._client.add(worker.report)


def process_work(place: PlacedWorker | PooledEngine, work: str) -> str:
    """What the process of a place does: its work; or that it is being replaced, or lost, and why."""
    if place.ready:
        return work
    return f"is lost: {place.lost}" if place.lost else "is being replaced"


@dataclass(frozen=True)
class RunWorkers:
    """The workers of a run, if any."""

    environments: EnvironmentWorkers | None = None
    rewards: PlacedWorkers | None = None

    @property
    def kinds(self) -> dict[str, PlacedWorkers]:
        """Those that exist, by the key of their metrics."""
        found = {} if self.environments is None else {"environment": self.environments.placed}
        return found if self.rewards is None else found | {"reward": self.rewards}

    @property
    def processes(self) -> tuple[ProcessRow, ...]:
        """A row for each, for the table of processes."""
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
        """How many are ready and were replaced, and what was repeated or given up because of that."""
        row: dict[str, float] = {}
        for kind, placed in self.kinds.items():
            row[f"worker/{kind}_ready"] = float(sum(worker.ready for worker in placed.workers))
            row[f"worker/{kind}_replaced"] = float(placed.replaced)
        if self.environments is not None or rolled_again:
            row["worker/rolled_again"] = float(rolled_again)
        if self.rewards is not None:
            row["worker/asked_again"] = float(self.rewards.asked_again)
            row["worker/given_up"] = float(self.rewards.given_up)
        return row

    def tell_by(self, noted: Callable[[str], None]) -> None:
        """Report lost workers by this."""
        for placed in self.kinds.values():
            placed.noted = noted


def open_workers(recipe: Recipe, scorer: Scorer, opened: ExitStack) -> RunWorkers:
    """Start the workers that the recipe's cluster section asks for; slow terms of the scorer then run in workers."""
    section = recipe.cluster
    limits: dict[str, Any] = {"restarts": section.restarts, "start_s": section.start_s, "hang_s": section.hang_s}
    environments = rewards = None
    if section.environments:
        host = open_host(recipe, "an environment worker", WorkersLost)
        opened.callback(host.close)
        deadline_s = recipe.rollout.environment_deadline_s
        environments = EnvironmentWorkers(host, section.environments, deadline_s, recipe.environments.pool, **limits)
        environments.placed.start()
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


def visible_gpus(count: int, environment: Mapping[str, str] = os.environ) -> list[str]:
    """The names of the ``count`` GPUs that this process sees, as in CUDA_VISIBLE_DEVICES."""
    named = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] or [str(number) for number in range(count)]


def gpus_of_engines(recipe: Recipe, visible: Sequence[str], policy_gpu: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each engine. ``policy_gpu`` is the number of the driver's own; ranks have the first ones.

    For example, with four GPUs, one learner on GPU 0 and ``cluster.engines=3``: "1", "2", "3". With ``cluster.engines=4``
    one is missing: refused, or with ``cluster.share_gpus`` the last engine has "0", beside the learner.
    """
    section, each = recipe.cluster, int(engine_gpus(recipe))
    learning = {policy_gpu, *range(section.learners if section.shared else 0)}
    free = [name for number, name in enumerate(visible) if number not in learning]
    wanted = section.engines * each
    if len(free) < wanted:
        have = f"this machine has {len(visible)} ({len(visible) - len(free)} for the learner)"
        asked = f"cluster.engines={section.engines}" + (f" with tensor_parallel={each}" if each > 1 else "")
        if not section.share_gpus or each > len(visible):
            shared = "" if each > len(visible) else "let them share GPUs (cluster.share_gpus: true), "
            raise RecipeError(
                f"{asked} asks for {wanted} GPUs beside the learner's, and {have}. Ask for fewer engines, {shared}or place "
                "them on more machines (cluster.placement: ray)."
            )
        free += [name for name in visible if name not in free]
    return [",".join(free[(engine * each + one) % len(free)] for one in range(each)) for engine in range(section.engines)]


def gpu_count() -> int:
    """The number of GPUs that this process sees."""
    return torch.cuda.device_count()


def open_engine(recipe: Recipe, policy: Policy, folder: Path | None = None) -> tuple[Engine, ProcessHost]:
    """The recipe's engine, started, and its host. ``folder`` is the run directory, which all machines see."""
    section, cluster = recipe.rollout.engine, recipe.cluster
    on_gpus = policy.device.type == "cuda"
    host: ProcessHost = ThisMachine()
    if section.name in OWN_WEIGHTS:
        gpus = engine_gpus(recipe) if on_gpus else 0.0
        host = open_host(recipe, "an engine", EngineLost, folder, gpus)
    hosts = [host] * cluster.engines
    if on_gpus and cluster.engines > 1 and cluster.placement != "ray":
        visible = visible_gpus(gpu_count())
        names = gpus_of_engines(recipe, visible, policy.device.index or 0)
        hosts = [ThisMachine(one, shared=cluster.share_gpus) for one in names]

    def make_engine(number: int) -> Engine:
        given = {"policy": policy, "lockstep": recipe.lockstep, "host": hosts[number]}
        options = section.options | ({"routes": True} if recipe.algorithm.router_replay else {})
        if recipe.rollout.quantization != "none":
            options |= {"quantization": recipe.rollout.quantization}
        engine: Engine = build("engine", section.name, options, "rollout.engine.options", **given)
        return engine

    try:
        if cluster.engines > 1:
            streams = recipe.schedule.name == "asynchronous"
            engine: Engine = EnginePool(make_engine, cluster.engines, restarts=cluster.restarts, joins_at_push=streams)
        else:
            engine = make_engine(0)
        refuse_unable(engine.capabilities, recipe.rollout, recipe.model.precision, lockstep=recipe.lockstep)
        engine.start()
    except BaseException:
        host.close()
        raise
    return engine, host

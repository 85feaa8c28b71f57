"""The engine of a run: one or several, in this process, in others beside it, or wherever Ray places them."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from sensorium.assembly.workers import open_host
from sensorium.cluster.python_process import ProcessHost, ThisMachine
from sensorium.engines.options import refuse_unable
from sensorium.engines.pool import EnginePool
from sensorium.engines.protocol import Engine
from sensorium.models.policy import Policy
from sensorium.recipe.checks import OWN_WEIGHTS, engine_gpus
from sensorium.recipe.names import build
from sensorium.recipe.schema import Recipe
from sensorium.vocabulary.errors import EngineLost, RecipeError

# For example, four GPUs, ``cluster.learners=1`` on the first and ``cluster.engines=3``: learner 0 engine 0 → "1" engine
# 1 → "2" engine 2 → "3" With ``cluster.engines=4`` there is one too few: refused, or with ``cluster.share_gpus`` engine
# 3 → "0", beside the learner.


def visible_gpus(count: int, environment: Mapping[str, str] = os.environ) -> list[str]:
    """The names of the ``count`` GPUs that this process sees, as CUDA_VISIBLE_DEVICES calls them."""
    named = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] or [str(number) for number in range(count)]


def gpus_of_engines(recipe: Recipe, visible: Sequence[str], policy_gpu: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each engine. ``policy_gpu`` is the number of the driver's own; ranks have the first ones."""
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
    """The GPUs that this process sees."""
    return torch.cuda.device_count()


def open_engine(recipe: Recipe, policy: Policy, folder: Path | None = None) -> tuple[Engine, ProcessHost]:
    """The recipe's engine, started, and where its processes are. ``folder`` is the run directory: all machines see it."""
    section, cluster = recipe.rollout.engine, recipe.cluster
    lockstep, streams = recipe.lockstep, recipe.schedule.name == "asynchronous"
    on_gpus = policy.device.type == "cuda"
    gpus = engine_gpus(recipe) if on_gpus else 0.0
    placed = section.name in OWN_WEIGHTS
    host = open_host(recipe, "an engine", EngineLost, folder, gpus=gpus, on_gpus=on_gpus) if placed else ThisMachine()
    hosts = [host] * cluster.engines
    if on_gpus and cluster.engines > 1 and cluster.placement != "ray":
        visible = visible_gpus(gpu_count())
        names = gpus_of_engines(recipe, visible, policy.device.index or 0)
        hosts = [ThisMachine(one, shared=cluster.share_gpus) for one in names]

    def make_engine(number: int) -> Engine:
        given = {"policy": policy, "lockstep": lockstep, "host": hosts[number]}
        engine: Engine = build("engine", section.name, section.options, "rollout.engine.options", **given)
        return engine

    try:
        engine = (
            EnginePool(make_engine, cluster.engines, restarts=cluster.restarts, joins_at_push=streams)
            if cluster.engines > 1
            else make_engine(0)
        )
        refuse_unable(engine.capabilities, recipe.rollout, recipe.model.precision, lockstep=lockstep)
        engine.start()
    except BaseException:
        host.close()
        raise
    return engine, host

"""The engine of a run: one or several, in this process, in others beside it, or wherever Ray places them."""

from pathlib import Path

import torch

from sensorium.assembly.engine_gpus import gpus_of_engines, visible_gpus
from sensorium.assembly.hosts import open_host
from sensorium.engines.pool import EnginePool
from sensorium.engines.protocol import Engine
from sensorium.engines.requirements import refuse_unable
from sensorium.models.policy import Policy
from sensorium.recipe.cluster_checks import OWN_WEIGHTS, engine_gpus
from sensorium.recipe.names import build
from sensorium.recipe.schema import Recipe
from sensorium.vocabulary.errors import EngineLost
from sensorium.workers.hosts import ProcessHost, ThisMachine


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
        visible = visible_gpus(torch.cuda.device_count())
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

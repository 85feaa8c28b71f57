"""What a recipe's cluster section can get wrong beside its types."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from sensorium.recipe.objects import SCHEME
from sensorium.recipe.processes import computing_processes
from sensorium.recipe.schema import Recipe

ADDRESS = re.compile(r"(\w+://)?([^\s:/\[\]]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")
OWN_WEIGHTS = ("process", "vllm")
QUESTIONS = ("shapes", "intent", "daily_omni", "caprl", "captioned_shapes", "caption_reading", "sight_and_sound")
"""Sources whose tasks have no environment of their own."""


def cluster_problems(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Several engines need weights of their own each, and episodes that do not wait for each other."""
    section, rollout = recipe.cluster, recipe.rollout
    if section.engines > 1 and rollout.engine.name == "native":
        yield (
            "cluster.engines",
            f"{section.engines} engines need weights of their own each, and the native engine samples with the learner's: "
            f"use rollout.engine: {' or '.join(OWN_WEIGHTS)}.",
        )
    elif section.engines > 1 and rollout.schedule == "lockstep":
        yield (
            "cluster.engines",
            "lockstep is one order of all episodes in one engine, and several engines follow the clock: set "
            "rollout.schedule: eager.",
        )
    if section.sequence_parallel > 1:
        yield from _undivided_tokens(recipe)
    if section.address and section.placement != "ray":
        yield (
            "cluster.address",
            f"'{section.address}' is where a Ray cluster runs, and cluster.placement is '{section.placement}': nothing "
            "would go there. Set cluster.placement=ray, or cluster.address=''.",
        )
    elif section.address == "local":
        yield "cluster.address", "a cluster is started on this machine where no address is given: leave it out."
    elif section.address and not is_address(section.address):
        yield (
            "cluster.address",
            f"'{section.address}' is no address of a Ray cluster: give HOST:PORT, where 'ray start --head' listens (6379 "
            "if no other was given), or 'auto' on one of its machines.",
        )
    if not section.shared and (section.offload or section.backend != "auto"):
        key = "offload" if section.offload else "backend"
        default = "false" if section.offload else "auto"
        yield (
            f"cluster.{key}",
            f"it is for a learner of several ranks, and cluster.learners is {section.learners}: it would do nothing. Set "
            f"cluster.{key}={default}.",
        )
    elif section.backend == "nccl" and recipe.model.device == "cpu":
        yield "cluster.backend", "nccl needs GPUs, and model.device is cpu: leave it out, or set it to gloo."
    if section.environments:
        yield from _unplaced_environments(recipe)
    if section.rewards:
        yield from _unplaced_rewards(recipe)


def is_address(text: str) -> bool:
    """True for 'auto' and for HOST:PORT, also of Ray's client (``ray://``) and of IPv6 (``[::1]:6379``)."""
    found = ADDRESS.fullmatch(text)
    return text == "auto" or (found is not None and 0 < int(found["port"]) < 65536)


def cluster_notes(recipe: Recipe, *, gpus: bool, cpus: int | None = None) -> Iterator[str]:
    """What runs, but not as fast as its numbers promise. ``gpus``: this machine has some; ``cpus``: so many, if given."""
    device, cpus = recipe.model.device, cpus or _usable_cpus()
    if recipe.cluster.address or not (device == "cpu" or (device == "auto" and not gpus)):
        return  # other machines have CPUs of their own, and beside a GPU a process needs few
    parts = computing_processes(recipe.model_dump(include={"cluster", "rollout"}))
    # Of a synchronous run, engines wait while learners compute, and the other way round.
    at_once = max(parts.values(), default=0) if recipe.schedule.name == "synchronous" else sum(parts.values())
    if at_once > cpus:
        yield (
            f"cluster: {sum(parts.values())} processes ({', '.join(parts)}) share {cpus} CPU{'s' if cpus > 1 else ''} of "
            "this machine and take turns, so they are no faster than fewer would be; ask for fewer, or name a Ray cluster "
            "of more machines (cluster.placement=ray cluster.address=…)."
        )


def gpus_seen() -> bool:
    """True if this machine has GPUs, as far as that is known without torch."""
    return any(any(Path("/dev").glob(pattern)) for pattern in ("nvidia[0-9]*", "kfd", "dxg"))


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _undivided_tokens(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """What keeps the tokens of a micro-batch from being shared by several learners."""
    section = recipe.cluster
    sharing, learners = section.sequence_parallel, section.learners
    if learners % sharing:
        several = f"{learners} learners are" if learners > 1 else "there is one learner, which is"
        yield (
            "cluster.sequence_parallel",
            f"{sharing} learners are to share the tokens of a micro-batch, and {several} not a multiple of that: set "
            f"cluster.learners to {sharing}, {2 * sharing}, …, or leave cluster.sequence_parallel out.",
        )
    if recipe.model.precision == "matched":
        yield (
            "cluster.sequence_parallel",
            "model.precision is 'matched': attention would have to sum as the engine does, which is not built for tokens "
            "on several learners. Use model.precision: fast.",
        )


def _unplaced_environments(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """What keeps a recipe's environments from being played by workers."""
    named = [
        str(options["environment"])
        for source in (*recipe.tasks.train, *recipe.tasks.evaluate)
        if isinstance((options := source.options).get("environment"), str)
    ]
    if any(name == "remote" for name in named):
        yield (
            "cluster.environments",
            "'remote' is played by servers that the recipe names, wherever they are: workers would only pass it on. Name "
            "the environment itself, or leave cluster.environments out.",
        )
    if passed := [name for name in named if name.startswith(SCHEME)]:
        yield (
            "cluster.environments",
            f"'{passed[0]}' is an object of this process, which no other can import. Put it into a module and name it "
            "module:Class.",
        )
    if not any(source.source not in QUESTIONS for source in recipe.tasks.train):
        yield (
            "cluster.environments",
            "all tasks are questions, which are played in place: there is nothing for workers to do. Leave it out.",
        )


def _unplaced_rewards(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """What keeps a recipe's terms from being asked in workers."""
    if passed := [term.name for term in recipe.rewards.terms if term.name.startswith(SCHEME)]:
        yield (
            "cluster.rewards",
            f"the term '{passed[0]}' is an object of this process, which no other can import. Put it into a module and "
            "name it module:name.",
        )


def ray_needs(recipe: Recipe, *, gpus: bool) -> dict[str, dict[str, float]]:
    """What a Ray cluster must have for a recipe: by resource, how many for which key. ``gpus``: models are on GPUs."""
    section, engine = recipe.cluster, recipe.rollout.engine
    engines = section.engines if engine.name in OWN_WEIGHTS else 0
    counts = {"cluster.learners": float(section.learners), "cluster.engines": float(engines)}
    counts |= {"cluster.environments": float(section.environments), "cluster.rewards": float(section.rewards)}
    on_gpus = {"cluster.learners": float(section.learners), "cluster.engines": engines * engine_gpus(recipe)}
    return {"CPU": counts, "GPU": on_gpus if gpus else {}}


def engine_gpus(recipe: Recipe) -> float:
    """GPUs that one engine needs where models are on GPUs."""
    return float(recipe.rollout.engine.options.get("tensor_parallel", 1))

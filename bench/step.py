"""Whole training steps of a workload on one GPU: what a step takes and where its time goes."""

import asyncio
import gc
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from profiles import host_of, kernels_of
from workload import Workload, recipe_for, write_model

from sensorium.models.policy import Policy
from sensorium.recipe.plan import make_plan
from sensorium.recipe.schema import Recipe
from sensorium.runs.episodes import read_episodes
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.run import open_trainer

PEAK = 989e12  # bf16 operations a second of an H200, as NVIDIA states them


def _update_flops(policy: Policy, work: Workload, metrics: dict[str, float]) -> float:
    """6 operations for each parameter and token that it meets once: layers, head, tower. Recomputation does not count.

    A parameter that is not trained takes 4: it has no gradient of its own. Of experts those that a token is sent to count.
    Of clips the towers are not counted.
    """
    model = policy.adapter.language_model
    sent = policy.experts_per_token / getattr(model.config, "num_experts", 1) if policy.experts_per_token else 1.0
    layers = sum(
        (6 if p.requires_grad else 4) * p.numel() * (sent if ".experts." in name else 1)
        for name, p in model.layers.named_parameters()
    )
    tower = sum(p.numel() for p in policy.adapter.towers["picture"].module.parameters())
    patches = 0.0
    if not work.clip:
        patches = metrics["packing/tower_items"] * (work.pixels // policy.model.config.vision_config.patch_size) ** 2
    head = policy.adapter.head.weight
    a_head = (6 if head.requires_grad else 4) * head.numel()
    return layers * metrics["packing/tokens"] + a_head * metrics["packing/trained_tokens"] + 6 * tower * patches


def _an_update(trainer: Any, loop: asyncio.AbstractEventLoop) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Make one more step, and return what its update was given: groups and the rest, to be given again."""
    learner, seen = trainer.learner, []
    step = learner.step

    def watched(groups: Any, *rest: Any, **more: Any) -> Any:
        seen.append((groups, rest, more))
        return step(groups, *rest, **more)

    learner.step = watched
    loop.run_until_complete(trainer.advance())
    learner.step = step
    groups, rest, more = seen[0]
    return groups, rest, more


def _sharing(trainer: Any, loop: asyncio.AbstractEventLoop) -> dict[str, float]:
    """One update of a step's episodes with groups as they are, and with every episode as a group of its own.

    The tower sees each picture once in either: the ratio is what sharing prompts is worth, not sharing pictures.
    """
    step = trainer.learner.step
    together, rest, more = _an_update(trainer, loop)
    alone = [[sample] for group in together for sample in group]
    found: dict[str, float] = {}
    for name, groups in (("shared", together), ("alone", alone), ("shared again", together)):
        started = time.perf_counter()
        tokens = step(groups, *rest, **more)["packing/tokens"]
        torch.cuda.synchronize()
        found |= {f"{name} s": round(time.perf_counter() - started, 3), f"{name} tokens": tokens}
    return found | {"ratio": round(found["alone s"] / found["shared again s"], 2)}


def _prepared_gib(work: Workload) -> float:
    """Memory of the host for a step's preprocessed pictures, 1,176 float32 numbers a patch, and as much beside it."""
    patches = work.prompts * work.pictures * (work.pixels // 14) ** 2
    return 2 * patches * 1176 * 4 / 2**30


def _cut_responses(engine: Any, work: Workload) -> None:
    """Give responses lengths from the workload's heavy tail, step by step, instead of the recipe's longest."""
    generate, asked = engine.generate, count()

    async def cut(request: Any, *rest: Any) -> Any:
        step, place = divmod(next(asked), work.episodes)
        length = work.lengths(step)[place // work.group][place % work.group]
        return await generate(replace(request, sampling=replace(request.sampling, max_new_tokens=length)), *rest)

    engine.generate = cut


@contextmanager
def opened(
    work: Workload,
    tokens_per_microbatch: int,
    recompute: bool | str,
    moments: str,
    precision: str = "fast",
    alone: bool = False,
    lora: int = 0,
    replay: bool = False,
    fp8: bool = False,
) -> Iterator[tuple[Any, RunDirectory, Recipe]]:
    """A trainer of a workload, its run directory and its recipe. ``alone``: advantages that need no group.

    ``replay``: ``algorithm.router_replay``. ``fp8``: ``rollout.quantization``, with its correction.
    """
    algorithm: dict[str, Any] = {"advantage": {"name": "reinforce_plus_plus"}} if alone else {}
    algorithm |= {"correction": {"weights": "token"}} if fp8 else {}
    warnings.filterwarnings("ignore", message=".*deterministic.*")
    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(Path(scratch) / "model", work.family)
        directory = RunDirectory(Path(scratch) / "run").create()
        recipe = recipe_for(
            work,
            model,
            directory.path,
            model={"dtype": "bfloat16", "device": "cuda", "gradient_checkpointing": recompute, "precision": precision}
            | ({"lora": {"rank": lora}} if lora else {}),
            batch={"tokens_per_microbatch": tokens_per_microbatch},
            optimizer={"lr": 1e-6, "moments": moments},
            media={"memory_gib": max(1.0, _prepared_gib(work))},
            algorithm=algorithm | {"router_replay": replay},
        )
        if fp8:
            rollout = recipe.rollout.model_copy(update={"quantization": "fp8"})
            recipe = recipe.model_copy(update={"rollout": rollout})
        trainer = open_trainer(recipe, directory)
        if work.tail > 1:
            _cut_responses(trainer.session.engine, work)
        gc.collect()
        gc.freeze()  # as a run does when it starts
        try:
            yield trainer, directory, recipe
        finally:
            trainer.close()  # tasks of the next step are being drawn


def time_steps(
    name: str,
    work: Workload,
    steps: int,
    tokens_per_microbatch: int,
    recompute: bool | str,
    moments: str,
    profile: bool,
    precision: str = "fast",
    sharing: str = "on",
    lora: int = 0,
    replay: bool = False,
    fp8: bool = False,
) -> dict[str, Any]:
    """The medians of some steps, the first left out, and what the first took: it compiles and captures."""
    alone = sharing == "none"
    if alone:
        work = replace(work, prompts=work.episodes, group=1)
    given = work, tokens_per_microbatch, recompute, moments, precision, alone, lora, replay, fp8
    with opened(*given) as (trainer, directory, recipe):
        loop = asyncio.new_event_loop()
        seconds, before = [], torch.cuda.memory_stats()
        for i in range(1 + steps):
            if i == 1:
                before = torch.cuda.memory_stats()
            started = time.perf_counter()
            loop.run_until_complete(trainer.advance())
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
            print(f"step {i}: {seconds[-1]:.2f} s; {'; '.join(trainer.session.engine.notes)}", file=sys.stderr, flush=True)
        after = torch.cuda.memory_stats()
        rows = read_metrics(directory.metrics)[1:]
        middle = {name: round(statistics.median(row[name] for row in rows), 4) for name in rows[0] if name != "step"}
        if "packing/tokens" not in middle:
            failed = middle.get("episodes/failed", 0)
            logs = sorted(directory.episodes.iterdir())
            causes = [episode.failure for log in logs for *_, episode in read_episodes(log) if episode.failure]
            sys.exit(
                f"the steps made no update: {failed:g} of {work.episodes} episodes failed: {causes[-1] if causes else '?'}"
            )
        step, engine = statistics.median(seconds[1:]), trainer.session.engine
        tokens = work.episodes * middle["episodes/length_mean"]
        result = {
            "workload": name,
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "steps": steps,
            "step_s": round(step, 3),
            "first_step_s": round(seconds[0], 2),
            "rollout_s": round(middle["time/rollout_s"], 3),
            "update_s": round(middle["time/update_s"], 3),
            "update_mfu": round(_update_flops(trainer.session.policy, work, middle) / middle["time/update_s"] / PEAK, 3),
            "rollout_tokens_per_s": round(tokens / middle["time/rollout_s"]),
            "peak_gib": round(middle["memory/peak_gib"], 1),
            "reserved_gib": round(after["reserved_bytes.all.peak"] / 2**30, 1),
            "device_allocations": (after["num_device_alloc"] - before["num_device_alloc"]) / steps,
            "prob_error": middle.get("mismatch/prob_error"),
            "effective_share": middle.get("mismatch/effective_share"),
            "moments": moments,
            "precision": precision,
            "fp8": fp8,
            "recompute": recompute,
            "lora": lora,
            "sharing": sharing,
            "tower_passes": trainer.session.policy.counters.tower_passes,
            "forecast_gib": round(sum(make_plan(recipe).memory.values()) / 2**30, 1),
            "engine": vars(engine.counters) | {"notes": list(engine.notes)},
            "metrics": middle,
        }
        if sharing == "off":
            result["sharing off"] = _sharing(trainer, loop)
        if profile:
            groups, rest, more = _an_update(trainer, loop)
            result["kernels"] = kernels_of(lambda: trainer.learner.step(groups, *rest, **more))
            result["host"] = host_of(lambda: trainer.learner.step(groups, *rest, **more))
        return result

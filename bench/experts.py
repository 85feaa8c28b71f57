"""A mixture's experts as transformers computes them and as grouped products of ours, with and without replayed routes.

python -m bench experts [--lora 32] [--tokens-per-microbatch 14100] [--profile]

One process: a step to warm up, then two steps of each variant, of which the faster counts. The engine records routes in all
of them, so ``rollout_s`` includes that; compare it with ``step --workload A3B``. Look at

    update_s       stock against grouped (both recompute whole layers), then grouped with less recomputation
    peak_gib       of the same
    mismatch/*     of "grouped" and "grouped, replayed", which differ in nothing else
    changed_*      how many tokens and choices the learner's routers would have sent elsewhere
    layer_ms       forward and backward of one layer's experts, and the sum of its rows both ways
    kernels        with ``--profile``: of an update, stock and grouped

Results so far go to stderr as they come: about 90 s, after the model is made and loaded.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from profiles import kernels_of
from step import PEAK, _an_update, _update_flops, opened
from workload import Workload

from sensorium.models.experts import GROUPED, STOCK
from sensorium.runs.metrics import read_metrics


@dataclass(frozen=True)
class Variant:
    """What a step differs in."""

    experts: str
    recompute: bool | str = True
    parts: int = 1
    """Micro-batches are so many times smaller."""
    replay: bool = False


VARIANTS = {
    "stock": Variant(STOCK),
    "grouped": Variant(GROUPED),
    "grouped, replayed": Variant(GROUPED, replay=True),
    "grouped, selective": Variant(GROUPED, "selective"),
    "grouped, nothing recomputed": Variant(GROUPED, False, parts=2),
}
SHOWN = ("mismatch/", "router/", "time/rollout_s", "time/update_s")


def time_experts(work: Workload, tokens_per_microbatch: int, lora: int, profile: bool = False) -> dict[str, Any]:
    """Steps of all variants, experts of one layer, and kernels of an update."""
    result: dict[str, Any] = {}
    with opened(work, tokens_per_microbatch, True, "bfloat16", lora=lora, replay=True) as (trainer, directory, _):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(trainer.advance())
        policy, engine = trainer.session.policy, trainer.session.engine
        result["fallbacks"] = list(engine.notes)
        for name, variant in VARIANTS.items():
            _switch(trainer, variant, tokens_per_microbatch)
            try:
                result[name] = _timed(trainer, loop, directory, work)
            except torch.OutOfMemoryError as error:
                result[name] = f"does not fit: {str(error)[:120]}"
                torch.cuda.empty_cache()
            print(name, result[name], file=sys.stderr, flush=True)
        result["fallbacks"] = list(engine.notes)
        result["layer_ms"] = {name: _layer(policy, name, tokens_per_microbatch) for name in (STOCK, GROUPED)}
        for name in ("stock", "grouped") if profile else ():
            _switch(trainer, VARIANTS[name], tokens_per_microbatch)
            groups, rest, more = _an_update(trainer, loop)
            result[f"kernels, {name}"] = kernels_of(lambda: trainer.learner.step(groups, *rest, **more), 22)  # noqa: B023
    return result


def _switch(trainer: Any, variant: Variant, tokens: int) -> None:
    policy, stage, engine = trainer.session.policy, trainer.learner._stage, trainer.session.engine
    policy.model.set_experts_implementation(variant.experts)
    policy.checkpoint_gradients(variant.recompute, policy.tower_room)
    limit = -(-tokens // variant.parts)
    stage._batch = stage._batch.model_copy(update={"tokens_per_microbatch": limit})
    stage._algorithm = stage._algorithm.model_copy(update={"router_replay": variant.replay})
    engine.reset_cache()
    engine._writer._runner._reset()  # graphs hold the experts that they were captured with


def _timed(trainer: Any, loop: asyncio.AbstractEventLoop, directory: Any, work: Workload) -> dict[str, Any]:
    found = []
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        loop.run_until_complete(trainer.advance())
        torch.cuda.synchronize()
        row = read_metrics(directory.metrics)[-1]
        found.append((time.perf_counter() - started, torch.cuda.max_memory_allocated() / 2**30, row))
    seconds, peak, row = min(found, key=lambda one: one[2]["time/update_s"])
    mfu = _update_flops(trainer.session.policy, work, row) / row["time/update_s"] / PEAK
    shown = {name: round(value, 5) for name, value in row.items() if name.startswith(SHOWN)}
    return {"step_s": round(seconds, 3), "update_mfu": round(mfu, 3), "peak_gib": round(peak, 1), **shown}


def _layer(policy: Any, name: str, tokens: int) -> dict[str, float]:
    """Milliseconds of one layer's experts over a full micro-batch, with frozen weights."""
    policy.model.set_experts_implementation(name)
    block = policy.adapter.language_model.layers[0].mlp
    weight = block.experts.gate_up_proj
    x_TH = torch.randn(tokens, weight.shape[2], device=weight.device, dtype=weight.dtype).requires_grad_()
    with torch.no_grad():
        _, weights_TK, ids_TK = block.gate(x_TH)
    weights_TK = weights_TK.clone().requires_grad_()
    out_TH = block.experts(x_TH, ids_TK, weights_TK)

    def backward() -> Any:
        return torch.autograd.grad(out_TH, [x_TH, weights_TK], out_TH, retain_graph=True)

    with torch.no_grad():
        forward = _milliseconds(lambda: block.experts(x_TH, ids_TK, weights_TK))
    return {"forward": forward, "backward": _milliseconds(backward)}


def _milliseconds(work: Callable[[], Any], rounds: int = 5) -> float:
    work()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(rounds):
        work()
    torch.cuda.synchronize()
    return round((time.perf_counter() - started) / rounds * 1e3, 3)

"""What each GPU kernel is worth: whole steps of a workload with all kernels, and with one operation in plain torch.

python -m bench kernels --workload W1 [--steps 3] [--limit-s 500] [--known FILE] [--out FILE]

``OPERATIONS`` is the table: for each operation the places that call its kernel, and the torch reference that takes them
over while it is off. Nothing of the package knows of it. Operations of the rollout alone and of the update alone are
switched off in pairs, one of each, and their parts of the step are read apart:

    on          rollout 1.1 s   update 1.5 s   step 2.7 s
    A and B off rollout 1.3 s   update 1.9 s                    A: 2.9 / 2.7 = 1.07    B: 3.1 / 2.7 = 1.15

"On" is measured again after every few pairs; an operation is compared with the mean of the measurements around it. Steps
count as rollout and update: the noise pictures of W2 take the host 3 s more, which no kernel changes. ``--known`` names
earlier results (workload to result, as ``bench/baselines/kernels_h200.json``): what they settle is not timed again.
"""

import asyncio
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from step import opened
from torch import Tensor
from workload import Workload

from sensorium.kernels import layer_torch
from sensorium.runs.metrics import read_metrics

Phase = Literal["rollout", "update", "both"]
CLEAR = 1.08
"""An operation that makes another workload slower by so much, switched off, is not timed again."""
PAIRS_BETWEEN = 4
"""Pairs of operations between two measurements with all kernels on."""
ENGINE, MODELS, LEARNER = "sensorium.engines.native.", "sensorium.models.", "sensorium.learner."
KERNELS = "sensorium.kernels."


@dataclass(frozen=True)
class Operation:
    """One operation: ``places`` maps "module:name" to what takes the kernel's place there."""

    name: str
    phase: Phase
    places: dict[str, Any]
    workloads: str = "W1 W2"
    """Where it may matter: few rows are only in W3; what is done once a decode step or once a token is least in W2."""
    towers: tuple[bool, bool] | None = None
    """Whether blocks of the vision tower use kernels, and are one function; None: as chosen."""

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, its torch reference runs. Decode graphs captured before still hold the kernel."""
        with ExitStack() as stack:
            for place, replacement in self.places.items():
                module, _, name = place.partition(":")
                owner: Any = import_module(module)
                *path, attribute = name.split(".")
                for part in path:
                    owner = getattr(owner, part)
                stack.enter_context(patch.object(owner, attribute, replacement))
            yield


# Torch references of the operations.


def plain_head(scorer: Any, *given: Any) -> Any:
    """``LogprobScorer._head`` without kernels."""
    from sensorium.learner.forward import LogprobScorer

    before, scorer._fused = scorer._fused, False
    try:
        return _HEAD[LogprobScorer](scorer, *given)
    finally:
        scorer._fused = before


_HEAD: dict[type, Callable[..., Any]] = {}


def plain_add_product(ops: Any, layer: Any, x_BK: Tensor, residual_BW: Tensor, norm: Any, kind: Any = None) -> Any:
    """``TritonOps.add_product`` with its product, and torch for the rest."""
    from sensorium.engines.native.decode_kernels import fits, product_parts
    from sensorium.engines.native.decode_state import TorchOps
    from sensorium.kernels.layer_ops import FINE_SCALE

    if not fits([layer], x_BK):
        return TorchOps.add_product(ops, layer, x_BK, residual_BW, norm, kind)
    summed = product_parts(x_BK, [layer.weight]).sum(0)
    summed = summed if x_BK.dtype == layer.weight.dtype else summed * FINE_SCALE
    summed = summed if layer.bias is None else summed + layer.bias
    return TorchOps.add_norm(ops, summed, residual_BW, norm, kind)


def plain_placed(
    ops: Any,
    projected: Sequence[Tensor],
    biases: Sequence[Tensor],
    parts: int,
    query_BHD: Tensor,
    rotary: Any,
    norms: Any,
    rows: Any,
    layer_block: Tensor,
) -> Tensor:
    """``TritonOps._placed``."""
    from sensorium.engines.native.decode_state import TorchOps

    three: Sequence[Tensor] = projected
    if parts:
        size, kv_heads = layer_block.shape[-1], layer_block.shape[2]
        widths = [query_BHD.shape[1] * size, kv_heads * size, kv_heads * size]
        three = projected[0].sum(0).split(widths, 1)
        if biases:
            three = [part + bias for part, bias in zip(three, biases, strict=True)]
        three = [part.to(layer_block.dtype) for part in three]
    return TorchOps.place(ops, *three, rotary, norms, rows, layer_block)


def plain_attend(ops: Any, query: Any, rows: Any, layer_block: Tensor, scaling: float) -> Tensor:
    """``TritonOps.attend``, also of what the kernel of one launch takes."""
    from sensorium.engines.native.decode_state import TorchOps, Unplaced

    if isinstance(query, Unplaced):
        query = ops._placed_parts(query, rows, layer_block)
    return TorchOps.attend(ops, query, rows, layer_block, scaling)


def stock_stack(policy: Any) -> Any:
    """``Policy._stack`` without fused layers."""
    from sensorium.models.fused import LayerStack

    model = policy.adapter.language_model
    return LayerStack(model.layers, model.norm)


def operations() -> list[Operation]:
    """The table, those that are expected to matter first."""
    from sensorium.engines.native.decode_state import TorchOps
    from sensorium.learner.forward import LogprobScorer

    _HEAD.setdefault(LogprobScorer, LogprobScorer._head)
    ops, never = ENGINE + "decode_kernels:TritonOps.", lambda *_, **__: False

    def of(*names: str) -> dict[str, Any]:
        """The operations that layers and tower blocks share, in plain torch."""
        return {f"{KERNELS}layer_triton:{name}": getattr(layer_torch, name) for name in names}

    return [
        Operation("decode: attention in one launch (row_attention.cu)", "rollout",
                  {ENGINE + "decode_kernels:RowAttention.pays": never}, "W1 W2 W3"),
        Operation("decode: products (product_kernels)", "rollout", {ENGINE + "decode_kernels:fits": never}, "W1 W3"),
        Operation("decode: all attention (attention_kernels, row_attention.cu)", "rollout", {ops + "attend": plain_attend}),
        Operation("decode: norms and gates (decode_kernels, layer_kernels)", "rollout", {
            ops + "norm": TorchOps.norm, ops + "add_norm": TorchOps.add_norm, ops + "gate": TorchOps.gate,
            ops + "gate_finely": TorchOps.gate_finely, ops + "add_product": plain_add_product}, "W1"),
        Operation("decode: placing keys and values (_place)", "rollout", {
            ops + "_placed": plain_placed, ENGINE + "decode_kernels:RowAttention.pays": never}, "W1"),
        Operation("decode: sampler (sampler_kernels)", "rollout", {ops + "draw": TorchOps.draw}, "W1"),
        Operation("decode: launches ahead (launch_ahead)", "rollout", {
            KERNELS + "decode_attention_triton:_possible": never}, "W1"),
        Operation("pages: writing, copying (attention_kernels)", "rollout", {
            ENGINE + "key_values:find_spec": lambda _: None}),
        Operation("update: head (head_kernels)", "update", {LEARNER + "forward:LogprobScorer._head": plain_head}, "W1"),
        Operation("update: AdamW (adam_kernels)", "update", {LEARNER + "optimizer:_fits_kernel": never}, "W1"),
        Operation("update: cuDNN for long blocks (block_attention)", "update", {
            LEARNER + "tree_attention:TorchFlash.leaves_to_cudnn": never}, "W2"),
        Operation("layers: norms (layer_kernels)", "both", of("normed", "add_normed", "norm_gradients")),
        Operation("layers: gates (layer_kernels)", "both", of("gated", "gated_finely", "gate_gradients")),
        Operation("layers: rotation (qkv_kernels)", "both", of("split_rotated", "joined_gradients")),
        Operation("tower: blocks as one function (tower_products)", "both", {}, towers=(True, False)),
        Operation("tower: all", "both", {}, towers=(False, False)),
        Operation("tower: gates (gate_kernels)", "both", of("gated_pair", "gate_pair_gradients"), "W2"),
        Operation("tower: rotation (tower_kernels)", "both", of("rotate_into"), "W2"),
        Operation("layers: all (fused, fused_products, layer_kernels)", "both", {
            MODELS + "policy:Policy._stack": stock_stack}, "W1"),
    ]  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """Medians of some steps: the whole, its rollout and its update, in seconds."""

    step: float
    rollout: float
    update: float
    steps: tuple[float, ...]


class Bench:
    """A trainer whose steps are timed."""

    def __init__(self, trainer: Any, metrics: Path, steps: int) -> None:
        self._trainer, self._metrics, self._steps = trainer, metrics, steps
        self._loop = asyncio.new_event_loop()
        self._captured: list[str] = []
        """Operations of the rollout that were off when its decode steps were captured."""

    def step(self) -> float:
        """Seconds of one step."""
        started = time.perf_counter()
        self._loop.run_until_complete(self._trainer.advance())
        torch.cuda.synchronize()
        return time.perf_counter() - started

    def measure(self, several: Sequence[Operation], warm_up: int = 0) -> Measured:
        """Steps with these operations off, after one in which decode steps are captured where these change."""
        with ExitStack() as stack:
            for operation in several:
                stack.enter_context(operation.off())
            self._choose_towers(next((each.towers for each in several if each.towers is not None), None))
            for _ in range(warm_up + self._captures_again([each.name for each in several if each.phase == "rollout"])):
                self.step()
            seconds = tuple(round(self.step(), 3) for _ in range(self._steps))
            rows = read_metrics(self._metrics)[-self._steps :]
        middle = [statistics.median(row[f"time/{part}_s"] for row in rows) for part in ("rollout", "update")]
        found = Measured(statistics.median(seconds), *middle, seconds)
        print([each.name for each in several], found, file=sys.stderr, flush=True)
        return found

    def _captures_again(self, off: list[str]) -> bool:
        """Have decode steps captured again where other operations are off than before."""
        if off == self._captured:
            return False
        self._captured = off
        self._trainer.session.engine._writer._runner._reset()
        gc.collect()
        torch.cuda.empty_cache()
        return True

    def _choose_towers(self, towers: tuple[bool, bool] | None) -> None:
        from sensorium.models.tower import _set, choose

        tower = self._trainer.session.policy.adapter.towers["picture"].module
        choose(tower)
        for block in tower.blocks if towers is not None else ():
            _set(block, *towers)


def pairs_of(several: Sequence[Operation]) -> list[tuple[Operation, ...]]:
    """Operations that are off together: one of the rollout with one of the update, others alone."""
    rollout, update, both = ([each for each in several if each.phase == phase] for phase in ("rollout", "update", "both"))
    count = min(len(rollout), len(update))
    paired = list(zip(rollout, update, strict=False))
    return [*paired, *((each,) for each in (*rollout[count:], *update[count:], *both))]


def row_of(operation: Operation, off: Measured, on: Measured) -> dict[str, Any]:
    """What an operation's kernel is worth, of a step in which it was off and one in which all were on."""
    rollout, update = off.rollout - on.rollout, off.update - on.update
    whole = on.rollout + on.update
    slower = whole + {"rollout": rollout, "update": update, "both": rollout + update}[operation.phase]
    return {
        "operation": operation.name,
        "phase": operation.phase,
        "on_s": round(whole, 3),
        "off_s": round(slower, 3),
        "ratio": round(slower / whole, 3),
        "ratio_of_step": round((on.step + slower - whole) / on.step, 3),
        "steps_off_s": off.steps,
    }


def between(first: Measured, second: Measured) -> Measured:
    """The mean of two measurements."""
    return Measured(*((getattr(first, key) + getattr(second, key)) / 2 for key in ("step", "rollout", "update")), ())


def time_kernels(
    name: str, work: Workload, steps: int, tokens_per_microbatch: int, limit_s: float, known: Path | None, out: Path
) -> dict[str, Any]:
    """The table of a workload; each row is written to ``out`` as soon as it is known. Ends within about ``limit_s``."""
    began, settled = time.perf_counter(), _settled(known, name)
    several = [each for each in operations() if name in each.workloads and each.name not in settled]
    result: dict[str, Any] = {
        "workload": name, "device": torch.cuda.get_device_name(), "torch": torch.__version__, "steps": steps,
        "on": [], "operations": [], "failed": {}, "not timed": [],
    }  # fmt: skip
    with opened(work, tokens_per_microbatch, "auto", "bfloat16") as (trainer, directory, _):
        bench = Bench(trainer, directory.metrics, steps)
        on = bench.measure((), warm_up=1 if work.tail > 1 else 2)
        result["on"].append(vars(on))
        waiting: list[tuple[Operation, Measured]] = []
        remaining = pairs_of(several)
        while remaining:
            pair, *remaining = remaining
            try:
                off = bench.measure(pair)
                waiting += [(operation, off) for operation in pair]
            except Exception as error:  # out of memory, say: the other rows are worth having
                result["failed"] |= {each.name: f"{type(error).__name__}: {str(error)[:200]}" for each in pair}
            late = time.perf_counter() - began > limit_s
            if late or not remaining or len(waiting) >= 2 * PAIRS_BETWEEN:
                again = bench.measure(())
                result["on"].append(vars(again))
                middle = between(on, again)
                result["operations"] += [row_of(operation, off, middle) for operation, off in waiting]
                on, waiting = again, []
            out.write_text(json.dumps(result, indent=1) + "\n")
            if late:
                break
        result["not timed"] = [operation.name for pair in remaining for operation in pair]
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result), file=sys.stderr)
    return result


def _settled(known: Path | None, workload: str) -> set[str]:
    """Operations that earlier results settle: worth their place in any workload, or timed in this one."""
    results = {} if known is None else json.loads(known.read_text())
    rows = [(name, row) for name, result in results.items() for row in result["operations"]]
    return {row["operation"] for name, row in rows if row["ratio"] >= CLEAR or name == workload}


def table(result: dict[str, Any]) -> str:
    """The result in columns."""
    rows = sorted(result["operations"], key=lambda row: -row["ratio"])
    lines = [f"{row['ratio']:6.3f} {row['on_s']:7.3f} {row['off_s']:7.3f}  {row['operation']}" for row in rows]
    return "\n".join([f"{result['workload']}: ratio, step with it on, off", *lines, json.dumps(result["failed"])])

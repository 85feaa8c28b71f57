"""Fit the forecast's constants to what was measured, and write them with their sources.

python bench/calibrate.py > src/sensorium/assets/forecast/calibration.json

A GPU's constants come from bench/baselines/h200.json, a CPU's (by which schedules and ranks are tested) from cpu.json. What
is used here is not tested on: tests/forecast/test_measured.py has the cases that were held out.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from measured_cases import A3B, A3B_STEP, CPU_CASES, GPU_BUCKETS, H200, W1, cpu_costs, cpu_work, gpu_costs, gpu_model

from sensorium.forecast.costs import Constants, Costs, StepWork
from sensorium.forecast.simulator import SHARING_ROWS, Engine, PlayedGroup, play

MUCH = 1e30
RATES = {
    "weight_reads", "kv_reads", "decode_flops", "prefill_flops", "update_flops", "expert_flops", "attention_flops",
    "push_bytes",
}  # fmt: skip
FREE = replace(
    Constants(**{field.name: MUCH if field.name in RATES else 0.0 for field in fields(Constants)}), rank_times=1.0
)
"""A machine on which nothing takes time. One constant at a time is set to 1 in it, to learn what it multiplies."""
CLEAN = H200["main, clean"]
NIGHT = H200["night"]["float16 activations in the first MLPs, kernels launched ahead with weights asked for (not kept)"]
ROWS = NIGHT["ms of a decode step by rows, contexts of 880 tokens, groups of 8 with 256 in common"]
BANDWIDTH = 4.3 / 4.8  # bench/LOG.md: 21 of 26 µs of gate and up would be reading them at 4.3 TB/s
ATTENTION_READS = BANDWIDTH * 7 / 13  # the same: attention takes 13 µs where reading keys and values would take 7
ATTENTION = 243 / 989  # the same: flash attention of an update of W2 at 243 TFLOP/s


def fitted(
    known: Constants, names: Sequence[str], parts: Sequence[tuple[Callable[[Constants], float], float]]
) -> Constants:
    """The named constants, by least squares of relative errors over parts and their seconds; none is negative."""
    table = [[part(replace(FREE, **{name: 1.0})) for name in names] for part, _ in parts]
    left = [seconds - part(known) for part, seconds in parts]
    scales = np.array([seconds for _, seconds in parts])
    kept = list(range(len(names)))
    while True:
        found = np.linalg.lstsq(np.array(table)[:, kept] / scales[:, None], np.array(left) / scales, rcond=None)[0]
        if (found >= 0).all():
            break
        kept.pop(int(np.argmin(found)))
    values = {names[i]: float(value) for i, value in zip(kept, found, strict=True)}
    return replace(known, **{name: 1 / value if name in RATES else value for name, value in values.items()})


def gpu_constants() -> Constants:
    """From decode steps by rows, first tokens, and updates of W1."""
    known = replace(FREE, weight_reads=BANDWIDTH, kv_reads=ATTENTION_READS, attention_flops=ATTENTION)

    def decode(rows: int) -> Callable[[Constants], float]:
        tokens = rows * (880 - 256) + -(-rows // SHARING_ROWS) * 256
        return lambda by: gpu_costs(by).decode_step(rows, tokens)

    steps = [(decode(int(rows)), 1e-3 * ms) for rows, ms in ROWS["launched ahead, weights asked for"].items()]
    known = fitted(known, ["decode_layer_s", "decode_flops"], steps)
    first = [(16, CLEAN["rollout --workload W1 --rounds 4"]), (64, CLEAN["rollout --workload W1 --prompts 64 --rounds 3"])]
    known = fitted(
        known,
        ["prefill_fixed_s", "prefill_flops"],
        [(lambda by, n=n: gpu_costs(by).prefill(n, W1), case["first_token_s"]) for n, case in first],
    )
    updates = [
        (4700, False, H200["step --workload W1 --recompute none --tokens-per-microbatch 4700"]),
        (14100, False, H200["step --workload W1 --recompute none --tokens-per-microbatch 14100"]),
        (4700, False, CLEAN["step --workload W1 --steps 2 --recompute none --tokens-per-microbatch 4700"]),
        (14100, False, CLEAN["step --workload W1 --steps 3 --recompute auto --tokens-per-microbatch 14100"]),
        (14100, True, H200["step --workload W1 --recompute full --tokens-per-microbatch 14100"]),
    ]

    def update(tokens: int, recompute: bool) -> Callable[[Constants], float]:
        work = replace(W1, tokens_per_microbatch=tokens)
        return lambda by: gpu_costs(by, recompute=recompute).update(16, work.sampled, work)

    parts = [(update(tokens, recompute), case["update_s"]) for tokens, recompute, case in updates]
    known = fitted(known, ["update_flops", "microbatch_s", "update_fixed_s"], parts)
    mixture, case = gpu_model("Qwen3-VL-30B-A3B", recompute=True, lora=True), H200[A3B_STEP]
    experts = [(lambda by: replace(gpu_costs(by), model=mixture).update(8, A3B.sampled, A3B), case["update_s"])]
    known = fitted(known, ["expert_flops"], experts)
    alone = played(gpu_costs(known), W1)
    rollout = float(np.mean([case["rollout_s"] - alone for _, recompute, case in updates if not recompute]))
    times = H200["before: the code of the afternoon"]["step --workload W1 --steps 3 --tokens-per-microbatch 14100"]["times"]
    other = (times["time/record_s"] + times["time/credit_s"]) / W1.episodes
    return replace(known, rollout_fixed_s=rollout, other_episode_s=other, push_bytes=1.06e9)


def played(costs: Costs, work: StepWork) -> float:
    """Seconds until one engine has played a step."""
    return play([Engine(costs, work, 512)], [PlayedGroup(row) for row in work.lengths(work.prompts, 0).tolist()])


def cpu_constants() -> Constants:
    """From the cases of cpu.json that are there to calibrate."""
    alone = [case for case in CPU_CASES if case["role"] == "calibrate" and case["ranks"] == 1]
    shared = [case for case in CPU_CASES if case["role"] == "calibrate" and case["ranks"] == 2]

    def rollout(case: dict[str, Any]) -> Callable[[Constants], float]:
        return lambda by: played(cpu_costs(by), cpu_work(case))

    def update(case: dict[str, Any]) -> Callable[[Constants], float]:
        work = cpu_work(case)
        groups = work.prompts / case["ranks"]
        return lambda by: cpu_costs(by).update(groups, work.sampled / case["ranks"], work, case["ranks"])

    def other(case: dict[str, Any]) -> Callable[[Constants], float]:
        return lambda by: cpu_costs(by).other(cpu_work(case).episodes)

    names = ["decode_fixed_s", "decode_flops", "kv_reads", "prefill_flops"]
    known = fitted(FREE, names, [(rollout(case), case["rollout_s"]) for case in alone])
    names = ["update_flops", "update_fixed_s", "attention_flops"]
    known = fitted(known, names, [(update(case), case["update_s"]) for case in alone])
    known = replace(known, expert_flops=known.update_flops)
    spent = [case["step_s"] - case["rollout_s"] - case["update_s"] for case in alone]
    known = fitted(known, ["other_s", "other_episode_s"], [(other(c), s) for c, s in zip(alone, spent, strict=True)])
    halves = [update(case)(replace(known, rank_fixed_s=0.0)) for case in shared]
    times, fixed = np.polyfit(halves, [case["update_s"] for case in shared], 1)
    return replace(known, rank_times=float(times), rank_fixed_s=float(fixed))


SOURCES = {
    "decode_fixed_s": "none needed",
    "decode_layer_s": "fitted: h200.json, ms of a decode step by rows, contexts of 880 tokens",
    "decode_flops": "fitted: the same",
    "weight_reads": "bench/LOG.md: weights of a decode step are read at 4.3 of 4.8 TB/s",
    "kv_reads": "bench/LOG.md: attention of a decode step takes 13 µs where 7 would be reading",
    "prefill_fixed_s": "fitted: h200.json, first_token_s of W1 with 16 and 64 prompts (main, clean)",
    "prefill_flops": "fitted: the same",
    "update_flops": "fitted: h200.json, update_s of W1 without recomputation at 4,700 and 14,100 tokens and with full",
    "expert_flops": "fitted: h200.json, update_s of a step of Qwen3-VL-30B-A3B's shape with adapters and recomputation",
    "microbatch_s": "fitted: as update_flops",
    "update_fixed_s": "fitted: as update_flops",
    "attention_flops": "bench/LOG.md: flash attention of an update at 243 of 989 TFLOP/s",
    "other_s": "none needed",
    "other_episode_s": "h200.json, the code of the afternoon: record_s and credit_s of W1 over its episodes",
    "push_fixed_s": "not measured on a GPU: 0",
    "push_bytes": "safetensors to and from shared memory at 1.93 and 2.9 GB/s (one Arm core), two copies over PCIe at 25: "
    "not measured on a GPU machine; loading straight to an H200 was 1.67 GB/s, saving 0.97 (bench/LOG.md)",
    "rank_fixed_s": "not measured on a GPU: 0",
    "rank_times": "not measured on a GPU: 1. On CUDA a sharded policy runs stock layers, slower than the fused ones",
    "rollout_fixed_s": "h200.json: rollout_s of the W1 steps that updates were fitted to, over the engine's part of it",
}
ASSUMED = {
    "network": {"value": 5e10, "from": "400 Gbit/s for each GPU, as in NVIDIA's reference machines; --network changes it"},
    "link_share": {"value": 0.7, "from": "share of a published link rate that collectives reach: a rule of thumb"},
    "vllm_times": {"value": 1.94, "from": "h200.json, tree M: rollout_s of W1 with vLLM 0.25.1 and with the native engine"},
    "ipc_bytes": {"value": 2.81e10, "from": "h200.json, tree M: push_s of W1, 7.51 GB"},
    "vllm_check_s": {"value": 0.457, "from": "h200.json, tree M: parity_s of W1"},
    "collective_s": {"value": 1e-5, "from": "latency of one all-reduce of a tensor-parallel decode step: a rule of thumb"},
}


def constants_json(by: Constants, sources: dict[str, str]) -> dict[str, Any]:
    """Constants with where they come from."""
    return {name: {"value": float(f"{value:.4g}"), "from": sources[name]} for name, value in asdict(by).items()}


def main() -> None:
    """Print the calibration."""
    on_cpu = dict.fromkeys(asdict(FREE), "fitted: cpu.json, cases marked 'calibrate'")
    found = {
        "what": "constants of the forecast's cost model, made by bench/calibrate.py",
        "gpu": constants_json(gpu_constants(), SOURCES),
        "cpu": constants_json(cpu_constants(), on_cpu),
        "buckets": {"value": list(GPU_BUCKETS), "from": "engines/native/graphs.py"},
        "assumed": ASSUMED,
    }
    print(json.dumps(found, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()

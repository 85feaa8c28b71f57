"""Benchmarks on the reference workloads; each prints one JSON object.

python -m bench step --workload W1|W2|W3|OMNI|Q35|A3B [--steps 3] [--lora 0] [--tokens-per-microbatch 16384]
                     [--sharing on|off|none] [--recompute none|selective|full|auto] [--moments bfloat16]
                     [--precision fast|matched] [--replay] [--fp8] [--peers]
python -m bench step --workload CPU [--steps 3] [--tiny]
python -m bench experts [--lora 32] [--tokens-per-microbatch 14100] [--profile]
python -m bench engines --workload W1|W2|W3 [--steps 3] [--only native|vllm] [--push auto|ipc|file] [--limit-s 900] [--tiny]
python -m bench all [--limit-s 540] [--cases W1,Q35] [--out all.json]
python -m bench curves
python -m bench rollout --workload W1|W3|Q35 [--prompts 64] [--rounds 2] [--max-rows 512] [--fp8] [--profile]
python -m bench kernels --workload W1|W2|W3 [--steps 3] [--limit-s 500] [--known FILE] [--out kernels.json]
python -m bench turns [--steps 2] [--only native|vllm] [--tiny]
python -m bench schedules [--workload text|W1] [--steps 4] [--tiny] [--slow [--slower 1]
                          [--environments local|workers|service]]
python -m bench export [--prompts 1] [--lora 0] [--scratch FOLDER] [--tiny]

``--sharing off`` also times the update with every episode as a group of its own, in the same process: each pays its prompt,
and the tower still sees each picture once. ``--sharing none`` is a step of as many episodes that share nothing: each has a
prompt and pictures of its own, as for trainers that pack rows one by one.

``--fp8`` samples with FP8 weights (``rollout.quantization``): ``rollout`` prints the rate beside that without, ``step`` the
mismatch.

``--peers`` also times TRL's step, and TRL's with vLLM, each at the best of its micro-batches, where they are installed.
``engines`` times steps sampled by the native engine and by vLLM in one run: step, tokens a second, push of weights, and
``prob_error``, for vLLM also over its probes by modality (there e to the mean gap). ``--limit-s`` bounds each engine's
time, ``--push`` is how vLLM gets its weights, and ``--tiny`` runs it with a tiny model on a CPU.
``step --workload CPU`` is SmolLM2-135M on two cores beside TRL (``bench/cpu_step.py``). It is fetched once.

The others need a CUDA GPU. Weights are random: speed does not depend on their values.
SENSORIUM_BENCH_MODELS=FOLDER keeps the models that are made, so that several commands make them once.
``schedules`` times the three schedules in one run (``bench/compared_schedules.py``): of a GSM8K
run's work (``text``) or W1; ``--slow``: with environments that take 0.2 to 1 s a turn; ``--tiny``: on a CPU.
``turns`` is W4: eight turns with a picture each, beside W1 (``bench/many_turns.py``).
``all`` runs what is held to a baseline, case by case (``bench/all_workloads.py``).
``experts`` compares forms of a mixture's experts and replayed routes in one process (``bench/experts.py``).
``kernels`` times steps with every kernel switched off in turn (``bench/kernel_times.py``).
``export`` measures memory and needs 60 GiB of disk (without a LoRA rank 110 to save the optimizer too); ``--tiny`` runs it
on a tiny model and any machine.
"""

import argparse
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workload import Workload

sys.path.insert(0, str(Path(__file__).parent))
RECOMPUTE: dict[str, bool | str] = {"none": False, "selective": "selective", "full": True, "auto": "auto"}


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "what",
        choices=["all", "step", "engines", "rollout", "curves", "kernels", "export", "experts", "schedules", "turns"],
    )
    parser.add_argument("--workload", default="W1", choices=["CPU", "W1", "W2", "W3", "OMNI", "Q35", "A3B", "text"])
    parser.add_argument("--slow", action="store_true", help="schedules: with environments that take 0.2 to 1 s a turn")
    parser.add_argument("--slower", type=float, default=1.0, help="schedules --slow: multiplies the environments' time")
    parser.add_argument("--environments", default="local", choices=["local", "workers", "service"], help="where they are")
    parser.add_argument("--prompts", type=int, help="prompts a step, instead of the workload's")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens-per-microbatch", type=int, default=16384)
    parser.add_argument("--recompute", default="full", choices=RECOMPUTE, help="model.gradient_checkpointing")
    parser.add_argument("--precision", default="fast", choices=["fast", "matched"], help="model.precision")
    parser.add_argument("--moments", default="bfloat16", choices=["float32", "bfloat16", "8-bit"], help="optimizer.moments")
    parser.add_argument("--sharing", default="on", choices=["on", "off", "none"], help="of prompts and pictures")
    parser.add_argument("--peers", action="store_true", help="time TRL and vLLM too, on the same work")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-rows", type=int, default=512)
    parser.add_argument(
        "--profile", action="store_true", help="list kernels (of a step: of its update) and functions by their time"
    )
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0 trains all weights")
    parser.add_argument("--replay", action="store_true", help="a step with algorithm.router_replay (A3B)")
    parser.add_argument("--fp8", action="store_true", help="rollout, step: sample with FP8 weights")
    parser.add_argument("--only", choices=["native", "vllm"], help="of the engines")
    parser.add_argument("--push", default="auto", choices=["auto", "ipc", "file"], help="how vLLM gets its weights")
    parser.add_argument("--limit-s", type=float, default=900.0, help="for each engine, its start included; of kernels")
    parser.add_argument("--cases", help="all: some of them, by name, with commas between")
    parser.add_argument("--known", type=Path, help="kernels: an earlier result; what it settles is left out")
    parser.add_argument("--out", type=Path, help="kernels, all: where the result goes (kernels.json, all.json)")
    parser.add_argument("--scratch", type=Path, help="where the export writes; default: a temporary folder")
    parser.add_argument("--tiny", action="store_true", help="export, engines, schedules, turns and CPU: on a tiny model")
    given = parser.parse_args()
    import torch

    if given.what == "export" and given.tiny:
        _export(given)
        return
    if given.what == "engines" and given.tiny:
        from engines import TINY

        print(json.dumps(_engines(given, TINY), indent=1))
        return
    if given.what == "turns" and (given.tiny or torch.cuda.is_available()):
        from many_turns import compare as compare_turns

        logging.disable(logging.WARNING)
        engines = (given.only,) if given.only else ("native",)
        print(json.dumps(compare_turns(given.steps, tiny=given.tiny, engines=engines), indent=1))
        return
    if given.what == "schedules" and (given.tiny or torch.cuda.is_available()):
        from compared_schedules import compare

        logging.disable(logging.WARNING)
        work = "text" if given.tiny or given.slow else given.workload
        rows = compare(
            "cpu" if given.tiny else "cuda", work, environments="slow" if given.slow else "fast", steps=given.steps,
            slower=given.slower, where=given.environments,
        )  # fmt: skip
        print(json.dumps(rows, indent=1))
        return
    if given.workload == "CPU":
        if given.what != "step":
            sys.exit("CPU is a whole step: python -m bench step --workload CPU")
        from cpu_step import time_cpu

        print(json.dumps(time_cpu(given.steps, given.tiny), indent=1))
        return
    if not torch.cuda.is_available():
        sys.exit("these workloads need a CUDA GPU, and torch sees none; on a CPU run: python -m bench step --workload CPU")
    if given.what == "all":
        from all_workloads import CASES, time_all

        cases = given.cases.split(",") if given.cases else list(CASES)
        if strange := [case for case in cases if case not in CASES]:
            sys.exit(f"there is no case {strange[0]!r}; the cases are: {', '.join(CASES)}")
        print(json.dumps(time_all(cases, given.limit_s, given.out or Path("all.json")), indent=1))
        return
    logging.disable(logging.WARNING)
    if given.what == "export":
        _export(given)
        return
    from peer_step import peer_steps
    from workload import WORKLOADS

    if given.what == "curves":
        from curves import measure

        print(json.dumps(measure(), indent=1))
        return
    work = WORKLOADS[given.workload]
    if given.prompts:
        work = replace(work, prompts=given.prompts)
    if given.what == "step":
        from step import time_steps

        peers = peer_steps(work) if given.peers else {}
        result = time_steps(
            given.workload,
            work,
            given.steps,
            given.tokens_per_microbatch,
            RECOMPUTE[given.recompute],
            given.moments,
            given.profile,
            given.precision,
            given.sharing,
            given.lora,
            given.replay,
            given.fp8,
        )
        result |= {"peers": peers} if given.peers else {}
    elif given.what == "experts":
        from experts import time_experts

        result = time_experts(WORKLOADS["A3B"], min(given.tokens_per_microbatch, 14100), given.lora or 32, given.profile)
    elif given.what == "kernels":
        from kernel_times import time_kernels

        result = time_kernels(
            given.workload,
            work,
            given.steps,
            given.tokens_per_microbatch,
            given.limit_s,
            given.known,
            given.out or Path("kernels.json"),
        )
    elif given.what == "engines":
        result = _engines(given, work)
    else:
        from rollout import time_rollouts

        result = time_rollouts(
            given.workload, work, given.rounds, given.max_rows, given.profile, given.precision, given.fp8
        )
    print(json.dumps(result, indent=1))


def _engines(given: argparse.Namespace, work: "Workload") -> dict[str, Any]:
    from engines import ENGINES, time_engines

    engines = (given.only,) if given.only else ENGINES
    return time_engines(given.workload, work, given.steps, given.tiny, engines, given.push, given.limit_s)


def _export(given: argparse.Namespace) -> None:
    from published_export import measure_export

    result = measure_export(tiny=given.tiny, scratch=given.scratch, prompts=given.prompts or 1, lora=given.lora)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

"""What was measured, as the forecast's inputs: workloads of bench/baselines as StepWork, with the costs of their models."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sensorium.forecast.costs import (
    Constants,
    Costs,
    Kind,
    Machine,
    ModelCosts,
    Recomputation,
    StepWork,
    costs_of,
    kinds,
    published_configs,
)
from sensorium.recipe.model_shape import shape_by_config, tiny_config

FOLDER = Path(__file__).parent / "baselines"
_MEASURED: dict[str, Any] = json.loads((FOLDER / "h200.json").read_text())
H200 = _MEASURED | _MEASURED["today"]
CPU_CASES: list[dict[str, Any]] = json.loads((FOLDER / "cpu.json").read_text())["cases"]
CPU = Kind("cpu", "an Arm core", flops=1.0, bandwidth=1.0, memory=0, link=1e30, gpus_per_machine=2)
"""A CPU's peaks are 1, so that its constants are rates."""
GPU_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
RECOMPUTE: dict[str, Recomputation] = {"none": False, "selective": "selective", "full": True}

# Prompts as the packing of the measured steps counted them: pictures of 448 × 448 are 256 tokens of 1,024 patches.
W1 = StepWork(prompts=16, group=8, prompt=276, response=256, patches=1024, tokens_per_microbatch=14100)
W2 = StepWork(prompts=8, group=8, prompt=4146, response=256, patches=16384, tokens_per_microbatch=16384)
W3 = StepWork(prompts=64, group=8, prompt=276, response=256, tail=6.0, patches=1024)
# 8 frames are 4,096 patches; of a sound's 30 s, 1,500 frames go through a tower of the same size.
OMNI = StepWork(prompts=8, group=8, prompt=1800, response=256, patches=5600, tokens_per_microbatch=8192)

# A picture of 448 × 448 is 196 tokens of 784 patches; a frozen tower's features were cached after the first step.
A3B = StepWork(prompts=8, group=8, prompt=208, response=256, tokens_per_microbatch=14100)
A3B_STEP = "step --workload A3B --steps 2 --lora 32 --recompute full --tokens-per-microbatch 14100"


@dataclass(frozen=True)
class Part:
    """A part of a measured step: which, of what work on what model, and its seconds."""

    name: str
    what: str
    work: StepWork
    seconds: float
    recompute: Recomputation = False
    model: str = "Qwen2.5-VL-3B"
    ranks: int = 1


def gpu_model(name: str = "Qwen2.5-VL-3B", recompute: Recomputation = False, lora: bool = False) -> ModelCosts:
    """The costs of a published model in bfloat16; all of it is trained, or adapters."""
    return costs_of(shape_by_config(published_configs()[name]), recompute=recompute, lora=lora)


def cpu_model() -> ModelCosts:
    """The costs of the tiny model of the workload TINY in float32."""
    config = tiny_config("qwen2_5_vl", 2)
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    config["text_config"] |= small
    config["vision_config"] |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64}
    return costs_of(shape_by_config(config), number_bytes=4)


def gpu_costs(constants: Constants, name: str = "Qwen2.5-VL-3B", recompute: Recomputation = False) -> Costs:
    """A published model on an H200."""
    return Costs(gpu_model(name, recompute), Machine(kinds()["h200"], constants, 1e30, GPU_BUCKETS))


def cpu_costs(constants: Constants) -> Costs:
    """The same model on one core."""
    return Costs(cpu_model(), Machine(CPU, constants, 1e30, ()))


def cpu_work(case: dict[str, Any]) -> StepWork:
    """The work of a case of cpu.json."""
    prompt = round((case["packing/tokens"] - case["packing/trained_tokens"]) / case["prompts"])
    return StepWork(case["prompts"], case["group"], prompt, case["new_tokens"], patches=(case["pixels"] // 14) ** 2)


def curve_work(point: dict[str, Any]) -> StepWork:
    """The work of a point of the curves, which were measured with selective recomputation."""
    written = point["prompts"] * point["group"] * point["new_tokens"]
    prompt = round((point["tokens"] - written) / point["prompts"])
    patches = point["pictures"] * (point["pixels"] // 14) ** 2
    return StepWork(
        point["prompts"], point["group"], prompt, point["new_tokens"], patches=patches, tokens_per_microbatch=14100
    )


def curves() -> list[dict[str, Any]]:
    """The measured points of docs/internals/growth.svg."""
    found: list[dict[str, Any]] = H200["matched precision, and curves"]["curves"]
    return found

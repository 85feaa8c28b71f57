"""Workload W1 (Qwen2.5-VL-3B shape, one GPU, bf16): our step and where its time goes. Prints JSON.

    python bench/w1.py [--steps 3]

The weights are random: speed does not depend on their values.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from workload import W1, recipe_for

from sensorium.models.tiny import make_tiny
from sensorium.record.run_directory import RunDirectory
from sensorium.report.metrics import read_metrics
from sensorium.trainer.run import open_trainer

QWEN2_5_VL_3B = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 2, "initializer_range": 0.02,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    "vision_depth": 32, "vision_hidden_size": 1280, "vision_intermediate_size": 3420, "vision_num_heads": 16,
    "vision_fullatt_block_indexes": [7, 15, 23, 31], "vision_initializer_range": 0.02,
}  # fmt: skip


def write_model(folder: Path) -> Path:
    """The 3B shape with random bf16 weights."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        path = make_tiny("qwen2_5_vl", folder, **QWEN2_5_VL_3B)
    torch.set_default_dtype(torch.float32)
    return path


def main() -> None:
    """Time whole steps, the first left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens-per-microbatch", type=int, default=16384)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(Path(scratch) / "model")
        directory = RunDirectory(Path(scratch) / "run").create()
        recipe = recipe_for(
            W1,
            model,
            directory.path,
            model={"dtype": "bfloat16", "device": "cuda", "gradient_checkpointing": True},
            batch={"tokens_per_microbatch": arguments.tokens_per_microbatch},
        )
        trainer = open_trainer(recipe, directory)
        loop = asyncio.new_event_loop()
        seconds = []
        for _ in range(1 + arguments.steps):
            started = time.perf_counter()
            loop.run_until_complete(trainer.advance())
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        rows = read_metrics(directory.metrics)[1:]
        middle = {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0] if name != "step"}
        step = statistics.median(seconds[1:])
        print(
            json.dumps(
                {"workload": "W1", "step_s": round(step, 2), "episodes_per_s": round(W1.episodes / step, 2)} | middle
            )
        )


if __name__ == "__main__":
    main()

"""Three small steps of every shipped recipe compute what they computed when the baseline was recorded.

Refactoring must not change what a run computes. On the machine kind that recorded a baseline (tests/baselines/RECIPE.json),
tokens, log-probs, scores, metrics and weights must be equal bit for bit. On another one the last bits of a sum differ, so
there the first step is compared within a tolerance. After a change that is meant to compute something else, renew the files
and say why in the commit:

    python -m tests.test_baseline
"""

import hashlib
import json
import platform
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from sensorium.recipe.load import load_recipe
from sensorium.systems.audio_visual.generated import make_daily_omni, make_intent
from sensorium.trainer.run import train
from sensorium.vocabulary.errors import NothingTrained

FILES = Path(__file__).parent / "baselines"
STEPS = 3
SMALL = [
    "threads=1",
    "evaluation.every=0",
    "evaluation.limit=2",
    "evaluation.at_start=false",
    "checkpoint.every=0",
    "health.sight_tasks=0",
]
SUPERVISED = ["warm_start.prompts_per_step=6"]
LEARNING = ["batch.prompts_per_step=6", "batch.group_size=4"]
OMNI = ["model.path=tiny:qwen2_5_omni", "model.dtype=float32", "model.device=cpu", "batch.prompts_per_step=4"]
OMNI += ["batch.group_size=2", "batch.updates_per_epoch=2", "rollout.max_new_tokens=8", "rollout.max_context_tokens=4096"]
OMNI += ["epochs=0", "optimizer.schedule=cosine", "optimizer.final_lr_share=0.1", "optimizer.weight_decay=0"]
OMNI += ["algorithm.loss.dual_clip=10", "tasks.evaluate.0.source=daily_omni"]  # as when the baselines were taken
RECIPES = {
    "shapes": LEARNING,
    "frozen_lake": LEARNING,
    "sight_and_sound": LEARNING,
    "audio_visual": OMNI,
    "shapes_warm": SUPERVISED,
    "shapes_guess": [*SUPERVISED, "model.path=package:shapes"],
    "frozen_lake_warm": SUPERVISED,
    "sight_and_sound_warm": SUPERVISED,
    "sight_and_sound_guess": [*SUPERVISED, "model.path=package:sight_and_sound"],
}
MEASURED_ANEW = ("time/", "wait/", "throughput/", "memory/", "media/", "health/", "latency/")
"""Metrics that depend on the machine, or that may be counted in another way without another result."""


def machine() -> str:
    """What must be equal for two machines to round alike: sums are chosen by the processor's model."""
    told = re.findall(r"^(?:vendor_id|cpu family|model|CPU implementer|CPU part)\s*: (.*)$", _processor(), re.MULTILINE)
    kind = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} torch {torch.__version__}"
    return " ".join([kind, *told])


def _processor() -> str:
    """What the system says of the first processor."""
    file = Path("/proc/cpuinfo")
    return file.read_text().split("\n\n")[0] if file.exists() else ""


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def played(line: str) -> dict[str, Any]:
    """What an episode's record must keep: who was asked what, what was sampled with which log-probs, what was paid."""
    row = json.loads(line)
    episode = row["episode"]
    scores = [{key: score.get(key) for key in ("name", "value", "weight", "correct")} for score in episode["scores"]]
    segments = [[s["author"], s["tokens"], s.get("logprobs"), s.get("sampled_logprobs")] for s in episode["segments"]]
    return {
        "id": episode["id"],
        "status": episode["status"],
        "reward": row["reward"],
        "scores": scores,
        "segments": segments,
    }


def compute(recipe: str, folder: Path, steps: int = STEPS) -> dict[str, Any]:
    """Run a recipe's first steps; digests of all it computed, and its metrics."""
    settings = [f"run_dir={folder / 'run'}", *SMALL, *RECIPES[recipe]]
    settings += [f"warm_start.steps={steps}", "steps=0"] if recipe.endswith(("_warm", "_guess")) else [f"steps={steps}"]
    if recipe == "audio_visual":
        make_intent(folder / "intent")
        make_daily_omni(folder / "daily_omni", count=4)
        settings += [
            f"tasks.train.0.options.path={folder / 'intent'}",
            f"tasks.evaluate.0.options.path={folder / 'daily_omni'}",
        ]
    threads = torch.get_num_threads()
    try:
        with suppress(NothingTrained):  # a model of random weights may never be paid
            train(load_recipe(recipe, settings))
    finally:
        torch.set_num_threads(threads)
    run = folder / "run"
    episodes = {file.name: digest([played(line) for line in file.open()]) for file in sorted(run.glob("episodes/*.jsonl"))}
    weights = {
        f"{file.parent.name}/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        for file in sorted(run.glob("checkpoints/*/*.safetensors"))
    }
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    metrics = [{key: value for key, value in row.items() if not key.startswith(MEASURED_ANEW)} for row in rows]
    return {"machine": machine(), "episodes": episodes, "weights": weights, "metrics": metrics}


@pytest.mark.parametrize("recipe", RECIPES)
def test_three_steps_of_a_recipe_compute_what_they_did(recipe: str, tmp_path: Path) -> None:
    """On another kind of machine than the recorded one sums differ in their last bits, and soon in more: one step there."""
    recorded = json.loads((FILES / f"{recipe}.json").read_text())
    same = recorded["machine"] == machine()
    found = compute(recipe, tmp_path, STEPS if same else 1)
    first, now = recorded["metrics"][0], found["metrics"][0]
    if same:
        for was, row in zip(recorded["metrics"], found["metrics"], strict=True):
            assert {key: row.get(key) for key in was} == was  # a new metric is no change of an old one
        assert found["episodes"] == recorded["episodes"]
        assert found["weights"] == recorded["weights"]
    else:
        near = [key for key in first if key.startswith(("reward/", "episodes/", "policy/entropy", "policy/loss"))]
        assert {key: now[key] for key in near} == pytest.approx({key: first[key] for key in near}, rel=1e-3, abs=1e-4)


def renew() -> None:
    """Record what the recipes compute now."""
    for recipe in RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            found = compute(recipe, Path(folder))
        (FILES / f"{recipe}.json").write_text(json.dumps(found, indent=1) + "\n")
        print(recipe, found["weights"])


if __name__ == "__main__":
    renew()

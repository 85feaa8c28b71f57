"""A learner that shares nothing with the trainer gives the same run, bit for bit: the protocol is all there is between."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sensorium.assembly.local_learner import LearnerMaker, local_learner
from sensorium.cluster.event_loop import run_async
from sensorium.learner.saved_state import load_state
from sensorium.recipe.schema import Recipe
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.run import open_trainer
from sensorium.trainer.run_claim import begin

from .small import small
from .threaded import ThreadedLearner

PICTURES = {
    "model": {"path": "tiny:qwen2_5_vl", "device": "cpu", "freeze": ["vision"]},
    "tasks": {"train": [{"source": "shapes", "options": {"size": 8, "picture_size": 56}}]},
}
RUNS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "pictures_and_kl": (PICTURES, ["algorithm.kl.coef=0.1"]),
    "critic_after_a_warm_start": (
        {"algorithm": {"advantage": {"name": "gae"}, "critic": {"trunk": "own"}, "kl": {"coef": 0.1}}},
        ["warm_start.steps=1", "warm_start.prompts_per_step=2", "steps=2"],
    ),
    "lora_after_a_warm_start": (
        {"algorithm": {"kl": {"coef": 0.1, "place": "reward"}}},
        ["model.lora.rank=2", "warm_start.steps=1", "warm_start.prompts_per_step=2", "steps=2"],
    ),
    "shared_critic": ({"algorithm": {"advantage": {"name": "gae"}, "critic": {"trunk": "shared"}}}, ["steps=2"]),
}


def trained(recipe: Recipe, make_learner: LearnerMaker, *, resume: bool = False) -> None:
    directory = RunDirectory(recipe.directory)
    if not resume:
        begin(recipe, directory)
    trainer = open_trainer(recipe, directory, resume=resume, make_learner=make_learner)
    try:
        run_async(trainer.run())
    finally:
        trainer.close()


def written(run: Path) -> dict[str, Any]:
    """What a run computed: rows, episodes, weights, and all that a checkpoint holds to go on."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    counted = ("time/", "wait/", "throughput/", "memory/", "media/", "latency/")
    found: dict[str, Any] = {
        "rows": [{key: value for key, value in row.items() if not key.startswith((*counted, "time"))} for row in rows]
    }
    for path in sorted((run / "episodes").glob("*.jsonl")):
        found[path.name] = path.read_bytes()
    for path in sorted((run / "checkpoints").glob("step_*")):
        found[path.name] = [load_file(file) for file in sorted(path.rglob("*.safetensors"))]
        found[f"state of {path.name}"] = [load_state(file) for file in sorted(path.rglob("*.pt"))]
    return found


def assert_equal(one: Any, other: Any, place: str = "run") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            assert_equal(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), place
        for i, (first, second) in enumerate(zip(one, other, strict=True)):
            assert_equal(first, second, f"{place}.{i}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), place
    else:
        assert one == other, place


@pytest.mark.parametrize("name", RUNS)
def test_a_learner_in_a_thread_gives_the_same_run_also_when_it_is_resumed(name: str, tmp_path: Path) -> None:
    changes, overrides = RUNS[name]
    direct = small(tmp_path / "direct", *overrides, **changes)
    trained(direct, local_learner)
    apart = small(tmp_path / "apart", *overrides, **changes)
    trained(apart.model_copy(update={"steps": apart.steps - 1}), ThreadedLearner)
    trained(apart, ThreadedLearner, resume=True)
    assert_equal(written(tmp_path / "direct"), written(tmp_path / "apart"))

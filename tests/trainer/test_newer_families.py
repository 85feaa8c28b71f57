"""Runs of the newer families: a resumed run repeats itself bit for bit, and its export has the layout of its source."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sensorium.cli.export import export
from sensorium.models.weight_files import weight_files
from sensorium.recipe.load import load_recipe, parse_recipe
from sensorium.runs.metrics import read_metrics, repeatable
from sensorium.trainer.run import train
from tests.families import make_published
from tests.recipes import quick

NEWER = ["InternVL3-8B-hf", "LLaVA-OneVision-7B", "SmolVLM2-2.2B", "Qwen3-Omni-30B-A3B"]


def named(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in weight_files(folder) for name, tensor in load_file(file.path).items()}


@pytest.mark.parametrize("name", NEWER)
def test_a_resumed_run_repeats_itself_and_is_exported_as_published(name: str, tmp_path: Path) -> None:
    source, whole, broken = make_published(name, tmp_path), tmp_path / "whole", tmp_path / "broken"
    recipe = quick(
        name,
        run_dir=str(whole),
        model={"path": str(source), "device": "cpu"},
        batch={"prompts_per_step": 1, "group_size": 2},
        rollout={"max_new_tokens": 2},
        rewards={"terms": [{"name": "tests.trainer.small:ByParity"}]},
        optimizer={"lr": 1e-2},
        checkpoint={"every": 1, "keep": 2},
    )
    train(parse_recipe(json.dumps(recipe), "newer"))
    shutil.copytree(whole, broken)
    shutil.rmtree(broken / "checkpoints" / "step_000002")  # killed before its second checkpoint
    train(load_recipe(broken), resume=True)
    rows = [[repeatable(row) for row in read_metrics(run / "metrics.jsonl")] for run in (whole, broken)]
    assert rows[0] == rows[1]
    one, two = (run / "checkpoints" / "step_000002" for run in (whole, broken))
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    assert (one / "trainer" / "learner.pt").read_bytes() == (two / "trainer" / "learner.pt").read_bytes()
    said = export(two, tmp_path / "out")
    assert not said[1].startswith("0 weights were changed")
    before, after = named(source), named(tmp_path / "out")
    assert {key: (t.shape, t.dtype) for key, t in after.items()} == {key: (t.shape, t.dtype) for key, t in before.items()}
    speaking = [key for key in before if key.startswith(("talker.", "code2wav."))]
    assert all(torch.equal(after[key], before[key]) for key in speaking)
    assert not all(torch.equal(after[key], before[key]) for key in before)

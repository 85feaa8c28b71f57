"""Runs on the general path: a resumed run repeats itself bit for bit, and what it saves loads equal."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sensorium.cli.export import export
from sensorium.data.media_store import MediaStore
from sensorium.models.load import load_policy
from sensorium.recipe.load import load_recipe, parse_recipe
from sensorium.recipe.schema import Recipe
from sensorium.runs.metrics import read_metrics, repeatable
from sensorium.trainer.run import train
from tests.general_checkpoints import make_checkpoint
from tests.recipes import quick


def recipe_of(source: Path, run: Path, **changes: Any) -> Recipe:
    """Two steps on generated pictures; of text for a model that sees none."""
    if "vision_config" not in json.loads((source / "config.json").read_text()):
        rows = source.parent / "rows.jsonl"
        rows.write_text(
            "".join(
                json.dumps({"messages": [{"role": "user", "content": f"{n}?"}], "answer": str(n)}) + "\n" for n in range(8)
            )
        )
        changes["tasks"] = {"train": [{"source": "jsonl", "options": {"path": str(rows)}}]}
    sections: dict[str, Any] = {
        "run_dir": str(run),
        "model": {"path": str(source), "device": "cpu"},
        "batch": {"prompts_per_step": 2, "group_size": 2},
        "rollout": {"max_new_tokens": 4},
        "rewards": {"terms": [{"name": "tests.trainer.small:ByParity"}]},
        "optimizer": {"lr": 1e-2},
        "checkpoint": {"every": 1, "keep": 2},
    }
    model = sections["model"] | changes.pop("model", {})
    return parse_recipe(json.dumps(quick("general", **sections | {"model": model} | changes)), "general")


@pytest.mark.parametrize(
    ("name", "model"),
    [("gemma3", {}), ("glm4v", {"family": "general", "lora": {"rank": 2}}), ("qwen3_next", {}), ("mistral3", {})],
)
def test_a_resumed_run_repeats_itself_and_what_it_saves_loads_equal(
    name: str, model: dict[str, Any], tmp_path: Path
) -> None:
    source, whole, broken = make_checkpoint(name, tmp_path / "source"), tmp_path / "whole", tmp_path / "broken"
    train(recipe_of(source, whole, model=model))
    shutil.copytree(whole, broken)
    shutil.rmtree(broken / "checkpoints" / "step_000002")
    train(load_recipe(broken), resume=True)
    rows = [[repeatable(row) for row in read_metrics(run / "metrics.jsonl")] for run in (whole, broken)]
    assert rows[0] == rows[1]
    assert rows[0][0]["mismatch/max"] < 1e-3
    assert rows[0][0]["policy/grad_norm"] > 0
    one, two = (run / "checkpoints" / "step_000002" for run in (whole, broken))
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    assert (one / "trainer" / "learner.pt").read_bytes() == (two / "trainer" / "learner.pt").read_bytes()
    trained, before = (load_policy(str(folder), store=MediaStore()).model.state_dict() for folder in (one, source))
    assert trained.keys() == before.keys()
    assert not all(torch.equal(trained[key], before[key]) for key in before)
    export(one, tmp_path / "out")
    out = load_policy(str(tmp_path / "out"), store=MediaStore()).model.state_dict()
    assert all(torch.equal(out[key], trained[key]) for key in trained)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == load_file(source / "model.safetensors").keys()

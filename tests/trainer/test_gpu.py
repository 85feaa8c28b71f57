"""The shapes recipe trains on a GPU, in bfloat16, from the same file."""

from math import isfinite
from pathlib import Path

import pytest

from sensorium.recipe.load import load_recipe
from sensorium.report.metrics import read_metrics
from sensorium.trainer.run import train


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_shapes_recipe_trains_on_a_gpu(dtype: str, tmp_path: Path) -> None:
    changes = ["steps=4", "batch.prompts_per_step=16", "evaluation.limit=64", "evaluation.every=4", "checkpoint.every=0"]
    recipe = load_recipe("shapes", [f"run_dir={tmp_path / 'run'}", "model.device=cuda", f"model.dtype={dtype}", *changes])
    train(recipe)
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert len(rows) == 4
    for row in rows:
        assert isfinite(row["policy/loss"])
        assert row["policy/grad_norm"] > 0
        assert row["episodes/failed"] == 0
        assert row["mismatch/prob_error"] < (1.0001 if dtype == "float32" else 1.05)
    assert rows[-1]["eval/accuracy"] > 0.2
    assert (tmp_path / "run/report.html").exists()

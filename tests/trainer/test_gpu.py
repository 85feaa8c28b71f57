"""The shapes recipe trains on a GPU, in bfloat16, from the same file; so it does with a critic and with adapters."""

from math import isfinite
from pathlib import Path

import pytest

from sensorium.recipe.load import load_recipe
from sensorium.runs.metrics import read_metrics
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


CRITIC = ["algorithm.advantage.name=masked_gae", "algorithm.critic.optimizer.lr=1e-4", "batch.epochs_per_step=2"]
VARIANTS = {
    "critic of its own": CRITIC,
    "critic on the policy's trunk": [*CRITIC, "algorithm.critic.trunk=shared", "algorithm.critic.trunk_coef=0.1"],
    "adapters and KL": ["model.lora.rank=8", "model.lora.groups=[language, vision]", "algorithm.kl.coef=0.01"],
    "gspo, corrected": ["algorithm.loss.name=gspo", "algorithm.correction.weights=geometric", "batch.updates_per_epoch=2"],
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", VARIANTS)
def test_critics_adapters_and_sequence_losses_train_on_a_gpu(name: str, tmp_path: Path) -> None:
    changes = ["steps=3", "batch.prompts_per_step=8", "evaluation.at_start=false", "evaluation.every=0"]
    place = [f"run_dir={tmp_path / 'run'}", "model.device=cuda", "model.dtype=bfloat16"]
    train(load_recipe("shapes", [*place, *changes, *VARIANTS[name]]))
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert len(rows) == 3
    for row in rows:
        assert all(isfinite(value) for value in row.values())
        assert row["policy/grad_norm"] > 0
        assert row["mismatch/prob_error"] < 1.05
    if "critic" in name:
        assert rows[-1]["value/grad_norm"] > 0

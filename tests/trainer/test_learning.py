"""The shipped recipes learn, in a minute each; with the sign of the advantage flipped they unlearn."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sensorium.algorithms.grpo import advantages
from sensorium.recipe.load import load_recipe
from sensorium.report.metrics import read_metrics
from sensorium.trainer.run import train
from sensorium.trainer.study import SAMPLED_AND_GREEDY, measure

SMALL = ["evaluation.every=0", "evaluation.at_start=false", "evaluation.limit=128", "checkpoint.every=0"]


def flipped(rewards_G: Tensor, *, std: bool = True, leave_one_out: bool = False) -> Tensor:
    """GRPO with the wrong sign."""
    return -advantages(rewards_G, std=std, leave_one_out=leave_one_out)


def rewards(name: str, folder: Path, *overrides: str) -> list[float]:
    recipe = load_recipe(name, [f"run_dir={folder}", *SMALL, *overrides])
    train(recipe)
    return [row["reward/mean"] for row in read_metrics(folder / "metrics.jsonl")]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.learning
def test_shapes_are_learned(tmp_path: Path) -> None:
    overrides = ["steps=30", "batch.prompts_per_step=48", "optimizer.lr=4e-4"]
    paid = rewards("shapes", tmp_path / "run", *overrides)
    assert mean(paid[-5:]) > mean(paid[:5]) + 0.10
    recipe = load_recipe("shapes", SMALL)
    before = measure(recipe, recipe.model.path, SAMPLED_AND_GREEDY)
    after = measure(recipe, str(tmp_path / "run/checkpoints/step_000030"), SAMPLED_AND_GREEDY)
    assert before[0]["accuracy"] <= 0.60
    for was, now in zip(before, after, strict=True):
        assert now["accuracy"] > was["accuracy"] + 0.08, now["name"]


@pytest.mark.learning
def test_shapes_are_unlearned_with_the_sign_flipped(tmp_path: Path) -> None:
    name = "algorithm.advantage.name=tests.trainer.test_learning:flipped"
    paid = rewards("shapes", tmp_path / "run", name, "steps=16", "batch.prompts_per_step=32", "optimizer.lr=4e-4")
    assert mean(paid[-4:]) < mean(paid[:4]) - 0.10


@pytest.mark.learning
def test_walking_over_the_lake_is_learned(tmp_path: Path) -> None:
    paid = rewards("frozen_lake", tmp_path / "run", "steps=14", "batch.prompts_per_step=16", "optimizer.lr=2e-4")
    assert mean(paid[-4:]) > mean(paid[:2]) + 0.10


def test_flipping_is_flipping() -> None:
    rewards_G = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    assert torch.equal(flipped(rewards_G), -advantages(rewards_G))

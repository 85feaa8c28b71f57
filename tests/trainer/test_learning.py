"""Every kind of algorithm learns what it is paid for in a few steps on a few tasks; with the advantage flipped it unlearns.

These are the short forms of studies/run.py and studies/algorithms.py, which hold the learning claims on held-out tasks.
"""

from pathlib import Path

import pytest

from sensorium.recipe.load import load_recipe
from sensorium.record.metrics import read_metrics
from sensorium.trainer.run import train
from studies.algorithms import ALGORITHMS, QUIET, flip

FEW = ["batch.group_size=8", "optimizer.warmup_steps=1"]
LAKES = ["tasks.train.0.options.size=6", "batch.prompts_per_step=6", "rollout.max_turns=6"]
SHORT = {
    "shapes": ["steps=10", "optimizer.lr=6e-4", "tasks.train.0.options.size=8", "batch.prompts_per_step=8"],
    "frozen_lake": ["steps=8", "optimizer.lr=3e-4", *LAKES],
    "sight_and_sound": ["steps=10", "optimizer.lr=1e-3", "tasks.train.0.options.size=8", "batch.prompts_per_step=8"],
}


def rewards(recipe: str, folder: Path, *overrides: str) -> list[float]:
    train(load_recipe(recipe, [f"run_dir={folder}", *QUIET, *overrides, *FEW, *SHORT[recipe]]))
    return [row["reward/mean"] for row in read_metrics(folder / "metrics.jsonl")]


def rise(paid: list[float]) -> float:
    """From the first two steps to the last two."""
    return (sum(paid[-2:]) - sum(paid[:2])) / 2


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "ppo+masked_gae"])
def test_every_kind_of_algorithm_learns_what_it_is_paid_for(algorithm: str, tmp_path: Path) -> None:
    """PPO by its harder form, bi-level GAE; the study has masked GAE too."""
    recipe, estimator, overrides = ALGORITHMS[algorithm]
    assert rise(rewards(recipe, tmp_path / "run", f"algorithm.advantage.name={estimator}", *overrides)) > 0.08


@pytest.mark.parametrize("algorithm", [name for name, (recipe, _, _) in ALGORITHMS.items() if recipe == "shapes"])
def test_with_the_sign_flipped_it_unlearns(algorithm: str, tmp_path: Path) -> None:
    """The others start with too little to lose, and are flipped in studies/algorithms.py."""
    recipe, estimator, overrides = ALGORITHMS[algorithm]
    with flip(estimator) as flipped:
        assert rise(rewards(recipe, tmp_path / "run", f"algorithm.advantage.name={flipped}", *overrides)) < -0.1


def test_sight_and_sound_is_learned(tmp_path: Path) -> None:
    assert rise(rewards("sight_and_sound", tmp_path / "run")) > 0.1

"""What is paid for is learned in a few steps on a few tasks, and with the advantage flipped it is unlearned.

These are the short forms of studies/run.py and studies/algorithms.py, which hold the learning claims on held-out tasks.
"""

from pathlib import Path

import pytest

from sensorium.recipe.load import load_recipe
from sensorium.runs.metrics import read_metrics
from sensorium.trainer.run import train
from studies.algorithms import ALGORITHMS, QUIET, flip

FEW = ["batch.group_size=8", "optimizer.warmup_steps=1"]
SHORT = {
    "shapes": ["optimizer.lr=6e-4", "tasks.train.0.options.size=8", "batch.prompts_per_step=8"],
    "sight_and_sound": ["optimizer.lr=1e-3", "tasks.train.0.options.size=8", "batch.prompts_per_step=8"],
}
SHORT_ONES = ["grpo+clip", "grpo+gspo"]
"""The study has all; PPO in an environment takes longer to show anything, and its parts are in tests/learner."""


def rewards(recipe: str, folder: Path, *overrides: str, steps: int = 10) -> list[float]:
    train(load_recipe(recipe, [f"run_dir={folder}", *QUIET, *overrides, *FEW, *SHORT[recipe], f"steps={steps}"]))
    return [row["reward/mean"] for row in read_metrics(folder / "metrics.jsonl")]


def rise(paid: list[float]) -> float:
    """From the first two steps to the last two."""
    return (sum(paid[-2:]) - sum(paid[:2])) / 2


@pytest.mark.parametrize("algorithm", SHORT_ONES)
def test_an_algorithm_learns_what_it_is_paid_for(algorithm: str, tmp_path: Path) -> None:
    recipe, estimator, overrides = ALGORITHMS[algorithm]
    assert rise(rewards(recipe, tmp_path / "run", f"algorithm.advantage.name={estimator}", *overrides)) > 0.08


@pytest.mark.parametrize("algorithm", SHORT_ONES[:1])
def test_with_the_sign_flipped_it_unlearns(algorithm: str, tmp_path: Path) -> None:
    recipe, estimator, overrides = ALGORITHMS[algorithm]
    with flip(estimator) as flipped:
        assert rise(rewards(recipe, tmp_path / "run", f"algorithm.advantage.name={flipped}", *overrides, steps=7)) < -0.08


def test_sight_and_sound_is_learned(tmp_path: Path) -> None:
    assert rise(rewards("sight_and_sound", tmp_path / "run")) > 0.1

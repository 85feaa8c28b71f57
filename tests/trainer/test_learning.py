"""The shipped recipes learn by every kind of algorithm, in a minute each; with the advantage flipped they unlearn."""

from pathlib import Path

import pytest
import torch

from sensorium.algorithms import grpo, rloo
from sensorium.algorithms.episodes import Credit, Episodes
from sensorium.recipe.load import load_recipe
from sensorium.recipe.names import register, table
from sensorium.recipe.traits import ESTIMATORS
from sensorium.report.metrics import read_metrics
from sensorium.trainer.run import train
from sensorium.trainer.study import SAMPLED_AND_GREEDY, Variant, measure

SMALL = ["evaluation.every=0", "evaluation.at_start=false", "evaluation.limit=128", "checkpoint.every=0"]
SHAPES = ["batch.prompts_per_step=32", "optimizer.lr=4e-4", "optimizer.warmup_steps=1"]
LAKE = ["batch.prompts_per_step=32", "batch.group_size=4", "optimizer.lr=2e-4", "optimizer.warmup_steps=1"]
CRITIC = ["algorithm.critic.optimizer.lr=3e-4"]
DISCOUNT = ["algorithm.advantage.lam=0.95", "algorithm.advantage.gamma=0.98"]
TURNS = ["rewards.terms.0.options.per_turn=true", "algorithm.advantage.turn_gamma=0.95"]

ALGORITHMS = {
    "grpo+clip": ("shapes", "grpo", SHAPES),
    "rloo+clip": ("shapes", "rloo", SHAPES),
    "grpo+gspo": ("shapes", "grpo", [*SHAPES, "algorithm.loss.name=gspo", "batch.updates_per_epoch=2"]),
    "ppo+masked_gae": ("frozen_lake", "masked_gae", [*LAKE, *CRITIC, *DISCOUNT]),
    "ppo+bi_level_gae": ("frozen_lake", "bi_level_gae", [*LAKE, *CRITIC, *TURNS]),
}


def flipped(right: Credit) -> Credit:
    """The same credit with the wrong sign; a critic is still taught the truth."""
    return Credit(-right.advantages_P, right.targets_P)


def flipped_grpo(episodes: Episodes, *, std: bool, leave_one_out: bool) -> Credit:
    return flipped(grpo.estimate(episodes, std=std, leave_one_out=leave_one_out))


def flipped_rloo(episodes: Episodes) -> Credit:
    return flipped(rloo.estimate(episodes))


@pytest.fixture
def wrong_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimators with the wrong sign, by name, with the traits of the right ones."""
    monkeypatch.setitem(table("advantage"), "nothing", "")  # so that the table is put back
    for name in ("grpo", "rloo"):
        monkeypatch.setitem(ESTIMATORS, f"flipped_{name}", ESTIMATORS[name])
        register("advantage", f"flipped_{name}", f"tests.trainer.test_learning:flipped_{name}")


def rewards(name: str, folder: Path, *overrides: str) -> list[float]:
    recipe = load_recipe(name, [f"run_dir={folder}", *SMALL, *overrides])
    train(recipe)
    return [row["reward/mean"] for row in read_metrics(folder / "metrics.jsonl")]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.learning
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_kind_of_algorithm_learns_beyond_the_warm_start(algorithm: str, tmp_path: Path) -> None:
    recipe, estimator, overrides = ALGORITHMS[algorithm]
    steps = 24 if recipe == "shapes" else 14
    paid = rewards(recipe, tmp_path / "run", f"algorithm.advantage.name={estimator}", f"steps={steps}", *overrides)
    assert mean(paid[-5:]) > mean(paid[:2]) + 0.08


@pytest.mark.learning
@pytest.mark.parametrize("algorithm", [name for name, (task, _, _) in ALGORITHMS.items() if task == "shapes"])
def test_with_the_sign_flipped_it_unlearns(algorithm: str, tmp_path: Path, wrong_signs: None) -> None:
    """The slower ones are flipped in studies/algorithms.py."""
    recipe, estimator, overrides = ALGORITHMS[algorithm]
    paid = rewards(recipe, tmp_path / "run", f"algorithm.advantage.name=flipped_{estimator}", "steps=14", *overrides)
    assert mean(paid[-3:]) < mean(paid[:2]) - 0.08


@pytest.mark.learning
def test_shapes_are_learned_on_held_out_pictures_too(tmp_path: Path) -> None:
    rewards("shapes", tmp_path / "run", "steps=30", "batch.prompts_per_step=48", "optimizer.lr=4e-4")
    recipe = load_recipe("shapes", SMALL)
    before = measure(recipe, recipe.model.path, SAMPLED_AND_GREEDY)
    after = measure(recipe, str(tmp_path / "run/checkpoints/step_000030"), SAMPLED_AND_GREEDY)
    assert before[0]["accuracy"] <= 0.60
    for was, now in zip(before, after, strict=True):
        assert now["accuracy"] > was["accuracy"] + 0.08, now["name"]


@pytest.mark.learning
def test_walking_over_the_lake_is_learned(tmp_path: Path) -> None:
    paid = rewards("frozen_lake", tmp_path / "run", "steps=14", "batch.prompts_per_step=16", "optimizer.lr=2e-4")
    assert mean(paid[-4:]) > mean(paid[:2]) + 0.10


@pytest.mark.learning
def test_sight_and_sound_is_learned_from_both(tmp_path: Path) -> None:
    paid = rewards("sight_and_sound", tmp_path / "run", "steps=32", "batch.prompts_per_step=48")
    assert mean(paid[-4:]) > mean(paid[:4]) + 0.20
    recipe = load_recipe("sight_and_sound", SMALL)
    taken_away = [Variant("mute", 1.0, {"mute": True}), Variant("blank", 1.0, {"blank": True})]
    checkpoint = str(tmp_path / "run/checkpoints/step_000032")
    whole, *less = measure(recipe, checkpoint, [*SAMPLED_AND_GREEDY[:1], *taken_away])
    for summary in less:
        assert summary["accuracy"] < whole["accuracy"] - 0.15, summary["name"]


def test_flipping_is_flipping() -> None:
    advantages_P = torch.tensor([1.0, 0.0, -2.0])
    assert torch.equal(flipped(Credit(advantages_P)).advantages_P, -advantages_P)

"""The recipes of VAGEN's and slime's runs: published settings, a dry run with a look-alike model, their tiny variants."""

import json
import math
from contextlib import suppress
from functools import reduce
from pathlib import Path

import pytest
from PIL import Image

from sensorium.cli.main import main
from sensorium.recipe.load import load_recipe
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.run import train
from sensorium.vocabulary.errors import NothingTrained

FULL = {
    "vagen_frozen_lake": "tiny:qwen2_5_vl",
    "vagen_sokoban": "tiny:qwen2_5_vl",
    "vagen_svg": "tiny:qwen2_5_vl",
    "vagen_navigation": "tiny:qwen2_5_vl",
    "geo3k_multi_turn": "tiny:qwen3_vl",
}
TRICO = {
    "name": "trico_svg_vision_service", "steps": 300, "model.path": "Qwen/Qwen2.5-VL-3B-Instruct",
    "model.gradient_checkpointing": True, "batch.prompts_per_step": 16, "batch.group_size": 8, "batch.updates_per_epoch": 4,
    "rollout.max_new_tokens": 648, "rollout.max_context_tokens": 1800, "rollout.max_turns": 2, "rollout.window": 3,
    "rollout.top_p": 0.95, "rollout.temperature": 0.7, "algorithm.advantage.name": "bi_level_gae",
    "algorithm.advantage.turn_gamma": 1.0, "algorithm.kl.coef": 0.001, "algorithm.kl.place": "reward",
    "algorithm.critic.optimizer.lr": 1e-5, "algorithm.critic.warmup_steps": 0, "algorithm.critic.path": "",
    "optimizer.lr": 1e-6, "checkpoint.every": 70, "evaluation.every": 20, "evaluation.at_start": True,
    "logging.project": "vagen_new", "logging.loggers": ("wandb",), "logging.generations": 8,
}  # fmt: skip
"""VAGEN's documented TRICO-SVG run (its page of settings), under our keys; 128 episodes in 4 updates are 32 in each."""
FEW = [f"tasks.{split}.0.options.size=8" for split in ("train", "evaluate")]


@pytest.fixture
def geo3k(tmp_path: Path) -> list[str]:
    """Rows of geo3k's form, as overrides."""
    Image.new("RGB", (56, 56)).save(tmp_path / "figure.png")
    row = {"problem": "<image>Find x.", "images": ["figure.png"], "answer": "5"}
    (tmp_path / "geo3k.jsonl").write_text(json.dumps(row) + "\n")
    return ["tasks.train.0.source=jsonl", f"tasks.train.0.options.path={tmp_path / 'geo3k.jsonl'}"]


@pytest.mark.parametrize("name", FULL)
def test_a_dry_run_with_a_lookalike_model_finds_everything(
    name: str, geo3k: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    data = geo3k if name == "geo3k_multi_turn" else FEW
    assert main(["train", name, "--dry-run", f"model.path={FULL[name]}", *data]) == 0
    shown = capsys.readouterr().out
    assert "were read" in shown
    assert f"name: {name}" in shown


def test_the_settings_are_the_published_ones() -> None:
    lake, room = load_recipe("vagen_frozen_lake"), load_recipe("vagen_sokoban")
    for recipe in (lake, room, load_recipe("vagen_svg"), load_recipe("vagen_navigation")):
        assert recipe.model.path == "Qwen/Qwen2.5-VL-3B-Instruct"
        assert (recipe.steps, recipe.optimizer.lr, recipe.algorithm.critic.optimizer.lr) == (300, 1e-6, 1e-5)
        assert (recipe.rollout.temperature, recipe.rollout.top_p) == (0.7, 0.95)
        assert (recipe.algorithm.kl.coef, recipe.algorithm.kl.place) == (0.001, "reward")
        episodes = recipe.batch.prompts_per_step * recipe.batch.group_size
        assert (episodes, episodes // recipe.batch.updates_per_epoch) == (128, 32)
        assert recipe.tasks.train[0].options["options"]["response_format"] == "grounding_worldmodeling"
    assert (lake.algorithm.advantage.name, room.algorithm.advantage.name) == ("masked_gae", "bi_level_gae")
    assert room.algorithm.advantage.turn_gamma == 0.95
    assert room.rewards.terms[0].options == {"per_turn": True}
    slime = load_recipe("geo3k_multi_turn")
    assert slime.model.path == "Qwen/Qwen3-VL-2B-Instruct"
    assert (slime.batch.prompts_per_step, slime.batch.group_size, slime.rollout.max_episode_tokens) == (64, 8, 4096)
    assert (slime.algorithm.loss.clip_low, slime.algorithm.loss.clip_high) == (0.2, 0.28)
    assert (slime.optimizer.lr, slime.optimizer.weight_decay, slime.optimizer.betas) == (1e-6, 0.1, (0.9, 0.98))
    assert slime.tasks.train[0].options["environment"] == {
        "name": "geo3k",
        "options": {"max_turns": 3, "explain": False},
    }
    assert slime.rollout.count_observations


def test_vagens_documented_run_is_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = load_recipe("vagen_trico_svg")
    assert {key: reduce(getattr, key.split("."), recipe) for key in TRICO} == TRICO
    assert not recipe.rewards.terms[0].options.get("per_turn"), "use_multi_turn_reward=False"
    assert main(["train", "vagen_trico_svg", "--dry-run", "model.path=tiny:qwen2_5_vl", *FEW]) == 0
    assert "were read" in capsys.readouterr().out


@pytest.mark.parametrize("name", FULL)
def test_a_step_of_each_tiny_variant_is_played_and_learned(name: str, tmp_path: Path) -> None:
    small = ["steps=1", "threads=1", "batch.prompts_per_step=2", "batch.group_size=2", "rollout.max_turns=2"]
    small += ["warm_start.steps=1", "warm_start.prompts_per_step=2", "rollout.max_new_tokens=12", "health.sight_tasks=0"]
    recipe = load_recipe(f"tiny/{name}", [f"run_dir={tmp_path / 'run'}", *small, *FEW])
    with suppress(NothingTrained):  # two groups of two may all be paid alike; they were played
        train(recipe)
    rows = [json.loads(line) for line in RunDirectory(tmp_path / "run").metrics.read_text().splitlines()]
    assert len(rows) == 2
    assert rows[-1]["episodes/failed"] == 0
    assert "reward/environment" in rows[-1]


def test_a_run_without_vagens_masks_trains_on_observations_too(tmp_path: Path) -> None:
    """use_loss_mask=False and use_gae_mask=False: steps with a critic, a KL in the reward, and pictures."""
    shared = ["threads=1", "batch={prompts_per_step: 2, group_size: 2}", "rollout.max_turns=2", "warm_start.steps=0"]
    shared += ["rollout.max_new_tokens=8", "rollout.window=0", "health.sight_tasks=0", "evaluation.every=0", *FEW]
    shared += ["algorithm={advantage: {name: bi_level_gae, turn_gamma: 0.9}, kl: {coef: 0.001, place: reward}}"]
    trained = {}
    for masks in (True, False):
        mask = str(masks).lower()
        own = [f"run_dir={tmp_path / mask}", "steps=2", f"algorithm.loss_mask={mask}", f"algorithm.gae_mask={mask}"]
        train(load_recipe("tiny/vagen_frozen_lake", [*shared, *own]))
        rows = [json.loads(line) for line in RunDirectory(tmp_path / mask).metrics.read_text().splitlines()]
        trained[masks] = rows[0]["packing/trained_tokens"]
        assert all(math.isfinite(row["mismatch/max"]) and row["mismatch/max"] < 1e-3 for row in rows)
        assert all(math.isfinite(row["value/grad_norm"]) for row in rows)
    assert trained[False] > trained[True]

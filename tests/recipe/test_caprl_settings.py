"""CapRL's environment variables change the recipes caprl_image and caprl_video as its scripts would."""

from pathlib import Path

import pytest

from sensorium.cli.train import _from_environment
from sensorium.recipe.load import load_recipe
from sensorium.vocabulary.errors import RecipeError


def test_the_variables_of_caprls_scripts_are_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n" * 100)
    with pytest.raises(RecipeError, match="CAPTION_MODEL"):
        _from_environment("caprl_video")
    given = {"CAPTION_MODEL": "tiny:qwen3_vl", "DATASET": str(rows), "SAVE_DIR": str(tmp_path / "runs"), "BATCH_SIZE": "16"}
    given |= {"ROLLOUT_N": "4", "TOTAL_EPOCHS": "2", "SAVE_FREQ": "7", "ACTOR_LR": "2e-5", "MAX_RESPONSE_LENGTH": "512"}
    given |= {
        "REWARD_LENGTH_L1": "100",
        "REWARD_LENGTH_L2": "200",
        "REWARD_LENGTH_WEIGHT": "0.1",
        "REWARD_NODE_IP": "10.0.0.7",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    recipe = load_recipe("caprl_video", _from_environment("caprl_video"))
    assert (recipe.model.path, recipe.tasks.train[0].options["path"]) == ("tiny:qwen3_vl", str(rows))
    assert recipe.directory == tmp_path / "runs" / "caprl_video"
    assert (recipe.batch.prompts_per_step, recipe.batch.group_size, recipe.steps) == (16, 4, 13)
    assert (recipe.checkpoint.every, recipe.optimizer.lr) == (7, 2e-5)
    assert (recipe.rollout.max_new_tokens, recipe.rollout.max_context_tokens) == (512, 4608)
    remote, stamps, length = recipe.rewards.terms
    assert remote.options["servers"] == ["http://10.0.0.7:18889"]
    assert (stamps.weight, length.weight, length.options) == (0.2, 0.1, {"full_until": 100, "none_from": 200})
    monkeypatch.setenv("TOTAL_EPOCHS", "few")
    with pytest.raises(RecipeError, match="TOTAL_EPOCHS"):
        _from_environment("caprl_video")


def test_a_variable_that_changes_nothing_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    needed = {"CAPTION_MODEL": "tiny:qwen3_vl", "DATASET": str(tmp_path / "rows.jsonl"), "SAVE_DIR": str(tmp_path)}
    for name, value in (needed | {"SAVE_HF_MODEL": "False"}).items():
        monkeypatch.setenv(name, value)
    _from_environment("caprl_image")
    assert "SAVE_HF_MODEL" in capsys.readouterr().err
    monkeypatch.setenv("SAVE_HF_MODEL", "True")
    _from_environment("caprl_image")
    assert capsys.readouterr().err == ""


def test_the_recipes_are_as_published() -> None:
    for name in ("caprl_image", "caprl_video"):
        recipe = load_recipe(name)
        assert (recipe.batch.prompts_per_step, recipe.batch.group_size, recipe.batch.updates_per_epoch) == (128, 8, 1)
        assert (recipe.optimizer.lr, recipe.optimizer.warmup_steps, recipe.optimizer.schedule) == (1e-5, 20, "constant")
        assert recipe.algorithm.advantage.name == "rloo"
        assert (recipe.algorithm.kl.coef, recipe.algorithm.loss.aggregation) == (0.0, "sequence_mean_token_mean")
        weights = {term.name: term.weight for term in recipe.rewards.terms}
        stamps = {"timestamps": 0.2} if name == "caprl_video" else {}
        assert weights == {"remote": 1.0, "token_length": 0.2, **stamps}

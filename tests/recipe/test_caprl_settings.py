"""CapRL's environment variables change the recipes caprl_image and caprl_video as its scripts would, or are named."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sensorium.cli.main import main
from sensorium.recipe.load import load_recipe
from sensorium.recipe.schema import Recipe
from sensorium.systems.caprl.settings import WITHOUT_EFFECT, caprl_settings
from sensorium.vocabulary.errors import RecipeError

REMOTE, STAMPS, LENGTH = range(3)
"""Places of the reward terms in caprl_video."""

DOCUMENTED: dict[str, tuple[str, Any]] = {
    "REWARD_MODEL": ("/reader", None),
    "REWARD_PORT": ("19000", ("servers", ["http://127.0.0.1:19000"])),
    "REWARD_WORKER_BASE": ("19010", None),
    "CUDA_VISIBLE_DEVICES": ("0,1,2,3,4,5,6,7", None),
    "REWARD_NUM_WORKERS": ("2", None),
    "REWARD_SCORE_MODE": ("vl_judge", ("mode", "vl_judge")),
    "REWARD_TASK": ("image", None),
    "REWARD_QA_NUM": ("4", None),
    "FORMAT_REWARD_WEIGHT": ("0.3", ("stamps", 0.3)),
    "REWARD_NODE_IP": ("10.0.0.7", ("servers", ["http://10.0.0.7:18889"])),
    "REWARD_REMOTE_URL": ("http://node:1/get_reward", ("servers", ["http://node:1/get_reward"])),
    "CAPTION_MODEL": ("tiny:qwen3_vl", ("model", "tiny:qwen3_vl")),
    "DATASET": ("rows.jsonl", ("path", "rows.jsonl")),
    "SAVE_DIR": ("saved", ("directory", Path("saved/caprl_video"))),
    "BATCH_SIZE": ("16", ("prompts", 16)),
    "ROLLOUT_N": ("4", ("group", 4)),
    "TOTAL_EPOCHS": ("2", ("epochs", 2)),
    "SAVE_FREQ": ("7", ("every", 7)),
    "ACTOR_LR": ("2e-5", ("lr", 2e-5)),
    "MAX_PROMPT_LENGTH": ("4096", None),
    "MAX_RESPONSE_LENGTH": ("512", ("response", 512)),
    "ROLLOUT_PROMPT_LENGTH": ("9000", ("context", 13096)),
    "ROLLOUT_RESPONSE_LENGTH": ("1024", ("response", 1024)),
    "ROLLOUT_MAX_MODEL_LEN": ("12000", ("context", 12000)),
    "ROLLOUT_GPU_MEMORY_UTILIZATION": ("0.5", None),
    "ROLLOUT_AGENT_NUM_WORKERS": ("8", None),
    "SAVE_HF_MODEL": ("False", None),
    "WANDB_MODE": ("offline", ("loggers", ("wandb",))),
    "WANDB_PROJECT": ("CapRL_video", ("project", "CapRL_video")),
    "WANDB_DIR": ("logs/wandb", ("loggers", ("wandb",))),
    "RUN_NAME": ("7", ("name", "7")),
    "REWARD_LENGTH_TOKENIZER_PATH": ("/other/tokenizer", None),
    "REWARD_LENGTH_L1": ("100", ("full_until", 100)),
    "REWARD_LENGTH_L2": ("2500", ("none_from", 2500)),
    "REWARD_LENGTH_WEIGHT": ("0.1", ("length", 0.1)),
    "CONDA_ENV": ("caprl", None),
    "VERL_ROOT": ("/verl", None),
}
"""Every variable that the README of CapRL++'s training scripts lists: a value, and what it becomes; None: no effect."""


@pytest.fixture(autouse=True)
def needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three variables that must be set, and none besides."""
    for name in (*DOCUMENTED, *WITHOUT_EFFECT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("{}\n" * 100)
    for name in ("CAPTION_MODEL", "DATASET", "SAVE_DIR"):
        monkeypatch.setenv(name, DOCUMENTED[name][0])


def _from_environment(recipe: str, overrides: Sequence[str] = ()) -> list[str]:
    """The overrides that the environment's variables make, as ``train --caprl-env`` takes them; notices go to stderr."""
    found = caprl_settings(os.environ, recipe, load_recipe(recipe), overrides)
    for notice in found.notices():
        print(notice, file=sys.stderr)
    return [override for taken in found.overrides.values() for override in taken]


def facts(recipe: Recipe) -> dict[str, Any]:
    """What variables may change."""
    terms = recipe.rewards.terms
    return {
        "servers": terms[REMOTE].options["servers"],
        "mode": terms[REMOTE].options.get("mode", "qa"),
        "stamps": terms[STAMPS].weight,
        "length": terms[LENGTH].weight,
        "full_until": terms[LENGTH].options["full_until"],
        "none_from": terms[LENGTH].options["none_from"],
        "model": recipe.model.path,
        "path": recipe.tasks.train[0].options["path"],
        "directory": recipe.directory,
        "prompts": recipe.batch.prompts_per_step,
        "group": recipe.batch.group_size,
        "epochs": recipe.epochs,
        "every": recipe.checkpoint.every,
        "lr": recipe.optimizer.lr,
        "response": recipe.rollout.max_new_tokens,
        "context": recipe.rollout.max_context_tokens,
        "loggers": recipe.logging.loggers,
        "project": recipe.logging.project,
        "name": recipe.name,
    }


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_documented_variable_is_taken_or_named(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    value, becomes = DOCUMENTED[name]
    monkeypatch.setenv(name, value)
    recipe = load_recipe("caprl_video", _from_environment("caprl_video"))
    notices = [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"{name}={value} ")]
    assert len(notices) == (becomes is None)
    if becomes is not None:
        assert facts(recipe)[becomes[0]] == becomes[1]
    monkeypatch.delenv(name)
    if name in ("CAPTION_MODEL", "DATASET", "SAVE_DIR"):
        with pytest.raises(RecipeError, match=name):
            _from_environment("caprl_video")
        return
    before = facts(load_recipe("caprl_video", _from_environment("caprl_video")))
    assert (facts(recipe) == before) == (becomes is None), f"{name} changes {facts(recipe)}"


def test_a_source_that_reads_no_file_is_named_with_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny/caprl_image", "--caprl-env", "--dry-run"]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "DATASET 'rows.jsonl'" in shown
    assert "'captioned_shapes'" in shown
    assert "override" not in shown


def test_all_documented_variables_at_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, (value, _) in DOCUMENTED.items():
        monkeypatch.setenv(name, value)
    found = facts(load_recipe("caprl_video", _from_environment("caprl_video")))
    assert (found["servers"], found["mode"], found["stamps"]) == (["http://node:1/get_reward"], "vl_judge", 0.0)
    assert (found["response"], found["context"]) == (1024, 10024)
    assert (found["name"], found["directory"], found["loggers"]) == ("7", Path("saved/7"), ("wandb",))
    named = {line.partition("=")[0] for line in capsys.readouterr().err.splitlines()}
    other = {"REWARD_NODE_IP", "REWARD_PORT", "MAX_RESPONSE_LENGTH", "FORMAT_REWARD_WEIGHT"}  # beside one that goes first
    assert named == {name for name, (_, becomes) in DOCUMENTED.items() if becomes is None} | other


def test_caprls_own_lengths_give_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """As printed: MAX_PROMPT_LENGTH does not cut it, prompt and response fit, and the model's length bounds both."""
    for name, value in {"MAX_PROMPT_LENGTH": "4096", "MAX_RESPONSE_LENGTH": "4096", "ROLLOUT_PROMPT_LENGTH": "13000",
                        "ROLLOUT_RESPONSE_LENGTH": "4096", "ROLLOUT_MAX_MODEL_LEN": "18000"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    recipe = load_recipe("caprl_video", _from_environment("caprl_video"))
    assert (recipe.rollout.max_new_tokens, recipe.rollout.max_context_tokens) == (4096, 13000 + 4096)
    monkeypatch.setenv("ROLLOUT_MAX_MODEL_LEN", "16000")
    assert load_recipe("caprl_video", _from_environment("caprl_video")).rollout.max_context_tokens == 16000


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_what_has_no_effect_is_named_once_with_a_reason(name: str) -> None:
    given = {key: DOCUMENTED[key][0] for key in ("CAPTION_MODEL", "DATASET", "SAVE_DIR")}
    found = caprl_settings(given | {name: "1"}, "caprl_image", load_recipe("caprl_image"))
    assert [line.partition("=")[0] for line in found.notices()] == [name]
    assert name not in found.overrides


def test_a_term_that_the_recipe_does_not_have_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORMAT_REWARD_WEIGHT", "0.5")
    _from_environment("caprl_image")
    assert capsys.readouterr().err.startswith("FORMAT_REWARD_WEIGHT=0.5 ")


def test_what_is_as_usual_is_not_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"SAVE_HF_MODEL": "True", "REWARD_LENGTH_TOKENIZER_PATH": "tiny:qwen3_vl", "ROLLOUT_N": " ",
                        "CUDA_VISIBLE_DEVICES": "0", "MAX_PROMPT_LENGTH": ""}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    _from_environment("caprl_image")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    _from_environment("caprl_image", ["cluster.learners=2"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOTAL_EPOCHS", "few"),
        ("TOTAL_EPOCHS", "0"),
        ("BATCH_SIZE", "1.5"),
        ("BATCH_SIZE", "-1"),
        ("ACTOR_LR", "nan"),
        ("ACTOR_LR", "[1]"),
        ("ROLLOUT_MAX_MODEL_LEN", "18k"),
        ("REWARD_PORT", "99999"),
        ("REWARD_SCORE_MODE", "guess"),
        ("REWARD_NODE_IP", "http://10.0.0.7"),
        ("REWARD_NODE_IP", "10.0.0.7:19000"),
        ("REWARD_LENGTH_WEIGHT", "inf"),
        ("DATASET", "a.jsonl,b.jsonl"),
        ("REWARD_REMOTE_URL", "http://node:1/get_reward?token=secret"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_variable(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match=name) as error:
        _from_environment("caprl_video")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("value", ["null", "7", "on", "a: b", "[x]", "{a: 1}", "# x", "~", "é"])
def test_texts_stay_texts_whatever_yaml_makes_of_them(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", value)
    monkeypatch.setenv("CAPTION_MODEL", value)
    recipe = load_recipe("caprl_video", _from_environment("caprl_video"))
    assert (recipe.logging.project, recipe.model.path) == (value, value)


def test_the_command_line_goes_before_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCH_SIZE", "16")
    monkeypatch.setenv("REWARD_NODE_IP", "fe80::1")
    given = ["batch.prompts_per_step=32", "steps=2"]
    recipe = load_recipe("caprl_video", [*_from_environment("caprl_video", given), *given])
    assert (recipe.batch.prompts_per_step, recipe.steps, recipe.epochs) == (32, 2, 3)
    assert recipe.rewards.terms[REMOTE].options["servers"] == ["http://[fe80::1]:18889"]


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

"""Runs on the general path: a resumed run repeats itself bit for bit, and what it saves loads equal."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file

from sensorium.cli.dry_run import show_dry_run
from sensorium.cli.export import export
from sensorium.data.media_store import MediaStore
from sensorium.models.load import load_policy
from sensorium.recipe.load import load_recipe, parse_recipe
from sensorium.recipe.schema import Recipe
from sensorium.runs.metrics import read_metrics, repeatable
from sensorium.trainer.run import train
from sensorium.vocabulary.errors import RecipeError
from tests.general_checkpoints import GENERAL, make_checkpoint, tokenizer_of
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
    ("name", "model", "algorithm"),
    [
        ("gemma3", {}, {}),
        ("glm4v", {"family": "general", "lora": {"rank": 2}}, {}),
        ("qwen3_next", {}, {}),
        ("mistral3", {}, {"advantage": {"name": "gae"}, "critic": {"trunk": "own"}}),
        ("aya_vision", {}, {"advantage": {"name": "gae"}, "critic": {"trunk": "shared"}}),
    ],
)
def test_a_resumed_run_repeats_itself_and_what_it_saves_loads_equal(
    name: str, model: dict[str, Any], algorithm: dict[str, Any], tmp_path: Path
) -> None:
    source, whole, broken = make_checkpoint(name, tmp_path / "source"), tmp_path / "whole", tmp_path / "broken"
    train(recipe_of(source, whole, model=model, algorithm=algorithm))
    shutil.copytree(whole, broken)
    shutil.rmtree(broken / "checkpoints" / "step_000002")
    train(load_recipe(broken), resume=True)
    rows = [[repeatable(row) for row in read_metrics(run / "metrics.jsonl")] for run in (whole, broken)]
    assert rows[0] == rows[1]
    assert rows[0][0]["mismatch/max"] < 1e-3
    assert rows[0][0]["policy/grad_norm"] > 0
    assert ("value/loss" in rows[0][0]) == bool(algorithm)
    one, two = (run / "checkpoints" / "step_000002" for run in (whole, broken))
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    assert (one / "trainer" / "learner.pt").read_bytes() == (two / "trainer" / "learner.pt").read_bytes()
    trained, before = (load_policy(str(folder), store=MediaStore()).model.state_dict() for folder in (one, source))
    assert trained.keys() == before.keys()
    assert not all(torch.equal(trained[key], before[key]) for key in before)
    if model:  # adapters; other exports are held to stock classes in tests/models/test_general_families.py
        export(one, tmp_path / "out")
        out = load_policy(str(tmp_path / "out"), store=MediaStore()).model.state_dict()
        assert all(torch.equal(out[key], trained[key]) for key in trained)
        assert load_file(tmp_path / "out" / "model.safetensors").keys() == load_file(source / "model.safetensors").keys()


WIDTHS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXTS: dict[str, dict[str, Any]] = {  # learned positions and dropout, other names of sizes, experts
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.1},
    "mixtral": WIDTHS | {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("name", TEXTS)
def test_models_of_text_that_name_their_sizes_otherwise_are_forecast_as_far_as_known_and_train(
    name: str, tmp_path: Path
) -> None:
    tokenizer, folder = tokenizer_of(GENERAL["olmo2"]), tmp_path / "source"
    tokens = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = transformers.AutoConfig.for_model(name, **TEXTS[name], vocab_size=len(tokenizer), **tokens)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    recipe = recipe_of(folder, tmp_path / "run")
    with (tmp_path / "shown").open("w") as shown:
        show_dry_run(recipe, Console(file=shown, width=200))
    assert ("no memory is forecast" in (tmp_path / "shown").read_text()) == (name != "mixtral")
    train(recipe)
    rows = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert all(row["mismatch/max"] < 1e-4 and row["policy/grad_norm"] > 0 for row in rows)


def test_what_it_cannot_compute_is_refused_in_the_dry_run(tmp_path: Path) -> None:
    source = make_checkpoint("olmo2", tmp_path / "source")
    refused: list[dict[str, Any]] = [
        {"model": {"precision": "matched"}},
        {"cluster": {"learners": 2}},
        {"algorithm": {"router_coef": 0.1}},
    ]
    for changes in refused:
        with pytest.raises(RecipeError, match="general path"):
            show_dry_run(recipe_of(source, tmp_path / "run", **changes), Console(quiet=True))


def test_a_critic_on_a_checkpoint_of_another_type_is_refused(tmp_path: Path) -> None:
    """Both are on the general path, but their tokens are not the same."""
    source, other = (make_checkpoint(name, tmp_path / name) for name in ("olmo2", "granite"))
    algorithm = {"advantage": {"name": "gae"}, "critic": {"trunk": "own", "path": str(other)}}
    with pytest.raises(RecipeError, match=r"critic\.path .*granite .*olmo2"):
        train(recipe_of(source, tmp_path / "run", algorithm=algorithm))


def test_a_model_whose_prompt_attends_both_ways_plays_one_turn(tmp_path: Path) -> None:
    source = make_checkpoint("paligemma2", tmp_path / "source")
    with pytest.raises(RecipeError, match=r"rollout\.window"):
        train(recipe_of(source, tmp_path / "run", rollout={"max_new_tokens": 4, "max_turns": 2}))

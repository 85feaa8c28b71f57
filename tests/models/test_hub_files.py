"""Hub ids: of a revision, out of the cache that the environment names, without a network where it is forbidden."""

import json
from pathlib import Path

import pytest
import torch

from sensorium.assembly.models import load_trained, write_source
from sensorium.data.media_store import MediaStore
from sensorium.models.checkpoint_path import describe_source
from sensorium.models.load import load_policy
from sensorium.models.load_chat import load_chat_processor
from sensorium.models.policy import Policy
from sensorium.models.tiny import make_tiny
from sensorium.models.weight_files import INDEX
from sensorium.recipe.load import load_recipe
from sensorium.recipe.model_shape import read_shape
from sensorium.recipe.schema import LoraSection
from sensorium.runs.run_directory import RunDirectory
from sensorium.vocabulary.errors import ModelError, RecipeError

NAME = "some/model"
MAIN, OTHER = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two commits of a model, the main branch and a tag, and no network."""
    folder = tmp_path / "models--some--model"
    for branch, commit, seed in (("main", MAIN, 0), ("v2", OTHER, 1)):
        make_tiny("qwen2", folder / "snapshots" / commit, seed)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / branch).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    return folder


def load(revision: str = "", **given: object) -> Policy:
    return load_policy(NAME, store=MediaStore(), device="cpu", revision=revision, **given)  # type: ignore[arg-type]


def embeddings(policy: Policy) -> torch.Tensor:
    return policy.adapter.language_model.embed_tokens.weight


def test_a_revision_is_a_branch_a_tag_or_a_commit(cache: Path) -> None:
    main, tag, commit = load(), load("v2"), load(OTHER)
    assert torch.equal(embeddings(tag), embeddings(commit))
    assert not torch.equal(embeddings(tag), embeddings(main))
    assert describe_source(NAME).revision == MAIN
    assert describe_source(NAME, "v2").revision == OTHER
    assert read_shape(NAME, "v2") == read_shape(NAME)


def test_an_adapter_names_the_hub_id_it_was_made_for(cache: Path, tmp_path: Path) -> None:
    load(lora=LoraSection(rank=2)).save(tmp_path / "saved")
    assert (
        json.loads((tmp_path / "saved" / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == NAME
    )


def test_a_revision_that_the_cache_lacks_is_refused_offline(cache: Path) -> None:
    assert read_shape(NAME, "v3") is None
    with pytest.raises(ModelError, match=r"'some/model': .*HF_HUB_OFFLINE is set and the cache .* at revision 'v3'"):
        load("v3")


def test_tokens_need_no_weights_and_missing_weights_are_named(cache: Path) -> None:
    weights = cache / "snapshots" / MAIN / "model.safetensors"
    weights.rename(weights.with_name("elsewhere"))
    load_chat_processor(NAME, store=MediaStore())
    with pytest.raises(ModelError, match=r"model\.path 'some/model': .*no weights as safetensors"):
        load()
    weights.with_name(INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    with pytest.raises(ModelError, match=r"model\.path 'some/model': .*lacks 2 of 2 weight files: one\.safetensors"):
        load()


def test_a_revision_of_what_is_no_hub_id_is_refused(tmp_path: Path) -> None:
    for path in ("tiny:qwen2", str(tmp_path)):
        with pytest.raises(RecipeError, match=r"model\.revision.*it is for hub ids"):
            load_recipe("shapes", [f"model.path={path}", "model.revision=main"])


def test_a_resumed_lora_run_takes_the_commit_it_began_with_though_the_branch_has_moved(cache: Path, tmp_path: Path) -> None:
    recipe = load_recipe("shapes", [f"model.path={NAME}", "model.lora.rank=2", "model.device=cpu"])
    directory = RunDirectory(tmp_path / "run").create()
    began = load_trained(recipe, MediaStore())
    write_source(recipe, directory, "official")
    began.save(directory.checkpoint_of(1))
    (cache / "refs" / "main").write_text(OTHER)
    assert torch.equal(embeddings(load_trained(recipe, MediaStore(), directory.checkpoint_of(1))), embeddings(began))
    assert not torch.equal(embeddings(load_trained(recipe, MediaStore())), embeddings(began))

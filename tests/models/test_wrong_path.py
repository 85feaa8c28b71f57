"""A model path that leads nowhere is told what it was taken for, what is there, and the nearest name."""

from pathlib import Path

import pytest

from sensorium.models.checkpoint_path import find_checkpoint
from sensorium.vocabulary.errors import ModelError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a checkpoint in it, another one below, and no network."""
    for name in ("my_model", "models/gemini-vl"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


def said(path: str | Path) -> str:
    with pytest.raises(ModelError) as error:
        find_checkpoint(str(path))
    assert str(error.value).startswith(f"model.path '{path}': ")
    return str(error.value)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("qwen3_vl", "tiny:qwen3_vl"),
        ("tiny_qwen3-vl", "tiny:qwen3_vl"),
        ("tinny:internvl", "tiny:internvl"),
        ("shape", "package:shapes"),
        ("my-modl", "my_model"),
        ("gemini_vl", "models/gemini-vl"),
    ],
)
def test_a_bare_name_is_no_hub_id_and_the_nearest_is_suggested(path: str, meant: str, here: Path) -> None:
    told = said(path)
    assert f"did you mean '{meant}'?" in told
    assert "a hub id has an owner (owner/name)" in told
    assert "hub cannot be reached" not in told


def test_a_bare_name_that_is_near_to_nothing_is_told_what_a_path_may_be(here: Path) -> None:
    assert said("zzzzzz").endswith("model.path is a folder, a hub id (owner/name), package:NAME or tiny:FAMILY.")


def test_an_absolute_path_is_told_what_the_nearest_folder_above_it_holds(here: Path) -> None:
    told = said(here / "models" / "gemni-vl")
    assert f"did you mean '{here}/models/gemini-vl'?" in told
    assert "my_model" not in told
    far = said(here / "modls" / "a" / "b")
    assert f"did you mean '{here}/models'? '{here}' is the nearest folder that exists, and it holds the folders" in far


def test_a_file_and_a_folder_of_checkpoints_are_told_what_to_name(here: Path) -> None:
    assert f"it is a file, and a checkpoint is a folder; give '{here / 'my_model'}'" in said(here / "my_model/config.json")
    assert "Below it are checkpoints in: gemini-vl; name one of them." in said(here / "models")


def test_a_hub_id_that_cannot_be_had_says_where_it_was_looked_for(here: Path) -> None:
    told = said("Qwen/gemini-vl")
    assert f"it is no folder here ('{here}'), and cannot be fetched as a hub id" in told
    assert "HF_HUB_OFFLINE is set" in told
    assert "did you mean 'models/gemini-vl'?" in told


def test_a_hub_that_does_not_answer_is_explained(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(*given: object, **more: object) -> None:
        raise LocalEntryNotFoundError("Got: ConnectError: [Errno -2] Name or service not known\nmore")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    told = said("Qwen/Qwen3-VL")
    assert "did you mean" not in told, "a tiny model is not what was meant"
    assert "the hub cannot be reached from here (ConnectError: [Errno -2] Name or service not known)" in told
    assert "bring the checkpoint onto this machine and give its folder" in told

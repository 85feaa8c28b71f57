"""An exported checkpoint is a plain Hugging Face model, complete or absent."""

import json
from pathlib import Path

import pytest

from sensorium.cli.export import export, find_checkpoint
from sensorium.cli.main import main
from sensorium.vocabulary.errors import CheckpointError


def checkpoint(run: Path, step: int, *, complete: bool = True) -> Path:
    """A checkpoint of a tiny text model as a trainer leaves it."""
    import sensorium.models.torchvision_fix  # noqa: F401  (before transformers imports torchvision)
    from sensorium.models.tiny import make_tiny

    folder = make_tiny("qwen2", run / "checkpoints" / f"step_{step:06d}", seed=step)
    (folder / "trainer").mkdir()
    (folder / "trainer" / "state.pt").write_bytes(b"state")
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    if complete:
        (folder / "COMPLETE").write_text(json.dumps({"step": step, "files": sizes}))
    return folder


def test_the_export_is_the_model_and_nothing_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    source = checkpoint(tmp_path / "run", 3)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert "step_000003" in capsys.readouterr().out
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert not (tmp_path / "out" / "trainer").exists()
    assert not (tmp_path / "out" / "COMPLETE").exists()
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (source, tmp_path / "out"))
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "out")("Which colour is the circle?")["input_ids"]])
    assert torch.equal(before(ids).logits, after(ids).logits)


def test_best_last_and_named_steps_are_found_and_half_ones_never(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first, last = checkpoint(run, 1), checkpoint(run, 2)
    checkpoint(run, 3, complete=False)
    assert find_checkpoint(run) == last
    (run / "checkpoints" / "best.json").write_text(json.dumps({"step": 1, "value": 0.5}))
    assert find_checkpoint(run) == first
    assert find_checkpoint(run, last=True) == last
    assert find_checkpoint(run, step=1) == first
    assert find_checkpoint(first) == first
    with pytest.raises(CheckpointError, match="no complete checkpoint of step 3; there are: 1, 2"):
        find_checkpoint(run, step=3)


def test_an_existing_folder_is_never_written_into(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "run", 1)
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists"):
        export(source, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []

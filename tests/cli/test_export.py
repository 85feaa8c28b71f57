"""An exported checkpoint is a plain Hugging Face model, complete or absent."""

import errno
import fcntl
import json
import shutil
from pathlib import Path

import pytest

from sensorium.cli.export import export
from sensorium.cli.main import main
from sensorium.runs.checkpoint_layout import checkpoint_of_run
from sensorium.vocabulary.errors import CheckpointError, RecordError

from ..file_limit import small_files_only


def checkpoint(run: Path, step: int, *, complete: bool = True) -> Path:
    """A checkpoint of a tiny text model as a trainer leaves it."""
    import sensorium.models.torchvision_fix  # noqa: F401  (before transformers imports torchvision)
    from sensorium.models.tiny import make_tiny

    folder = make_tiny("qwen2", run / "checkpoints" / f"step_{step:06d}", seed=step)
    (folder / "trainer").mkdir()
    (folder / "trainer" / "state.pt").write_bytes(b"state")
    if complete:
        (folder / "COMPLETE").write_text(json.dumps({"step": step, "files": sizes_of(folder)}))
    return folder


def sizes_of(folder: Path) -> dict[str, int]:
    """What a checkpoint's marker lists."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


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


def test_an_export_renders_chats_with_the_runs_values_of_template_variables(tmp_path: Path) -> None:
    from transformers import AutoProcessor

    from sensorium.data.media_store import MediaStore
    from sensorium.models.load import load_policy
    from sensorium.models.tiny import make_tiny

    source, run = make_tiny("qwen3_5", tmp_path / "source"), tmp_path / "run"
    config = json.loads((source / "tokenizer_config.json").read_text())
    template = (source / "chat_template.jinja").read_text()
    (source / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))  # as older ones have it
    quiet = {"enable_thinking": False}
    folder = run / "checkpoints" / "step_000001"
    load_policy(str(source), store=MediaStore(), device="cpu", template_defaults=quiet).save(folder)
    (folder / "COMPLETE").write_text(json.dumps({"step": 1, "files": sizes_of(folder)}))
    (run / "recipe.yaml").write_text(json.dumps({"model": {"path": str(source), "chat_template_kwargs": quiet}}))
    notes = export(folder, tmp_path / "out")
    assert any("enable_thinking=False" in note for note in notes)
    asked = [{"role": "user", "content": [{"type": "text", "text": "What?"}]}]
    for folder, closed in ((tmp_path / "out", True), (source, False)):
        text = AutoProcessor.from_pretrained(folder).apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        assert ("</think>" in text) is closed
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["chat_template"]
    assert written == (tmp_path / "out" / "chat_template.jinja").read_text()


def adapted(run: Path) -> Path:
    """A checkpoint of a tiny text model with adapters, as a trainer leaves it."""
    import torch

    from sensorium.data.media_store import MediaStore
    from sensorium.models.load import load_policy
    from sensorium.recipe.schema import LoraSection

    policy = load_policy("tiny:qwen2", store=MediaStore(), device="cpu", lora=LoraSection(rank=2))
    assert policy.adapters is not None
    with torch.no_grad():
        for parameter in policy.adapters.parameters.values():
            parameter.fill_(0.1)
    folder = run / "checkpoints" / "step_000001"
    policy.save(folder)
    (folder / "COMPLETE").write_text(json.dumps({"step": 1, "files": sizes_of(folder)}))
    return folder


def test_adapters_are_exported_added_in_or_alone(tmp_path: Path) -> None:
    import torch

    source = adapted(tmp_path / "run")
    from peft import PeftConfig, PeftModel
    from transformers import AutoModelForCausalLM

    from sensorium.models.checkpoint_path import find_checkpoint

    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model")]) == 0
    assert main(["export", str(source), str(tmp_path / "alone"), "--adapter"]) == 0
    assert not (tmp_path / "model" / "adapter").exists()
    assert sorted(path.name for path in (tmp_path / "alone").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert PeftConfig.from_pretrained(tmp_path / "alone").base_model_name_or_path == "tiny:qwen2"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    base = AutoModelForCausalLM.from_pretrained(find_checkpoint("tiny:qwen2"))
    ids = torch.arange(9)[None]
    plain = base(ids).logits
    unmerged = PeftModel.from_pretrained(base, tmp_path / "alone")(ids).logits
    torch.testing.assert_close(merged(ids).logits, unmerged, rtol=0, atol=2e-5)
    assert float((unmerged - plain).detach().abs().max()) > 0.1


def test_a_run_without_adapters_has_none_to_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(tmp_path / "run", 1)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--adapter"]) == 2
    assert "has no adapter" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_best_last_and_named_steps_are_found_and_half_ones_never(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first, last = checkpoint(run, 1), checkpoint(run, 2)
    assert checkpoint_of_run(run) == last
    checkpoint(run, 3, complete=False)
    with pytest.raises(CheckpointError, match=r"of step 3, is damaged: it has no COMPLETE.*--step 2"):
        checkpoint_of_run(run)
    (run / "checkpoints" / "best.json").write_text(json.dumps({"step": 1, "value": 0.5}))
    assert checkpoint_of_run(run) == first
    with pytest.raises(CheckpointError, match=r"of step 3, is damaged"):
        checkpoint_of_run(run, last=True)
    assert checkpoint_of_run(run, step=1) == first
    assert checkpoint_of_run(first) == first
    with pytest.raises(CheckpointError, match="no complete checkpoint of step 3; there are: 1, 2"):
        checkpoint_of_run(run, step=3)


def test_steps_that_tie_with_the_best_are_named_where_it_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    checkpoint(run, 1)
    checkpoint(run, 4)
    (run / "checkpoints" / "best.json").write_text(json.dumps({"step": 1, "value": 0.5}))
    (run / "recipe.yaml").write_text("model: {path: 'tiny:qwen2'}\ncheckpoint: {best: eval/accuracy}\n")
    accuracy = {0: 0.5, 1: 0.5, 2: 0.5, 3: None, 4: 0.5, 5: 0.25}
    rows = [{"step": step, "eval/accuracy": value} for step, value in accuracy.items()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def told(name: str, *options: str) -> str:
        assert main(["export", str(run), str(tmp_path / name), "--as-trained", *options]) == 0
        return capsys.readouterr().out

    tie = "step 1 is the first with the best eval/accuracy, 0.5; later steps tie with it: 2, 4\n"
    assert told("best").endswith(tie)
    assert "later steps tie" not in told("last", "--last")
    assert "later steps tie" not in told("first", "--step", "1")
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    assert "later steps tie" not in told("alone")
    (run / "metrics.jsonl").write_text("no row\n")
    assert "later steps tie" not in told("damaged"), "and it is exported all the same"
    (run / "recipe.yaml").unlink()
    assert "later steps tie" not in told("bare")


def test_an_existing_folder_is_never_written_into(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "run", 1)
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists"):
        export(source, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_what_was_trained_is_not_written_into_a_quantized_layout(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "run", 3)
    quantized = tmp_path / "fp8"
    quantized.mkdir()
    (quantized / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    (tmp_path / "run" / "source.json").write_text(json.dumps({"path": str(quantized), "folder": str(quantized)}))
    notes = export(source, tmp_path / "out")
    assert notes[0].startswith(
        f"ATTENTION: {quantized} is quantized, and what was trained is not. So the checkpoint was copied"
    )
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="is quantized"):
        export(source, tmp_path / "other", layout=str(quantized))


def test_two_exports_into_one_folder_do_not_meet(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "run", 1)
    with (tmp_path / ".out.lock").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another process is exporting into"):
            export(source, tmp_path / "out", as_trained=True)
        assert not (tmp_path / "out").exists()
    export(source, tmp_path / "out", as_trained=True)  # a lock of a process that was killed holds nobody up
    with pytest.raises(CheckpointError, match="exists; choose another folder"):
        export(source, tmp_path / "out", as_trained=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_checkpoints_on_another_disk_are_still_those_of_their_run(tmp_path: Path) -> None:
    checkpoint(tmp_path / "elsewhere", 1)
    published = tmp_path / "published"
    shutil.copytree(tmp_path / "elsewhere" / "checkpoints" / "step_000001", published)
    (published / "COMPLETE").unlink()
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(tmp_path / "elsewhere" / "checkpoints")
    (run / "source.json").write_text(json.dumps({"path": str(published), "folder": str(published)}))
    notes = export(run / "checkpoints" / "step_000001", tmp_path / "out")
    assert f"in the layout of {published}" in notes


def test_a_full_disk_is_told_with_the_way_out_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    source = checkpoint(tmp_path / "run", 1)
    monkeypatch.setattr("sensorium.cli.export.shutil.copytree", full)
    with pytest.raises(RecordError, match=r"cannot write '.*out'") as failed:
        export(source, tmp_path / "out", as_trained=True)
    assert "export" in "".join(failed.value.__notes__)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_tiny_model_is_written_as_a_checkpoint_like_any_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sensorium.data.media_store import MediaStore
    from sensorium.models.load import load_policy

    assert main(["export", "tiny:qwen2:3", str(tmp_path / "model")]) == 0
    assert json.loads((tmp_path / "model" / "config.json").read_text())["num_hidden_layers"] == 3
    assert "random weights" in capsys.readouterr().out
    assert load_policy(str(tmp_path / "model"), store=MediaStore(), device="cpu").family == "qwen2"
    assert main(["export", "tiny:qwen2", str(tmp_path / "model")]) == 2
    assert main(["export", "tiny:qwen9", str(tmp_path / "other")]) == 2
    assert main(["export", "tiny:qwen2", str(tmp_path / "other"), "--last"]) == 2
    assert "--last is for the checkpoints of a run" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_runs_that_name_each_other_as_their_source_are_no_endless_search(tmp_path: Path) -> None:
    one, other = (checkpoint(tmp_path / name, 1) for name in ("one", "other"))
    for run, source in ((tmp_path / "one", other), (tmp_path / "other", one)):
        (run / "source.json").write_text(json.dumps({"path": str(source), "folder": str(source)}))
    notes = export(one, tmp_path / "out")
    assert "name each other as their source" in notes[0]


def test_a_link_that_leads_nowhere_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    assert main(["export", "tiny:qwen2", str(tmp_path / "out")]) == 2
    assert "exists; choose another folder" in " ".join(capsys.readouterr().err.split())


def test_a_copy_that_finds_no_room_is_one_paragraph_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(tmp_path / "run", 1)
    with small_files_only():
        assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--as-trained"]) == 2
    assert "model.safetensors': File too large. Files may not grow this large here (ulimit -f)" in told(capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_export_needs_nothing_of_the_recipe_but_its_model(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "run", 1)
    published = checkpoint(tmp_path / "published", 2, complete=False)
    recipe = f"model: {{path: '{published}'}}\nrewards: {{terms: [{{name: 'of_another_folder:reward'}}]}}\n"
    (tmp_path / "run" / "recipe.yaml").write_text(recipe)
    assert f"in the layout of {published}" in export(source, tmp_path / "out")


def told(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())

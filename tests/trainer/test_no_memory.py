"""Memory that does not suffice: said before the run by its forecast, and in one paragraph when it runs out."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sensorium.assembly import out_of_memory
from sensorium.assembly.out_of_memory import memory_exhausted, memory_note
from sensorium.cli import train as train_command
from sensorium.cli.main import main
from sensorium.learner.learner import Learner
from sensorium.models.tiny import make_tiny
from sensorium.recipe.load import dump_recipe
from sensorium.recipe.memory_estimate import TOWER
from sensorium.recipe.plan import Plan, for_tasks, least_recomputation, make_plan
from sensorium.trainer.run import train
from sensorium.vocabulary import Media, Task, user
from sensorium.vocabulary.errors import MemoryExhausted
from tests.trainer.small import small
from tests.trainer.test_going_on import Notes, assert_equal
from tests.trainer.test_heard_tones import tones


def exhaust(*_: Any, **__: Any) -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def test_memory_that_runs_out_ends_the_run_in_one_paragraph_and_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train(small(tmp_path / "whole"))
    recipe, step = small(tmp_path / "run"), Learner.step

    def second_fails(learner: Learner, *given: Any, **more: Any) -> dict[str, float]:
        if learner.steps == 1:
            exhaust()
        return step(learner, *given, **more)

    (tmp_path / "small.yaml").write_text(dump_recipe(recipe))
    with monkeypatch.context() as patched:
        patched.setattr(Learner, "step", second_fails)
        assert main(["train", str(tmp_path / "small.yaml")]) == 2
    out, err = capsys.readouterr()
    said = " ".join(err.split())
    assert "error: this machine has no memory left" in said
    for way in ("model.gradient_checkpointing=true", "optimizer.moments=bfloat16 or 8-bit", "model.dtype=bfloat16"):
        assert way in said
    assert "Traceback" not in out + err
    assert "--resume" in out
    train(recipe, resume=True)
    assert_equal(whole, recipe.directory, 3)


def test_other_commands_say_it_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(train_command, "load_recipe", exhaust)
    assert main(["train", "shapes"]) == 2
    assert "error: this machine has no memory left" in capsys.readouterr().err


def test_other_errors_are_left_alone() -> None:
    assert memory_exhausted(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    wrapped = ValueError("wrapped")
    with pytest.raises(RuntimeError) as failed:
        exhaust()
    wrapped.__cause__ = failed.value
    assert isinstance(memory_exhausted(wrapped), MemoryExhausted)


def test_a_forecast_above_what_is_there_is_said_before_anything_is_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny("qwen2", tmp_path / "model")
    recipe = small(tmp_path / "run", f"model.path={model}", "steps=1")
    needed = sum(make_plan(recipe).memory.values())
    for there, told in ((needed - 1, True), (needed, False)):
        monkeypatch.setattr(out_of_memory, "_memory_there", lambda _, there=there: there)
        note = memory_note(recipe, make_plan(recipe))
        assert note.startswith("ATTENTION: the run may take") is told
        assert ("rollout.max_context_tokens below" in note) is told
    monkeypatch.setattr(out_of_memory, "_memory_there", lambda _: 1 << 10)
    ours = small(tmp_path / "ours")
    assert not memory_note(ours, make_plan(ours)), "no alarm for a model of ours on a small laptop"
    (tmp_path / "small.yaml").write_text(dump_recipe(recipe))
    assert main(["train", str(tmp_path / "small.yaml"), "--dry-run"]) == 0
    assert "ATTENTION: the run may take" in capsys.readouterr().out
    notes = Notes()
    train(recipe, watchers=[notes])
    assert any("ATTENTION: the run may take" in note for note in notes.texts)


def test_a_gpu_that_chooses_what_to_recompute_needs_no_memory_for_a_tower_that_sees_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny("qwen2_5_omni", tmp_path / "model")
    recipe = small(tmp_path / "run", f"model.path={model}", "model.gradient_checkpointing=auto", "model.dtype=bfloat16")
    plan = make_plan(recipe)
    heard = for_tasks(plan, [Task("heard", (user(Media("sound", "0" * 64)),))])
    gpu = SimpleNamespace(total_memory=1 << 40)
    assert plan.model is not None
    needed = least_recomputation(recipe, plan.model, gpu.total_memory).forecast
    monkeypatch.setattr(out_of_memory, "find_device", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(out_of_memory, "_memory_there", lambda _: needed - 1)
    assert memory_note(recipe, plan).startswith("ATTENTION")
    assert memory_note(recipe, heard) == ""
    assert 0 < out_of_memory._forecast(recipe, heard, torch.device("cuda", 0)) == needed - plan.memory["vision tower"]


def test_a_run_on_sounds_counts_no_tower_that_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan from which a run takes its notes on memory, in a family that sees and hears."""
    plans: list[Plan] = []
    monkeypatch.setattr("sensorium.trainer.run.memory_note", lambda recipe, plan: plans.append(plan) or "")
    model = make_tiny("qwen2_5_omni", tmp_path / "model")
    source = tones(tmp_path / "tones", "train", range(1))
    train(small(tmp_path / "run", f"model.path={model}", "steps=1", f"tasks.train={json.dumps([source])}"))
    assert plans
    assert TOWER in make_plan(small(tmp_path / "other", f"model.path={model}")).memory
    assert not any(TOWER in plan.memory for plan in plans)


@pytest.mark.gpu
def test_a_full_gpu_is_named_with_who_holds_it() -> None:
    with pytest.raises(torch.OutOfMemoryError) as failed:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    assert "GPU 0 has no memory left: of its" in str(memory_exhausted(failed.value))
    assert out_of_memory._memory_there(torch.device("cuda")) > 1 << 30

"""A run whose engine lives in another process is the native engine's run: episodes, weights and resume, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sensorium.engines.native.native_engine import NativeEngine
from sensorium.recipe.schema import Recipe
from sensorium.report.watcher import Watcher
from sensorium.runs.process_table import RunEnd, read_processes
from sensorium.trainer.run import train
from sensorium.vocabulary.errors import EngineLost

from .small import small

pytestmark = pytest.mark.usefixtures("forked_python")  # tests/engines/test_process.py starts a new interpreter
PROCESS = "rollout.engine={name: process, options: {max_rows: 3}}"
NATIVE = "rollout.engine={name: native, options: {max_rows: 3}}"


def weights_of(run: Path) -> dict[str, Any]:
    """The last checkpoint's tensors, as lists."""
    folder = max((run / "checkpoints").glob("step_*"))
    return {name: tensor.tolist() for name, tensor in load_file(folder / "model.safetensors").items()}


def episodes_of(run: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        path.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(run.rglob("step_*.jsonl"))
    }


class Notes(Watcher):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def noted(self, text: str) -> None:
        self.notes.append(text)


def test_a_resumed_run_of_three_steps_equals_the_native_engines(tmp_path: Path) -> None:
    native = train(small(tmp_path / "native", NATIVE))
    watcher = Notes()
    process = train(small(tmp_path / "process", PROCESS, "steps=2"), watchers=[watcher])
    assert watcher.notes[0] == "starting 1 engine (process); that may take minutes"
    told = read_processes(process)
    assert told is not None
    assert (told.step, told.steps, told.end) == (2, 2, RunEnd("finished"))
    train(small(tmp_path / "process", PROCESS), resume=True)
    assert len(episodes_of(native)) == 3
    assert episodes_of(process) == episodes_of(native)
    assert weights_of(process) == weights_of(native)


def test_under_lora_with_pictures_and_a_frozen_tower_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where this process multiplies matrices without oneDNN: the child is told."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    changes: dict[str, Any] = {
        "steps": 2,
        "model": {"path": "tiny:qwen2_5_vl", "device": "cpu", "lora": {"rank": 2}},
        "tasks": {"train": [{"source": "shapes"}]},
    }
    runs = [train(small(tmp_path / name, how, **changes)) for name, how in (("native", NATIVE), ("process", PROCESS))]
    assert episodes_of(runs[1]) == episodes_of(runs[0])
    assert weights_of(runs[1]) == weights_of(runs[0])


def test_a_dead_engine_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not go on with steps in which every episode was aborted. tests/engines/test_process.py kills a real one."""

    async def lost(self: NativeEngine, request: Any, episodes: Any = None) -> Any:
        raise EngineLost("the engine process was killed by SIGKILL")

    monkeypatch.setattr(NativeEngine, "generate", lost)
    recipe: Recipe = small(tmp_path / "dead", NATIVE)
    with pytest.raises(EngineLost, match="SIGKILL"):
        train(recipe)

"""A warm start that reads recorded demonstrations is the one that plays them, to the bit; it resumes as exactly."""

from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
from safetensors.torch import load_file

import sensorium as sn
from sensorium.recipe.schema import Recipe
from sensorium.runs.metrics import read_metrics
from sensorium.trainer.run import train
from tests.recipes import SHAPES, parsed, quick

WALKS = {"source": "environments", "options": {"environment": "sokoban", "size": 6, "options": {"max_turns": 4}}}
LEARNED = ("policy/loss", "policy/grad_norm", "episodes/failed")


def recipe(folder: Path, **changes: Any) -> Recipe:
    warm = {"steps": 3, "prompts_per_step": 2, "optimizer": {"lr": 1e-3}} | changes.pop("warm_start", {})
    sections: dict[str, Any] = {
        "steps": 0,
        "model": {"path": "package:frozen_lake", "device": "cpu"},
        "tasks": {"train": [WALKS]},
        "rollout": {"max_turns": 4, "max_new_tokens": 12},
        "rewards": {"terms": [{"name": "environment"}]},
        "checkpoint": {"every": 1, "keep": 4},
    }
    return parsed(quick("warm", **sections | changes | {"warm_start": warm}), folder)


def learned(folder: Path) -> list[tuple[float, ...]]:
    return [tuple(row[name] for name in LEARNED) for row in read_metrics(folder / "metrics.jsonl")]


def same_weights(one: Path, other: Path, step: int = 3) -> bool:
    first, second = (load_file(run / f"checkpoints/step_{step:06d}/model.safetensors") for run in (one, other))
    return first.keys() == second.keys() and all((first[name] == second[name]).all() for name in first)


QUESTIONS = {
    "model": {"path": "package:shapes", "device": "cpu"},
    "tasks": {"train": [{"source": "shapes", "options": SHAPES["options"] | {"size": 6}}]},
    "rewards": {"terms": [{"name": "exact"}]},
}


AUGMENTED = QUESTIONS | {"tasks": QUESTIONS["tasks"] | {"augment": {"picture": {"crop": [0.7, 0.9]}}}}
POOLED = {"environments": {"pool": 1}}
WINDOWED = {"rollout": {"max_turns": 4, "max_new_tokens": 12, "window": 2}}


@pytest.mark.parametrize("changes", [{}, POOLED, WINDOWED, QUESTIONS, AUGMENTED])
def test_losses_and_weights_are_those_of_played_demonstrations(changes: dict[str, Any], tmp_path: Path) -> None:
    found = sn.record(recipe(tmp_path / "played", **changes), to=tmp_path / "shown", show=False)
    assert len(found) == 6
    train(recipe(tmp_path / "played", **changes))
    train(recipe(tmp_path / "read", **changes, warm_start={"demonstrations": str(found.folder)}))
    assert len(learned(tmp_path / "read")) == 3
    assert learned(tmp_path / "read") == learned(tmp_path / "played")
    assert same_weights(tmp_path / "read", tmp_path / "played")
    assert "Recorded demonstrations" in (tmp_path / "read/report.html").read_text()


def test_a_resumed_run_draws_the_next_demonstrations_also_of_a_second_epoch(tmp_path: Path) -> None:
    found = sn.record(recipe(tmp_path / "played"), to=tmp_path / "shown", limit=3, show=False)
    shown = {"demonstrations": str(found.folder)}
    train(recipe(tmp_path / "whole", warm_start=shown))
    train(recipe(tmp_path / "killed", warm_start=shown))
    for step in (2, 3):
        rmtree(tmp_path / f"killed/checkpoints/step_{step:06d}")
    train(recipe(tmp_path / "killed", warm_start=shown), resume=True)
    assert learned(tmp_path / "killed") == learned(tmp_path / "whole")
    assert same_weights(tmp_path / "killed", tmp_path / "whole")

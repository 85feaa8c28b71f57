"""The warm start is measured at its end, so that what RL gave is told apart from what the demonstrations gave."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from sensorium.recipe.plan import make_plan
from sensorium.recipe.schema import Recipe
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.run import train
from tests.recipes import HELD_OUT, SHAPES, parsed, quick

RECIPE = quick(
    "warmed",
    tasks={"train": [SHAPES], "evaluate": [HELD_OUT]},
    batch={"prompts_per_step": 4, "group_size": 3},
    warm_start={"steps": 2, "prompts_per_step": 2, "optimizer": {"lr": 1e-3}},
    evaluation={"every": 2, "at_start": True, "limit": 4},
)


def recipe(folder: Path, **changes: Any) -> Recipe:
    return parsed(RECIPE, folder, **changes)


@pytest.mark.parametrize(
    ("section", "steps"),
    [
        ({"every": 2, "at_start": True}, [0, 3, 4, 5]),
        ({"every": 0, "at_start": True}, [0, 3]),
        ({"every": 4, "at_start": False}, [3, 4, 5]),
        ({"every": 0, "at_start": False}, []),
    ],
)
def test_evaluations_fall_on_the_start_the_end_of_the_warm_start_and_on_steps_of_rl(
    section: dict[str, Any], steps: list[int], tmp_path: Path
) -> None:
    asked = recipe(tmp_path, warm_start={"steps": 3}, evaluation=section)
    assert [step for step in range(asked.total_steps + 1) if asked.evaluates_after(step)] == steps
    assert make_plan(asked).evaluations == len(steps)


def test_the_warm_start_is_evaluated_at_its_end_and_the_run_is_the_same_as_without(tmp_path: Path) -> None:
    train(recipe(tmp_path / "measured"))
    found = RunDirectory(tmp_path / "measured").summaries()
    assert [summary["step"] for summary in found] == [0, 2, 4]
    rows = read_metrics(tmp_path / "measured/metrics.jsonl")
    assert ["eval/accuracy" in row for row in rows] == [False, True, False, True]
    train(recipe(tmp_path / "plain", evaluation={}))
    measured, plain = (
        load_file(tmp_path / name / "checkpoints/step_000004/model.safetensors") for name in ("measured", "plain")
    )
    assert all((measured[name] == plain[name]).all() for name in measured)

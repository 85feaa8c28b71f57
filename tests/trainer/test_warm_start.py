"""The warm start is measured at its end, so that what RL gave is told apart from what the demonstrations gave."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from sensorium.recipe.plan import make_plan
from sensorium.recipe.schema import Recipe
from sensorium.report.watcher import Watcher
from sensorium.runs.metrics import Notice, read_metrics
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


@pytest.mark.parametrize(("budget", "key"), [({"max_turns": 1}, "max_turns"), ({"max_new_tokens": 1}, "max_new_tokens")])
def test_demonstrations_that_a_rollout_could_not_sample_are_reported(
    budget: dict[str, int], key: str, tmp_path: Path
) -> None:
    boxes = {"source": "environments", "options": {"environment": "sokoban", "size": 4, "options": {"max_turns": 5}}}
    section = {"max_turns": 5, "max_new_tokens": 99, "max_context_tokens": 4096} | budget
    found: list[str] = []

    class Doctor(Watcher):
        def diagnosed(self, notice: Notice) -> None:
            found.append(notice.text)

    short = recipe(
        tmp_path, tasks={"train": [boxes]}, rollout=section, evaluation={}, rewards={"terms": [{"name": "environment"}]}
    )
    train(short, watchers=[Doctor()])
    assert any(f"rollout.{key} 1" in text for text in found), found


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

"""Evaluation during a run: on the held-out tasks and no others, when it is due, and on record."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sensorium.report.watcher import Watcher
from sensorium.runs.episodes import read_episodes
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.checkpoint import Best, Checkpoints
from sensorium.trainer.run import train

from .small import small


def shown(path: Path) -> set[str]:
    """What the episodes of a file were asked."""
    return {message.text for _, task, _ in read_episodes(path) for message in task.messages}


def test_a_run_is_evaluated_on_the_held_out_tasks_and_trained_on_the_others(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"{n} - {n}?"}], "answer": "0"} for n in range(3)]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = {
        "train": [{"source": "jsonl", "options": {"path": str(tmp_path / "rows.jsonl")}}],
        "evaluate": [{"source": "jsonl", "options": {"path": str(tmp_path / "held_out.jsonl")}}],
    }
    directory = RunDirectory(
        train(small(tmp_path / "run", tasks=tasks, steps=2, evaluation={"every": 1, "at_start": True}))
    )
    for step in (0, 1, 2):
        assert shown(directory.eval_episodes_of(step)) == {"0 - 0?", "1 - 1?", "2 - 2?"}
    for step in (1, 2):
        asked = shown(directory.episodes_of(step))
        assert asked
        assert all("+" in text for text in asked)


def test_of_equal_evaluations_the_first_stays_the_best(tmp_path: Path) -> None:
    """An update that gained nothing is no better, and a checkpoint that others were told of stays in place."""
    tasks = {
        side: [{"source": "jsonl", "options": {"path": str(tmp_path / "rows.jsonl")}}] for side in ("train", "evaluate")
    }
    checkpoint = {"every": 1, "keep": 1, "best": "eval/reward"}
    recipe = small(tmp_path / "run", tasks=tasks, evaluation={"every": 1, "limit": 2}, checkpoint=checkpoint)
    train(recipe)
    best = Checkpoints(RunDirectory(tmp_path / "run").checkpoints, keep=1).best()
    assert best == Best(1, 0.0)


class Order(Watcher):
    """The numbers of steps as they end, and "best" wherever a note names checkpoint.best."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def noted(self, text: str) -> None:
        self.events += ["best"] * ("checkpoint.best" in text)

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        self.events.append(step)


@pytest.mark.parametrize(("at_start", "order"), [(True, ["best", 1, 2]), (False, [1, "best", 2])])
def test_rewards_without_accuracy_are_reported_with_the_first_and_not_at_the_first_evaluation(
    at_start: bool, order: list[Any], tmp_path: Path
) -> None:
    rows = [{"source": "jsonl", "options": {"path": str(tmp_path / "rows.jsonl")}}]
    evaluation = {"every": 2, "limit": 2, "at_start": at_start}
    heard = Order()
    train(
        small(tmp_path / "run", tasks={"train": rows, "evaluate": rows}, steps=2, evaluation=evaluation), watchers=[heard]
    )
    assert heard.events == order
    assert Checkpoints(RunDirectory(tmp_path / "run").checkpoints, keep=1).best() == Best(2, 0.0, "eval/reward")

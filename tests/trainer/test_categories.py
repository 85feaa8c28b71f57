"""Success by kind of task: named by the environment, measured in training and evaluation, bounded, and exact on resume."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sensorium.data.media_store import MediaStore
from sensorium.envs.protocol import Observation, StepResult, checked_reset
from sensorium.envs.question import RowsEnvironment
from sensorium.envs.remote.isolated import IsolatedEnvironment
from sensorium.envs.remote.wire import reset_from_json, reset_to_json
from sensorium.evaluation.summary import Sample, summarize_samples
from sensorium.recipe.checks import wrong_metric
from sensorium.runs.episodes import read_groups
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.run import train
from sensorium.trainer.step_metrics import CategoryAccuracy
from sensorium.vocabulary import Episode, Group, Score, Status, Task, system, user
from sensorium.vocabulary.episode import category_of
from sensorium.vocabulary.errors import EnvironmentFailure
from sensorium.vocabulary.metric_names import MOST_CATEGORIES
from tests.trainer.small import small
from tests.trainer.test_going_on import assert_equal

HERE = "tests.trainer.test_categories"


class Buttons:
    """One turn; the kind of a start is what its seed is called, and seeds of the first kind always succeed."""

    instant = True
    kinds = ("click", "drag", "type")

    def __init__(self, store: MediaStore) -> None:
        self.seed = 0

    @classmethod
    def content_key(cls, seed: int, options: Any) -> str:
        return str(seed)

    def reset(self, seed: int) -> Any:
        self.seed = seed
        return (system("Press."),), Observation((user(f"button {seed % 10}"),), category=self.kinds[seed % 3])

    def step(self, response: str) -> StepResult:
        right = self.seed % 3 == 0
        return StepResult(None, float(right), done=True, success=right, info={"valid": right})

    def close(self) -> None:
        pass


def buttons(folder: Path, *overrides: str) -> Any:
    tasks = [{"source": "environments", "options": {"environment": f"{HERE}:Buttons", "size": 60}}]
    held_out = [{"source": "environments", "options": {"environment": f"{HERE}:Buttons", "size": 20, "split": "test"}}]
    rewards = {"terms": [{"name": "environment"}, {"name": "tests.trainer.small:ByParity"}]}
    return small(
        folder, *overrides, tasks={"train": tasks, "evaluate": held_out}, rewards=rewards,
        batch={"prompts_per_step": 6, "group_size": 2}, evaluation={"every": 2},
    )  # fmt: skip


def test_a_run_measures_success_by_the_kind_that_the_environment_names(tmp_path: Path) -> None:
    train(buttons(tmp_path / "whole" / "run", "steps=4"))
    train(buttons(tmp_path / "broken" / "run", "steps=2"))
    train(buttons(tmp_path / "broken" / "run", "steps=4"), resume=True)
    directory = RunDirectory(tmp_path / "whole" / "run")
    rows = read_metrics(directory.metrics)
    for row in rows:
        groups = read_groups(directory.episodes_of(int(row["step"])))
        for kind in Buttons.kinds:
            met = [group for group in groups if category_of(group.task, *group.episodes) == kind]
            assert row.get(f"accuracy/{kind}") == ((1.0 if kind == "click" else 0.0) if met else None)
        invalid = [turn.info["valid"] is False for group in groups for e in group.episodes for turn in e.turns]
        assert row["environment/invalid_share"] == pytest.approx(sum(invalid) / len(invalid))
    assert (rows[-1]["eval/accuracy/click"], rows[-1]["eval/accuracy/drag"]) == (1.0, 0.0)
    (summary,) = [one for one in directory.summaries() if one["step"] == 4]
    assert summary["categories"]["click"]["interval"][1] == 1.0
    assert sum(part["tasks"] for part in summary["categories"].values()) == 20
    assert [row.get("accuracy/type") for row in rows] == [
        row.get("accuracy/type") for row in read_metrics(tmp_path / "broken" / "run" / "metrics.jsonl")
    ]
    assert_equal(directory.path, tmp_path / "broken" / "run", 4)


def group(name: str, *right: bool, named: str = "") -> Group:
    episodes = tuple(
        Episode(f"{name}/{i}", name, name, i, (), (), Status.FINISHED, scores=(Score("s", float(one), correct=one),),
                info={"category": named} if named else {})
        for i, one in enumerate(right)
    )  # fmt: skip
    return Group(name, Task(name, metadata={"category": name}), episodes)


def test_kinds_beyond_the_bound_count_together_and_a_single_kind_has_no_metric() -> None:
    found = CategoryAccuracy()
    assert found.row([group("a", True), group("a", False)]) == {}
    assert found.row([group("b", False, named="a")]) == {}, "the environment's name counts, not the row's"
    level = replace(group("a", True), task=Task("a", metadata={"category": "a", "level": 1}))
    assert found.row([level]) == {"accuracy/a": 1.0}
    assert found.row([group("a", True, False), group("b", False)]) == {"accuracy/a": 0.5, "accuracy/b": 0.0}
    names = [f"k{i}" for i in range(MOST_CATEGORIES + 8)]
    row = found.row([group(name, i % 2 == 0) for i, name in enumerate(names)])
    assert len(row) == MOST_CATEGORIES - 2 + 1
    assert row["accuracy/other"] == 0.5
    again = CategoryAccuracy()
    again.names = list(found.names)
    assert again.row([group(names[-1], True), group("a", False)]) == {"accuracy/a": 0.0, "accuracy/other": 1.0}
    assert group("x", True).episodes[0].correct is True


def test_an_evaluation_bounds_its_table_too() -> None:
    samples = [
        Sample(f"t{i}", i, 0, f"k{i % 200:03}" if i < 200 else "k000", Status.FINISHED, i % 2 == 0, 1.0) for i in range(210)
    ]
    categories = summarize_samples(samples, "eval")["categories"]
    assert len(categories) == MOST_CATEGORIES
    assert categories["k000"]["tasks"] == 11
    assert sum(part["tasks"] for part in categories.values()) == 210
    lost = Sample("t", 0, 0, "environment", Status.FAILED, None, None)
    played = Sample("t", 0, 1, "click", Status.FINISHED, True, 1.0)
    assert list(summarize_samples([lost, played], "eval")["categories"]) == ["click"]


def test_a_kind_travels_from_rows_and_through_other_processes(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    row = {"messages": [{"role": "user", "content": "2 + 2?"}], "answer": "4", "metadata": {"category": "sums"}}
    rows.write_text(json.dumps(row) + "\n")
    options = {"source": "jsonl", "options": {"path": str(rows)}}
    _, first = RowsEnvironment(MediaStore(), **options).reset(0)
    assert first.category == "sums"
    assert reset_from_json(json.loads(json.dumps(reset_to_json((), first))))[1] == first
    assert "category" not in reset_to_json((), Observation((user("x"),)))
    isolated = IsolatedEnvironment(MediaStore(), "rows", options)
    assert isolated.reset(4)[1].category == "sums"
    isolated.close()
    with pytest.raises(EnvironmentFailure, match="category"):
        checked_reset(((), Observation((user("x"),), category="k" * 81)), "x")
    with pytest.raises(EnvironmentFailure):
        checked_reset(((), Observation((user("x"),), category=3)), "x")  # type: ignore[arg-type]


def test_a_kinds_success_may_choose_the_checkpoint(tmp_path: Path) -> None:
    recipe = buttons(tmp_path / "run")
    assert wrong_metric(recipe, "accuracy/drag") == wrong_metric(recipe, "eval/accuracy/drag") == ""
    assert wrong_metric(recipe, "acuracy/drag")

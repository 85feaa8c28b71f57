"""The trainer asks its planner for tasks, tells it what became of them, and keeps its state in the checkpoint."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sensorium.data.augmentation import augmented_task
from sensorium.data.mixture import TaskStream
from sensorium.data.planner import GroupOutcome, MixturePlanner, PlannedTasks
from sensorium.recipe.load import parse_recipe
from sensorium.recipe.schema import Recipe
from sensorium.runs.checkpoint_layout import TRAINER_STATE, digests_of
from sensorium.runs.episodes import read_groups
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.run import open_trainer, train
from sensorium.vocabulary.content import Message, Text
from sensorium.vocabulary.episode import Score
from sensorium.vocabulary.errors import CheckpointError, RecipeError, TaskError
from sensorium.vocabulary.task import Task
from tests.trainer.small import small
from tests.trainer.test_going_on import assert_equal

HERE = "tests.trainer.test_planning"


class ByTask:
    """One of two attempts is right, or both, depending on the task."""

    name = "by_task"
    instant = True

    def score(self, task: Task, episode: Any) -> tuple[Score, ...]:
        right = episode.index <= ord(task.id[-1]) % 2
        return (Score(self.name, float(right), correct=right),)


class History:
    """Each task shows what was answered to the one before: causal history."""

    observes = True

    def __init__(self, stream: TaskStream, first: str = "Begin.") -> None:
        self.told, self.count = first, 0

    def draw(self, count: int) -> PlannedTasks:
        self.count += count
        message = Message("user", (Text(f"Before: {self.told}"),))
        return PlannedTasks(tuple(Task(f"t{self.count}.{i}", (message,)) for i in range(count)))

    def observe(self, groups: Sequence[GroupOutcome]) -> None:
        self.told = " / ".join(f"{one.task_id} {one.rewards} {one.trained} {one.responses[0]!r}" for one in groups)

    def state_dict(self) -> dict[str, Any]:
        return {"told": self.told, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.told, self.count = state["told"], state["count"]


class Unsavable(MixturePlanner):
    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "rule": {"of": object()}}


class Short(MixturePlanner):
    def draw(self, count: int) -> PlannedTasks:
        return PlannedTasks(super().draw(count).tasks[1:])


class Broken(MixturePlanner):
    observes = True

    def observe(self, groups: Sequence[GroupOutcome]) -> None:
        raise KeyError("no such thing")


def planned(folder: Path, planner: str, *overrides: str, **changes: Any) -> Recipe:
    rewards = {"terms": [{"name": f"{HERE}:ByTask"}]}
    return small(folder, f"tasks.planner.name={planner}", *overrides, **({"rewards": rewards} | changes))


def test_what_comes_next_may_hold_what_was_answered_before(tmp_path: Path) -> None:
    train(planned(tmp_path / "run", f"{HERE}:History"))
    directory = RunDirectory(tmp_path / "run")
    for step in (2, 3):
        before, now = read_groups(directory.episodes_of(step - 1)), read_groups(directory.episodes_of(step))
        told = now[0].task.messages[0].content[0]
        assert isinstance(told, Text)
        expected = [
            f"{group.task.id} {tuple(e.reward for e in group.episodes)} True {group.episodes[0].response!r}"
            for group in before
        ]
        assert told.text == "Before: " + " / ".join(expected), "in the order in which the tasks were drawn"


@pytest.mark.parametrize("planner", ["success_curriculum", f"{HERE}:History", "mixture"])
def test_a_resumed_run_draws_and_computes_what_the_uninterrupted_one_does(planner: str, tmp_path: Path) -> None:
    train(planned(tmp_path / "whole" / "run", planner, "steps=4"))
    train(planned(tmp_path / "broken" / "run", planner, "steps=2"))
    train(planned(tmp_path / "broken" / "run", planner, "steps=4"), resume=True)
    whole, broken = (RunDirectory(tmp_path / name / "run") for name in ("whole", "broken"))
    drawn = []
    for step in range(1, 5):
        groups, others = read_groups(whole.episodes_of(step)), read_groups(broken.episodes_of(step))
        assert [g.episodes for g in groups] == [g.episodes for g in others]
        drawn += [group.task.id for group in groups]
    assert_equal(whole.path, broken.path, 4)
    if planner == "success_curriculum":
        assert len(set(drawn)) < len(drawn), "the seed has tasks that are drawn again"


def test_a_curriculum_of_environment_options_rises_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    source = {"environment": "frozen_lake", "size": 3, "options": {"view": "text", "max_turns": 2, "p": 0.9}}
    levels = [{"size": 3}, {"size": 4}, {"max_turns": 1}]
    changes: dict[str, Any] = {
        "tasks": {
            "train": [{"source": "environments", "options": source | {"levels": levels}}],
            "planner": {"name": "level_curriculum", "options": {"rise": 0.5, "fall": 0.1, "groups": 4}},
        },
        "rewards": {"terms": [{"name": "tests.trainer.small:ByParity"}]},
    }
    train(small(tmp_path / "whole" / "run", "steps=6", **changes))
    train(small(tmp_path / "broken" / "run", "steps=3", **changes))
    train(small(tmp_path / "broken" / "run", "steps=6", **changes), resume=True)
    whole, broken = (RunDirectory(tmp_path / name / "run") for name in ("whole", "broken"))
    assert_equal(whole.path, broken.path, 6)
    assert [row["planner/level"] for row in read_metrics(whole.metrics)] == [1, 1, 2, 2, 3, 3]
    assert {row["planner/success"] for row in read_metrics(broken.metrics)} == {0.5}
    assert "accuracy/size=3" not in read_metrics(whole.metrics)[0], "no term of this recipe says right or wrong"
    for step in range(1, 7):
        drawn = {group.task.metadata["category"] for group in read_groups(whole.episodes_of(step))}
        assert drawn == {["size=3", "size=4", "max_turns=1"][(step - 1) // 2]}
    state = torch.load(broken.checkpoints / "step_000006" / TRAINER_STATE, weights_only=True)
    assert state["tasks"]["state"]["level"] == 2


class Measuring(MixturePlanner):
    observes = True

    def metrics(self) -> dict[str, float]:
        return {"position": self.position}


def test_what_a_planner_of_ones_own_measures_is_a_metric(tmp_path: Path) -> None:
    train(planned(tmp_path / "run", f"{HERE}:Measuring", "steps=2"))
    assert [row["planner/position"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [2, 4]


def test_nothing_is_read_ahead_of_a_planner_that_observes(tmp_path: Path) -> None:
    trainers = {
        name: open_trainer(planned(tmp_path / f"{i}" / "run", name), RunDirectory(tmp_path / f"{i}" / "run").create())
        for i, name in enumerate(["mixture", "success_curriculum"])
    }
    for name, trainer in trainers.items():
        asyncio.run(trainer.advance())
        ahead = trainer.loader._ahead
        assert (ahead is None) == (name == "success_curriculum")
        trainer.close()


def test_a_draw_of_another_size_than_what_was_read_ahead_begins_where_it_would_have(tmp_path: Path) -> None:
    trainer = open_trainer(planned(tmp_path / "run", "mixture"), RunDirectory(tmp_path / "run").create())

    async def draw() -> list[str]:
        trainer.loader.look_ahead(3)
        state = trainer.loader.state_dict()
        assert state == {"planner": "mixture", "drawn": 0, "state": {"position": 0}}
        return [task.id for task in (await trainer.loader.draw(5)).tasks]

    planner = trainer.loader.planner
    assert isinstance(planner, MixturePlanner)
    assert asyncio.run(draw()) == [task.id for task in planner.stream.draw(0, 5).tasks]
    assert trainer.loader.state_dict() == {"planner": "mixture", "drawn": 5, "state": {"position": 5}}
    draws = asyncio.run(trainer.loader.draw_each(3))
    assert [draw.before["drawn"] for draw in draws] == [5, 6, 7]
    for draw in draws[::-1]:  # each can be drawn again by itself, in any order
        trainer.loader.load_state_dict(draw.before)
        assert asyncio.run(trainer.loader.draw_each(1))[0].task == draw.task
    trainer.close()


def test_tasks_are_augmented_by_their_number_in_the_run_however_they_are_drawn(tmp_path: Path) -> None:
    shapes = {"train": [{"source": "shapes", "options": {"size": 4}}], "augment": {"picture": {"crop": [0.5, 0.9]}}}
    recipe = planned(tmp_path / "run", "mixture", tasks=shapes, model={"path": "package:shapes", "device": "cpu"})
    trainer = open_trainer(recipe, RunDirectory(tmp_path / "run").create())
    loader, section = trainer.loader, recipe.tasks.augment
    assert section is not None
    assert isinstance(loader.planner, MixturePlanner)
    expected = [
        augmented_task(task, section, recipe.seed, row) for row, task in enumerate(loader.planner.stream.draw(0, 8).tasks)
    ]
    assert len({media.key for task in expected for media in task.messages[0].media}) == 8, "four rows, drawn twice"

    async def draw() -> list[Task]:
        loader.look_ahead(2)  # which is dropped, as another number is drawn
        drawn = [*(await loader.draw(3)).tasks]
        loader.look_ahead(2)
        drawn += (await loader.draw(2)).tasks
        return drawn + [task for one in await loader.draw_each(3) if (task := one.task) is not None]

    assert asyncio.run(draw()) == expected
    trainer.close()


def test_a_checkpoint_from_before_there_were_planners_goes_on(tmp_path: Path) -> None:
    train(small(tmp_path / "whole" / "run"))
    train(small(tmp_path / "old" / "run", "steps=2"))
    rewritten(tmp_path / "old" / "run")
    train(small(tmp_path / "old" / "run"), resume=True)
    assert_equal(tmp_path / "whole" / "run", tmp_path / "old" / "run", 3)


def test_a_checkpoint_of_another_planner_is_refused(tmp_path: Path) -> None:
    train(small(tmp_path / "run", "steps=1"))
    trainer = open_trainer(planned(tmp_path / "other", "success_curriculum"), RunDirectory(tmp_path / "other").create())
    state = torch.load(tmp_path / "run/checkpoints/step_000001" / TRAINER_STATE, weights_only=True)
    with pytest.raises(CheckpointError, match="drawn by the planner 'mixture' and the recipe names 'success_curriculum'"):
        trainer.restore(state)
    trainer.close()


@pytest.mark.parametrize(
    ("planner", "said"),
    [
        ("Unsavable", r"state_dict\(\)\.rule\.of is object"),
        ("Short", r"draw\(2\) returned 1 tasks"),
        ("Broken", r"observe\(\) failed: KeyError: 'no such thing'"),
    ],
)
def test_a_planner_that_goes_wrong_is_said_in_one_paragraph(planner: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=said):
        train(planned(tmp_path / "run", f"{HERE}:{planner}"))


def test_options_of_a_planner_are_checked_with_the_recipe() -> None:
    text = "name: x\nsteps: 1\nmodel: {path: 'tiny:qwen2'}\nrewards: {terms: [{name: format}]}\n"
    text += "tasks: {train: [{source: shapes}], planner: {name: success_curriculum, options: {revisits: 0.1}}}\n"
    with pytest.raises(RecipeError, match="no option 'revisits'; did you mean 'revisit'"):
        parse_recipe(text, "test", [])


def rewritten(run: Path) -> None:
    """Write the last checkpoint as it was before there were planners."""
    folder = run / "checkpoints/step_000002"
    state = torch.load(folder / TRAINER_STATE, weights_only=True)
    tasks = state.pop("tasks")
    torch.save(state | {"position": tasks["state"]["position"]}, folder / TRAINER_STATE)
    marker = folder / "COMPLETE"
    listed = json.loads(marker.read_text())
    path = folder / TRAINER_STATE
    listed["files"][TRAINER_STATE] = {"size": path.stat().st_size, "digest": digests_of([path])[path]}
    marker.write_text(json.dumps(listed))

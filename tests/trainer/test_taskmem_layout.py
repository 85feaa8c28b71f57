"""A run in TaskMem's layout: what was remembered, what was paid for it."""

import shutil
from pathlib import Path

import pytest

from sensorium.recipe.load import load_recipe
from sensorium.record.run_directory import RunDirectory
from sensorium.trainer.taskmem_layout import TaskMemLayout, latest_history, step_logs
from sensorium.vocabulary.content import user
from sensorium.vocabulary.episode import Group
from sensorium.vocabulary.errors import RecipeError
from sensorium.vocabulary.score import Score
from sensorium.vocabulary.task import Task
from tests.rewards.conftest import MakeEpisode, episode_of  # noqa: F401


def test_the_latest_memories_of_each_video() -> None:
    state = {"history": [[1, "a", [[0, "new"]]], [0, "a", [[0, "old"], [1, "old"]]], [0, "b", [[0, None], [1, "x"]]]]}
    assert latest_history(state) == {"a": {0: "new", 1: "old"}, "b": {1: "x"}}


def test_the_log_of_a_step_has_every_part(episode_of: MakeEpisode) -> None:  # noqa: F811
    task = Task("v*3", (user("so far: x"),), metadata={"video_id": "v", "type": "episodic_on_policy"})
    episode = episode_of("hm").with_scores((Score("m/correct", 0.5), Score("m/rank", 1.0, weight=0.0)))
    assert step_logs(7, [Group("g", task, (episode,))]) == {
        "v": {
            "id": "v*3",
            "type": "episodic_on_policy",
            "global_step": 7,
            "num_items": 1,
            "items": [{"input": "so far: x", "response": "hm", "reward": 0.5, "m/correct": 0.5, "m/rank": 1.0}],
        }
    }


def test_links_are_those_of_the_checkpoints_that_are_there(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path).create()
    layout = TaskMemLayout(directory, tmp_path)
    for step in (1, 2, 3):
        directory.checkpoint_of(step).mkdir()
        (directory.checkpoint_of(step) / "COMPLETE").write_text('{"files": {}}')
        if step == 3:
            shutil.rmtree(directory.checkpoint_of(1))
        layout.link_checkpoints()
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == ["global_step_2", "global_step_3"]
    assert all(path.is_symlink() and (path / "COMPLETE").exists() for path in tmp_path.glob("global_step_*"))


def test_a_layout_without_memories_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"logging\.layout"):
        load_recipe("shapes", ["logging.layout=taskmem"])

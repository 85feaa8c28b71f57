"""A run in TaskMem's layout: what was remembered, what was paid for it."""

import json
import shutil
from pathlib import Path

import pytest

from sensorium.recipe.load import load_recipe
from sensorium.runs.run_directory import RunDirectory
from sensorium.systems.taskmem.layout import TaskMemLayout, file_name, latest_history, step_logs
from sensorium.systems.taskmem.memory_rows import LONGEST_NAME
from sensorium.vocabulary.content import user
from sensorium.vocabulary.episode import Group, Score
from sensorium.vocabulary.errors import RecipeError
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


HOSTILE = [
    "../outside", "/outside",
    "..", ".", "a/b", "a%2Fb", "a\\b", "", "\0", "a\nb", "\ud800", "v" * 300, "v" * 301, "字" * 100
]  # fmt: skip


def test_every_video_has_a_file_of_its_own_in_the_run_whatever_it_is_called(
    tmp_path: Path,
    episode_of: MakeEpisode,  # noqa: F811
) -> None:
    run = tmp_path / "somewhere" / "run"
    layout = TaskMemLayout(RunDirectory(run).create(), run)
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    tasks = [Task(f"t{i}", (user("?"),), metadata={"video_id": video}) for i, video in enumerate(HOSTILE)]
    layout.write_step(1, [Group(task.id, task, (episode_of("hm"),)) for task in tasks])
    state = {"history": [[0, video, [[0, f"memory {i}"]]] for i, video in enumerate(HOSTILE)]}
    layout.write_history(state)
    written = {path for path in tmp_path.rglob("*") if path.is_file()} - before
    assert {path.parent for path in written} == {run / "1", run / "history"}
    assert len(written) == 2 * len(HOSTILE)
    layout.begin(1, {"history": state["history"][1:]})
    left = [json.loads(path.read_text())["0"] for path in (run / "history").iterdir()]
    assert sorted(left) == sorted(f"memory {i}" for i in range(1, len(HOSTILE))), "the first is not known then"


@pytest.mark.parametrize("plain", ["v1", "My film (2) – 100%.mp4", ".hidden", "字幕", "a" * LONGEST_NAME])
def test_a_plain_name_is_its_file_s_name(plain: str) -> None:
    assert file_name(plain) == f"{plain}.json"


def test_a_layout_without_memories_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"logging\.layout"):
        load_recipe("shapes", ["logging.layout=taskmem"])

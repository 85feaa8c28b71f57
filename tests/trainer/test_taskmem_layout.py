"""A run in TaskMem's layout: what was remembered, what was paid for it."""

from sensorium.trainer.taskmem_layout import latest_history, step_logs
from sensorium.vocabulary.content import user
from sensorium.vocabulary.episode import Group
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
            "items": [{"input": "so far: x", "response": "hm", "reward": 0.5, "m/correct": 0.5, "m/rank": 1.0}],
        }
    }

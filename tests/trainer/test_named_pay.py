"""What an environment pays by name keeps its name: turn, scores, metrics, episodes file, evaluation and report."""

from pathlib import Path
from typing import Any

import pytest

from sensorium.data.media_store import MediaStore
from sensorium.envs.protocol import Observation, StepResult
from sensorium.report.page import write_report
from sensorium.runs.episodes import read_episodes
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.run import train
from sensorium.vocabulary import Message, system, user
from tests.recipes import parsed, quick

HERE = "tests.trainer.test_named_pay"
GOAL = {0: 0.25, 1: 0.75}
"""What each of the two turns pays for the goal."""


class Paying:
    """Two turns. Each pays for the goal, and for the length of the response as ``brief``."""

    instant = True

    def __init__(self, store: MediaStore) -> None:
        self.turn = 0

    @classmethod
    def content_key(cls, seed: int, options: dict[str, Any]) -> str:
        return str(seed)

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        return (system("Reach it."),), Observation((user("0"),))

    def step(self, response: str) -> StepResult:
        pay = {"goal": GOAL[self.turn], "brief": -float(len(response))}
        self.turn += 1
        done = self.turn == len(GOAL)
        return StepResult(None if done else Observation((user("1"),)), reward=pay, done=done, success=done or None)

    def demonstrate(self) -> str:
        return "go"

    def close(self) -> None: ...


@pytest.mark.parametrize("per_turn", [False, True])
def test_a_part_is_followed_from_the_environment_to_the_report(per_turn: bool, tmp_path: Path) -> None:
    worlds = {"environment": f"{HERE}:Paying", "size": 8}
    training = [{"source": "environments", "options": worlds}]
    held_out = [{"source": "environments", "options": worlds | {"split": "test", "size": 2}}]
    recipe = quick(
        "paying",
        steps=1,
        model={"path": "tiny:qwen2_5_vl"},
        tasks={"train": training, "evaluate": held_out},
        batch={"prompts_per_step": 2, "group_size": 2},
        rollout={"max_new_tokens": 3, "max_turns": 2},
        rewards={"terms": [{"name": "environment", "weight": 2.0, "options": {"per_turn": per_turn}}]},
        evaluation={"every": 1, "at_start": False, "samples": 1},
    )
    train(parsed(recipe, tmp_path / "run"))
    directory = RunDirectory(tmp_path / "run")

    (step, _, episode), *_ = read_episodes(directory.episodes_of(1))
    assert step == 1
    assert [turn.parts["goal"] for turn in episode.turns] == list(GOAL.values()), "kept by turn"
    assert [turn.reward for turn in episode.turns] == [sum(turn.parts.values()) for turn in episode.turns]
    goal = [(s.value, s.weight, s.turn) for s in episode.scores if s.name == "environment/goal"]
    assert goal == ([(0.25, 2.0, 0), (0.75, 2.0, 1)] if per_turn else [(1.0, 2.0, None)])
    brief = sum(turn.parts["brief"] for turn in episode.turns)
    assert episode.reward == pytest.approx(2.0 * (1.0 + brief))
    assert episode.correct is True
    assert episode.head == (system("Reach it."),)

    (row,) = read_metrics(directory.metrics)
    assert row["reward/environment/goal"] == 1.0, "what an episode was paid, turn by turn or at once"
    assert row["reward/environment"] == pytest.approx(row["reward/environment/goal"] + row["reward/environment/brief"])
    assert row["reward/environment"] == pytest.approx(row["reward/mean"] / 2.0), "and in all"
    assert row["missing/environment/goal"] == 0
    assert row["eval/reward/environment/goal"] == 1.0

    page = write_report(directory.path).read_text()
    assert "environment/goal" in page
    assert "goal +0.75" in page

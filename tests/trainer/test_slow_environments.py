"""Environments that others wait for: ``rollout.schedule: auto`` is eager after the first step, and a resumed run too."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sensorium.envs.protocol import Observation, StepResult
from sensorium.recipe.schema import Recipe
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer import loop
from sensorium.trainer.loop import Trainer
from sensorium.trainer.run import open_trainer, train
from sensorium.vocabulary import Message, user

from .small import small


class Threaded:
    """Two turns, each in a thread."""

    instant = False

    def __init__(self, store: Any = None) -> None:
        self.turn = 0

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        return (), Observation((user("what?"),))

    def step(self, response: str) -> StepResult:
        self.turn += 1
        return StepResult(Observation((user("and now?"),)), float(len(response) % 3), done=self.turn == 2)

    def close(self) -> None:
        pass


def played(folder: Path, *overrides: str, **rollout: Any) -> Recipe:
    shown = {"environment": "tests.trainer.test_slow_environments:Threaded", "size": 8, "split_by": "seed"}
    sections = {
        "tasks": {"train": [{"source": "environments", "options": shown}]},
        "rollout": {"max_new_tokens": 3, "max_turns": 2} | rollout,
        "rewards": {"terms": [{"name": "environment"}]},
    }
    return small(folder, *overrides, **sections)


@contextmanager
def resumed(recipe: Recipe) -> Iterator[Trainer]:
    trainer = open_trainer(recipe, RunDirectory(recipe.directory), resume=True)
    try:
        yield trainer
    finally:
        trainer.close()


@pytest.fixture
def any_wait_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "SLOW_CALL_S", 0.0)
    monkeypatch.setattr(loop, "SLOW_SHARE", 0.0)


@pytest.mark.parametrize("schedule", ["auto", "lockstep"])
@pytest.mark.usefixtures("any_wait_is_slow")
def test_auto_is_eager_after_the_first_step_and_stays_so(
    schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = played(tmp_path / "run", schedule=schedule)
    run = train(recipe)
    rows = read_metrics(run / "metrics.jsonl")
    assert len(rows) == 3
    assert all(0 < row["time/environments_busy"] <= 1 for row in rows)
    monkeypatch.undo()  # the choice is the run's, not made again
    with resumed(recipe) as trainer:
        assert trainer.session.engine.capabilities.lockstep == (schedule == "lockstep")
        assert trainer.session.engine.capabilities.deterministic == (schedule == "lockstep")


def test_environments_that_answer_at_once_change_nothing(tmp_path: Path) -> None:
    recipe = played(tmp_path / "run")
    train(recipe)
    with resumed(recipe) as trainer:
        assert trainer.session.engine.capabilities.lockstep


@pytest.mark.usefixtures("any_wait_is_slow")
def test_a_resumed_run_may_wait_for_slow_environments_again(tmp_path: Path) -> None:
    train(played(tmp_path / "run"))
    with resumed(played(tmp_path / "run", schedule="lockstep")) as trainer:
        assert trainer.session.engine.capabilities.lockstep

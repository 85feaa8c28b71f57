"""Environments that others wait for: ``rollout.schedule: auto`` is eager after the first step, and a resumed run too.

Then engine and update take turns, and one_step_off plays while it updates.
"""

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from sensorium.assembly.local_learner import LocalLearner
from sensorium.cluster.event_loop import run_async
from sensorium.cluster.pool import WorkerPool
from sensorium.engines.protocol import Request, Sampling
from sensorium.envs.protocol import Observation, StepResult
from sensorium.recipe.schema import Recipe
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer import loop, schedules
from sensorium.trainer.loop import Trainer
from sensorium.trainer.run import open_trainer, train
from sensorium.trainer.run_claim import begin
from sensorium.trainer.step_metrics import environments_busy
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


class Patient(Threaded):
    """After the first step's episodes every call waits until an update has begun."""

    calls, free, begun = 0, 8, threading.Event()

    def step(self, response: str) -> StepResult:
        type(self).calls += 1
        if self.calls > self.free and not self.begun.wait(5.0):
            raise RuntimeError("no update began while it was played")
        return super().step(response)


def played(folder: Path, *overrides: str, shows: str = "Threaded", **rollout: Any) -> Recipe:
    shown = {"environment": f"tests.trainer.test_slow_environments:{shows}", "size": 8, "split_by": "seed"}
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
    monkeypatch.setattr(schedules, "SLOW_CALL_S", 0.0)


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


@pytest.mark.usefixtures("any_wait_is_slow")
def test_one_step_off_plays_the_next_step_while_it_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = LocalLearner.step

    def step(*given: Any) -> dict[str, float]:
        Patient.begun.set()
        return stepped(*given)

    monkeypatch.setattr(LocalLearner, "step", step)
    overrides = "schedule=one_step_off", "algorithm.correction.weights=token", "checkpoint.every=3"
    rows = read_metrics(train(played(tmp_path / "run", *overrides, shows="Patient")) / "metrics.jsonl")
    assert [row["episodes/failed"] for row in rows] == [0, 0, 0]


def ledgered(run: Path) -> list[tuple[int, str, str]]:
    """Step, id and task of every episode in a run's ledger."""
    with closing(sqlite3.connect(run / "ledger.sqlite")) as ledger:
        return ledger.execute("SELECT step, id, task_id FROM episodes ORDER BY step, id").fetchall()


@pytest.mark.usefixtures("any_wait_is_slow")
def test_a_run_left_while_the_next_step_is_played_resumes_with_an_exact_ledger(tmp_path: Path) -> None:
    overrides = "schedule=one_step_off", "algorithm.correction.weights=token", "checkpoint.every=2", "steps=5"
    train(played(tmp_path / "whole", *overrides))
    recipe = played(tmp_path / "left", *overrides)
    begin(recipe, RunDirectory(recipe.directory))
    trainer = open_trainer(recipe, RunDirectory(recipe.directory))

    async def three_steps() -> None:
        for _ in range(3):
            await trainer.advance()
        assert trainer.schedule.streaming  # the fourth step is being played

    try:
        run_async(three_steps())
    finally:
        trainer.close()
    train(recipe, resume=True)
    assert ledgered(tmp_path / "left") == ledgered(tmp_path / "whole")
    assert [row["step"] for row in read_metrics(tmp_path / "left/metrics.jsonl")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("turns", [True, False])
def test_the_engine_answers_between_the_micro_batches_of_an_update(turns: bool, tmp_path: Path) -> None:
    recipe = played(tmp_path / "run")
    trainer = open_trainer(recipe, RunDirectory(recipe.directory).create())
    session, policy = trainer.session, trainer.session.policy
    context = (policy.chat.render([user("what?")]),)
    asked = Request("t", context, Sampling(max_new_tokens=12, stop_tokens=False), (0,), 0, "t")
    written = session.engine.counters

    def until_decoded(count: int) -> None:
        """Compute and give way, a few hundred times at most."""
        for _ in range(300):
            torch.ones(400, 400) @ torch.ones(400, 400)
            policy.give_way()
            if written.decoded_tokens >= count:
                return

    def update() -> int:
        until_decoded(2)
        policy.version += 1
        until_decoded(12)
        return written.decoded_tokens

    async def beside() -> tuple[int, tuple[int, ...]]:
        answer = asyncio.ensure_future(session.engine.generate(asked))
        with ThreadPoolExecutor(1) as thread:
            decoded = await schedules.compute_beside(session, thread, update, turns=turns)
        if not turns:
            answer.cancel()
            return decoded, ()
        return decoded, tuple(span.version for span in (await answer).versions)

    try:
        assert asyncio.run(beside()) == ((12, (0, 1)) if turns else (0, ()))
    finally:
        trainer.close()


def test_the_busy_share_is_of_the_places_and_of_the_whole_step() -> None:
    row = {"environment/places": 4.0, "time/environment_episode_s": 1.5, "time/step_s": 6.0}
    assert environments_busy(row, 8) == {"time/environments_busy": 0.5}
    assert environments_busy({"time/step_s": 6.0}, 8) == {}
    pool = WorkerPool("environment", size=3)
    with pool.caller(), pool.caller():
        assert pool.take_counters().most_callers == 2
    with pool.caller():
        assert pool.take_counters().most_callers == 2  # two were there when the counters were taken
    assert pool.take_counters().most_callers == 1
    assert pool.take_counters().most_callers == 0

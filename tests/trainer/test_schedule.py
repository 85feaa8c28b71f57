"""One step off: what is trained on is one update old, scoring and updating overlap, and a resumed run repeats the whole."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sensorium.cluster.event_loop import run_async
from sensorium.recipe.plan import make_plan
from sensorium.recipe.schema import Recipe
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.run import open_trainer, train
from sensorium.trainer.run_claim import begin
from sensorium.vocabulary.errors import RecipeError
from studies.resumed_runs import differences

from .small import small

OFF = ("schedule=one_step_off", "algorithm.correction.weights=token")


def ahead(folder: Path, *overrides: str, **changes: Any) -> Recipe:
    return small(folder, *OFF, *overrides, **{"steps": 7, "checkpoint": {"every": 3, "keep": 3}} | changes)


def advanced(recipe: Recipe, steps: int) -> None:
    """A run that goes so far and is left, with a step played ahead."""
    directory = RunDirectory(recipe.directory)
    begin(recipe, directory)
    trainer = open_trainer(recipe, directory)

    async def go() -> None:
        for _ in range(steps):
            await trainer.advance()

    try:
        run_async(go())
    finally:
        trainer.close()


def test_a_step_is_one_update_old_but_after_a_checkpoint_and_a_resumed_run_repeats_it(tmp_path: Path) -> None:
    train(ahead(tmp_path / "whole"))
    rows = read_metrics(tmp_path / "whole/metrics.jsonl")
    assert [row["staleness/max"] for row in rows] == [0, 1, 1, 0, 1, 1, 0]
    assert [row["mismatch/max"] > 1e-4 for row in rows] == [bool(row["staleness/max"]) for row in rows]
    assert all(0 < row["correction/effective_share"] <= 1 for row in rows)
    assert not any(row.get("health/alarms") for row in rows)
    broken = ahead(tmp_path / "broken")
    advanced(broken, 4)
    train(broken, resume=True)
    assert differences(tmp_path / "whole", tmp_path / "broken") == []


class Updates:
    """How many were done, and how many must be before anything is scored."""

    done = needed = 0


async def scored_late(task: Any, episode: Any) -> float:
    while Updates.done < Updates.needed:
        await asyncio.sleep(0.005)
    return float(episode.index % 2)


def test_an_update_runs_while_the_next_step_is_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was played ahead is scored only after the update that it was ahead of: this ends if neither waits."""
    terms = [{"name": "tests.trainer.test_schedule:scored_late"}]
    recipe = ahead(tmp_path / "run", steps=3, checkpoint={"every": 0}, rewards={"terms": terms, "deadline_s": 600})
    directory = RunDirectory(recipe.directory)
    begin(recipe, directory)
    trainer = open_trainer(recipe, directory)
    step, play_ahead = trainer.learner.step, trainer.schedule.play_ahead
    Updates.done = Updates.needed = 0

    def counted(*given: Any) -> dict[str, float]:
        found = step(*given)
        Updates.done += 1
        return found

    async def played_ahead(number: int) -> None:
        Updates.needed = number - 1
        await play_ahead(number)

    monkeypatch.setattr(trainer.learner, "step", counted)
    monkeypatch.setattr(trainer.schedule, "play_ahead", played_ahead)
    try:
        run_async(trainer.run())
    finally:
        trainer.close()
    assert Updates.done == 3
    assert [row["staleness/max"] for row in read_metrics(directory.metrics)] == [0, 1, 1]


def test_a_run_that_ends_early_records_what_it_played_ahead(tmp_path: Path) -> None:
    recipe = ahead(tmp_path / "run", checkpoint={"every": 0})
    directory = RunDirectory(recipe.directory)
    begin(recipe, directory)
    trainer = open_trainer(recipe, directory)

    async def go() -> None:
        await trainer.advance()
        await trainer.abandon_open()

    try:
        run_async(go())
        fates = trainer.ledger.fates(2)
    finally:
        trainer.close()
    assert len(fates) == 4
    assert set(fates.values()) == {"dropped: the run ended before it was trained on"}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.correction.weights=none"], "of older policies"),
        (["checkpoint.best=reward/mean"], "may be best anywhere"),
    ],
)
def test_what_it_cannot_be_used_with_is_refused(overrides: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=said):
        ahead(tmp_path / "run", *overrides)


def test_a_planner_that_waits_for_outcomes_is_refused(tmp_path: Path) -> None:
    recipe = ahead(tmp_path / "run", "tasks.planner=success_curriculum")
    with pytest.raises(RecipeError, match="success_curriculum"):
        train(recipe)


def test_the_plan_says_what_is_given_up(tmp_path: Path) -> None:
    assert "before its last update" in make_plan(ahead(tmp_path / "run")).schedule
    assert make_plan(small(tmp_path / "run")).schedule == ""


@pytest.mark.parametrize("schedule", ["synchronous", "one_step_off"])
def test_who_waits_for_whom_adds_up_to_the_step(schedule: str, tmp_path: Path) -> None:
    older = ["algorithm.correction.weights=token"] if schedule == "one_step_off" else []
    run = train(small(tmp_path / "run", f"schedule.name={schedule}", "checkpoint.every=0", *older))
    for row in read_metrics(run / "metrics.jsonl"):
        played, idle = row["wait/learner_for_episodes_s"], row["wait/engine_for_learner_s"]
        assert row["wait/learner_for_scores_s"] >= 0
        assert played + idle == pytest.approx(row["time/step_s"]) or (idle == 0 and played >= row["time/step_s"])

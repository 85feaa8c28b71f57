"""sn.train, sn.resume and sn.evaluate: from a script, and from inside an event loop as in a notebook."""

import asyncio
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest

import sensorium as sn
from sensorium.api.train import outside_loop
from sensorium.cluster import event_loop
from sensorium.report.watcher import Metrics, Watcher
from sensorium.runs.metrics import repeatable
from sensorium.runs.run_directory import lock_run
from sensorium.vocabulary.errors import RecipeError
from tests.api.small import small_recipe


def test_a_run_gives_metrics_checkpoint_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = sn.train(small_recipe(tmp_path / "run"), steps=1, optimizer={"lr": 2e-4}, **{"batch.group_size": 2})
    assert run.recipe.steps == 1
    assert (run.recipe.optimizer.lr, run.recipe.optimizer.warmup_steps, run.recipe.batch.group_size) == (2e-4, 0, 2)
    assert run.metrics["step"] == [1]
    assert run.metrics[0]["reward/exact"] == run.metrics["reward/exact"][0]
    frame = run.metrics.to_pandas()
    assert frame.loc[1, "reward/exact"] == run.metrics["reward/exact"][0]
    assert frame["step"].tolist() == run.metrics["step"] == frame.sort_values("step").index.tolist()
    with pytest.raises(sn.SensoriumError, match="reward/mean"):
        run.metrics["reward/meen"]
    assert (run.checkpoint / "config.json").exists()
    report = run.report()
    assert report == tmp_path / "run/report.html"
    assert "<iframe" in report._repr_html_()
    assert "<table>" in run.metrics._repr_html_()
    assert capsys.readouterr().out, "a script sees how its run goes"


def test_a_run_inside_an_event_loop_is_the_same_run(tmp_path: Path) -> None:
    plain = sn.train(small_recipe(tmp_path / "plain"), show=False)

    async def cell() -> sn.Run:
        return sn.train(small_recipe(tmp_path / "cell"), show=False)

    inside = asyncio.run(cell())
    assert [repeatable(row) for row in inside.metrics] == [repeatable(row) for row in plain.metrics]


class InterruptAtStep(Watcher):
    """Presses Ctrl-C when a step is over."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.threads: list[str] = []

    def stepped(self, step: int, metrics: Metrics) -> None:
        self.threads.append(threading.current_thread().name)
        if step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_reaches_a_run_inside_an_event_loop_and_it_resumes(tmp_path: Path) -> None:
    larger = {"steps": 3, "batch": {"prompts_per_step": 4, "group_size": 4}}  # so that there is something to learn from
    whole = sn.train(small_recipe(tmp_path / "whole", **larger), show=False)
    watcher = InterruptAtStep(1)

    def cell() -> None:
        sn.train(small_recipe(tmp_path / "run", **larger), show=False, watchers=[watcher])

    interrupted = _in_a_loop_like_a_notebook(cell)
    assert isinstance(interrupted, KeyboardInterrupt)
    assert f"sn.resume('{tmp_path / 'run'}') goes on from step" in str(interrupted)
    assert watcher.threads[0] == "sensorium", "the run was in a thread of its own"
    assert 1 <= len(sn.Run(tmp_path / "run").metrics) < 3
    resumed = sn.resume(tmp_path / "run", show=False)
    assert [repeatable(row) for row in resumed.metrics] == [repeatable(row) for row in whole.metrics]


def test_an_interrupt_when_the_work_has_ended_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a later thread with the same number would be interrupted."""
    interrupted, results = threading.Event(), list[int]()

    def waited_for() -> bool:
        frames = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])
        names = [frame.name for frame in frames]
        return names[names.index("outside_loop") + 1 :][:1] == ["wait"]

    def forget_and_be_interrupted(thread: int) -> None:
        event_loop.forget(thread)
        if threading.current_thread() is not threading.main_thread():
            while not waited_for():
                pass
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupted.wait(60)

    def interrupt(thread: int) -> None:
        event_loop.interrupt(thread)
        interrupted.set()

    monkeypatch.setattr("sensorium.api.train.forget", forget_and_be_interrupted)
    monkeypatch.setattr("sensorium.api.train.interrupt", interrupt)
    assert _in_a_loop_like_a_notebook(lambda: results.append(outside_loop(lambda: 7))) is None
    assert interrupted.is_set()
    assert results == [7]
    assert event_loop._interrupted == set()


def _in_a_loop_like_a_notebook(cell: Any) -> BaseException | None:
    """Run a cell inside a running loop of the main thread, with Python's own SIGINT handler, as Jupyter does."""
    loop = asyncio.new_event_loop()
    raised: list[BaseException] = []

    async def run_cell() -> None:
        try:
            cell()
        except BaseException as error:
            raised.append(error)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        loop.run_until_complete(run_cell())
    finally:
        signal.signal(signal.SIGINT, handler)
        loop.close()
    return raised[0] if raised else None


def test_a_used_run_directory_is_refused_unless_overwritten(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path / "run", steps=1)
    sn.train(recipe, show=False)
    with pytest.raises(sn.SensoriumError, match="exists"):
        sn.train(recipe, show=False)
    assert len(sn.train(recipe, show=False, overwrite=True).metrics) == 1
    (tmp_path / "mine").mkdir()
    with pytest.raises(sn.SensoriumError, match="holds no run"):
        sn.train(recipe, show=False, overwrite=True, run_dir=tmp_path / "mine")


def test_a_run_in_use_is_not_overwritten(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path / "run", steps=1)
    sn.train(recipe, show=False)
    with lock_run(tmp_path / "run"), pytest.raises(sn.SensoriumError, match="in use"):
        sn.train(recipe, show=False, overwrite=True)
    assert len(sn.Run(tmp_path / "run").metrics) == 1


def test_an_evaluation_says_how_it_goes_unless_told_not_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, out = small_recipe(tmp_path / "none"), tmp_path / "out"
    sn.evaluate(recipe, limit=4, out=out, show=False)
    assert not capsys.readouterr().out
    sn.evaluate(recipe, limit=4, out=out)
    told = capsys.readouterr().out.splitlines()
    assert told == [f"evaluating package:shapes into {out}", "4 of 4 tasks were done before"]


def test_an_evaluation_of_a_run_and_of_a_recipe(tmp_path: Path) -> None:
    run = sn.train(small_recipe(tmp_path / "run", steps=1), show=False)

    async def cell() -> sn.Evaluation:
        return sn.evaluate(run, limit=4)

    found = asyncio.run(cell())
    assert found["tasks"] == 4
    assert found.accuracy == found["accuracy"]
    assert 0 <= found.accuracy <= 1
    assert len(found.samples) == 4
    assert found.folder.is_relative_to(run.directory)
    before = sn.evaluate(small_recipe(tmp_path / "none"), limit=4, out=tmp_path / "before", greedy=False)
    assert before["name"] == "sampled"
    assert before["model"] == "package:shapes"
    with pytest.raises(RecipeError, match="greedy=False"):  # it would be greedy all the same
        sn.evaluate(small_recipe(tmp_path / "none"), greedy=False, samples=4, evaluation={"temperature": 0})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stepz": 3}, "unknown key 'stepz'"),
        ({"steps": "many"}, "argument 'steps'"),
        ({"rewards": ["exat"]}, "did you mean 'exact'"),
        ({"batch.group_size.more": 1}, "has no 'more' inside"),
        ({"optimizer": {"lr": print}}, "where a recipe has a plain value"),
        ({"tasks": 7}, "give rows"),
    ],
)
def test_a_mistake_is_an_error_that_names_it(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(sn.SensoriumError, match=said):
        sn.train(small_recipe(tmp_path / "run"), **changes)
    with pytest.raises(sn.SensoriumError, match="a recipe is a path"):
        sn.train(7)

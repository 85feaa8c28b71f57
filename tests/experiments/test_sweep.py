"""A sweep of real runs: what it finds, what it leaves out, and how it goes on after kill -9 and Ctrl-C."""

import json
import os
import re
import shutil
import signal
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

import sensorium as sn
from sensorium.cli.main import main
from sensorium.evaluation.comparison import compare_sides, side_of
from sensorium.evaluation.summary import t_quantile
from sensorium.experiments.experiment import Experiment
from sensorium.recipe.yaml import read_yaml, write_yaml
from sensorium.report.tables import comparison_grid
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import lock_run
from sensorium.vocabulary.errors import RecipeError, TaskError
from studies.fork_server import Ended, ForkServer
from tests.experiments.swept import summing

from ..cpu_budget import count

RATES = {"optimizer.lr": [1e-3, 1e-2], "seed": range(2)}


def _rewards() -> list[Any]:
    """Functions that no other process can import, so that the runs go on in this one."""

    def by_length(task: sn.Task, episode: sn.Episode) -> float:
        return len(episode.response) % 3 / 2

    def is_short(task: sn.Task, episode: sn.Episode) -> bool:
        return len(episode.response) < 6

    return [by_length, {"name": is_short, "weight": 0.0}]


REWARDS = _rewards()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("swept")


@pytest.fixture(scope="module", name="swept")
def _swept(place: Path) -> sn.Sweep:
    """Two rates with two seeds each, in this process."""
    before = Path.cwd()
    os.chdir(place)
    try:
        found = sn.sweep(summing(place), RATES, name="rates", show=False, rewards=REWARDS)
    finally:
        os.chdir(before)
    return sn.Sweep(place / found.directory)


def test_every_run_is_a_run_and_the_table_has_means_and_both_intervals(swept: sn.Sweep) -> None:
    assert [run["state"] for run in swept.states] == ["finished"] * 4
    assert [run.directory.name for run in swept] == [
        "lr=1e-3,seed=0", "lr=1e-3,seed=1", "lr=0.01,seed=0", "lr=0.01,seed=1",
    ]  # fmt: skip
    assert all(run.report().exists() for run in swept)
    by_rate = {row["optimizer.lr"]: row for row in swept.table}
    for rate in (1e-3, 1e-2):
        own = [run for run in swept if run.recipe.optimizer.lr == rate]
        rewards = [run.evaluations[-1]["reward"] for run in own]
        row = by_rate[rate]
        assert row["runs"] == 2
        assert row["reward_by_run"] == pytest.approx(rewards)
        assert row["reward"] == pytest.approx(fmean(rewards))
        half = t_quantile(1) * stdev(rewards) / 2**0.5
        assert row["reward_across_seeds"] == pytest.approx([max(0, row["reward"] - half), min(1, row["reward"] + half)])
        low, high = row["reward_across_tasks"]
        assert 0 <= low < row["reward"] < high <= 1
        assert row["accuracy"] == pytest.approx(fmean(run.evaluations[-1]["accuracy"] for run in own))
    assert swept.best["reward"] == max(swept.table["reward"])
    assert [row["best"] for row in swept.table] == [True, False], "the best comes first"


def test_page_and_json_hold_what_the_table_has_and_load_nothing(swept: sn.Sweep) -> None:
    page = swept.report().read_text()
    assert not re.search(r"(src|href)=.?(https?:|//)", page)
    assert "default-src 'none'" in page
    assert page.count('class="c0 band"') >= 2, "curves of a setting have a band over its seeds"
    assert "lr=1e-3" in page
    assert "lr=0.01" in page
    found = json.loads((swept.directory / "results.json").read_text())
    assert found["best"] == swept.results.best
    assert [one["reward"]["mean"] for one in found["settings"]] == swept.table["reward"]
    assert (swept.directory / "table.md").read_text() == repr(swept)
    curves = swept.results.curves[swept.results.best]
    reward = next(curve for curve in curves if curve.metric == "reward/mean")
    own = [run for run in swept if run.recipe.optimizer.lr == swept.best["optimizer.lr"]]
    assert reward.steps == (1, 2, 3)
    for place, mean in enumerate(reward.means):
        values = [run.metrics[place]["reward/mean"] for run in own]
        assert mean == pytest.approx(fmean(values))
        assert reward.edges[place] == (min(values), max(values))


def test_two_runs_have_an_interval_across_tasks_only_and_two_groups_have_both(
    swept: sn.Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = swept.directory
    single = compare_sides(*(side_of(str(folder / f"lr={rate},seed=0")) for rate in ("1e-3", "0.01")))
    change = single["differences"]["reward"]
    assert change["across_seeds"] is None
    assert change["across_tasks"][0] < change["difference"] < change["across_tasks"][1]
    assert any("tasks only" in note for note in single["notes"])
    sides = [side_of(str(folder / f"lr={rate},*")) for rate in ("1e-3", "0.01")]
    both = compare_sides(*sides)
    assert [len(side.members) for side in sides] == [2, 2]
    rewards = {
        rate: [run.evaluations[-1]["reward"] for run in swept if run.recipe.optimizer.lr == rate] for rate in (1e-3, 1e-2)
    }
    change = both["differences"]["reward"]
    assert change["difference"] == pytest.approx(fmean(rewards[1e-2]) - fmean(rewards[1e-3]))
    assert change["across_seeds"] is not None
    assert both["all"]["tasks"] == 8
    assert not any("tasks only" in note for note in both["notes"])
    for given in ([str(folder)], [str(path) for path in folder.iterdir()]):  # the latter as a shell expands folder/*
        assert main(["compare", *given]) == 0
        out = capsys.readouterr().out
        assert "optimizer.lr=0.01" in out
        assert "optimizer.lr=1e-3" in out


def test_runs_that_were_evaluated_otherwise_are_not_compared(swept: sn.Sweep, tmp_path: Path) -> None:
    first, other = (swept.directory / f"lr=1e-3,seed={seed}" for seed in (0, 1))
    for change, named in (
        ("sampling", r"evaluation\.temperature is 1\.0 .* and 0\.5"),
        ("tasks", "1 of 8 tasks are in the first only"),
    ):
        copy = tmp_path / change
        shutil.copytree(other, copy)
        if change == "sampling":
            data, _ = read_yaml((copy / "recipe.yaml").read_text(), "")
            data["evaluation"]["temperature"] = 0.5
            (copy / "recipe.yaml").write_text(write_yaml(data))
        else:
            outcomes = copy / "eval/outcomes/step_000003_eval.jsonl"
            outcomes.write_text("".join(outcomes.read_text().splitlines(keepends=True)[1:]))
        with pytest.raises(TaskError, match=named) as refused:
            compare_sides(side_of(str(first)), side_of(str(copy)))
        assert f"sensorium eval {first} --model {copy} --out" in str(refused.value)


def test_finished_runs_are_left_out_others_are_added_and_another_recipe_is_refused(
    swept: sn.Sweep, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    copy = place / "sweeps" / "more"
    shutil.copytree(swept.directory, copy)
    before = {path: path.stat().st_mtime_ns for path in copy.glob("lr=*/**/*") if path.is_file()}
    recipe = summing(place)
    with pytest.raises(RecipeError, match=r"batch\.group_size was 2 and is now 4"):
        sn.sweep(recipe | {"batch": {"prompts_per_step": 2, "group_size": 4}}, RATES, name="more", rewards=REWARDS)
    with pytest.raises(RecipeError, match=r"sweeps optimizer\.lr, seed, and these arguments sweep .*group_size"):
        sn.sweep(recipe, {"batch.group_size": [2, 4]}, name="more", rewards=REWARDS)
    shutil.rmtree(copy / "lr=0.01,seed=1")
    again = sn.sweep(recipe, {"optimizer.lr": [1e-2], "seed": [1, 2]}, name="more", show=False, rewards=REWARDS)
    names = [run["name"] for run in again.states]
    assert names == ["lr=1e-3,seed=0", "lr=1e-3,seed=1", "lr=0.01,seed=0", "lr=0.01,seed=1", "lr=0.01,seed=2"]
    assert {run["state"] for run in again.states} == {"finished"}
    kept = [path for path in before if not path.is_relative_to(copy / "lr=0.01,seed=1")]
    assert {path: path.stat().st_mtime_ns for path in kept if path.name != "report.html"} == {
        path: before[path] for path in kept if path.name != "report.html"
    }
    assert again.best["runs"] in (2, 3)


def test_a_wrong_value_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"'optimizer\.lr=-1'"):
        sn.sweep(summing(tmp_path), {"optimizer.lr": [1e-3, -1]}, rewards=["exact"])
    assert not (tmp_path / "sweeps").exists()


def test_a_sweep_goes_on_after_kill_9_and_ctrl_c_and_a_failed_run_does_not_stop_it(
    tmp_path: Path, fork_server: ForkServer, common: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    term = {"name": "tests.experiments.swept:Gate", "options": {"pipe": str(pipe)}}
    (tmp_path / "sums.yaml").write_text(write_yaml(summing(tmp_path, rewards={"terms": [term]})))
    arguments = ["sums.yaml", "model.path=tiny:qwen2,/nowhere", "--jobs", "1"]
    experiment, log = tmp_path / "sweeps/sums", tmp_path / "log.txt"
    run = experiment / "path=tiny-qwen2"  # and a digest, since a colon is not in a name

    def begin() -> "tuple[int, object]":
        with log.open("wb") as file:
            order = ["-c", "import sys; from tests.experiments.swept import sweep; sys.exit(sweep(*sys.argv[1:]))"]
            started = fork_server.start(
                [*order, str(common / "forks"), *arguments], {1: file.fileno(), 2: file.fileno()}, cwd=str(tmp_path)
            )
        return started.pid, started

    def ended(started: object) -> Ended:
        found = started.wait()  # type: ignore[attr-defined]
        count(found.cpu_s)
        return found

    rows = []
    for number, code in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
        pid, started = begin()
        pipe.read_bytes()  # returns when the run's second step has begun, in which it stays
        (run,) = (path for path in experiment.glob("path=tiny*") if path.is_dir())
        rows.append((run / "metrics.jsonl").read_bytes())
        os.kill(pid, number)
        assert ended(started).code == code, log.read_text()
        if number == signal.SIGINT:
            with lock_run(run):  # its process has ended
                pass
            assert [one.state for one in Experiment(experiment).runs] == ["stopped", "waiting"]
    assert [row.count(b"\n") for row in rows] == [1, 2], "the second start went on after the step that was saved"
    pipe.unlink()
    _, started = begin()
    assert ended(started).code == 1, "one of two runs failed"
    metrics = (run / "metrics.jsonl").read_bytes()
    assert metrics.startswith(rows[1])
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1, 2, 3]
    good, bad = Experiment(experiment).runs
    assert (good.state, bad.state) == ("finished", "failed")
    assert "/nowhere" in bad.why
    assert bad.name in log.read_text()
    found = compare_sides(side_of(str(run)), side_of(str(run)))
    assert "all" not in found, "nothing says right or wrong"
    assert found["differences"]["reward"]["difference"] == 0
    assert ("B − A, reward", ("+0.000",)) in comparison_grid(found).rows

"""Findings are told when they begin, at growing intervals, and when they end; a resumed run tells the same."""

from pathlib import Path
from typing import Any

import pytest

from sensorium.report.watcher import Watcher
from sensorium.runs.metrics import MetricsFile, Notice, SightResult, read_health
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.health.facts import Evidence
from sensorium.trainer.health.monitor import Courses, Health, run_untrained
from sensorium.vocabulary.episode import Status
from sensorium.vocabulary.errors import NothingTrained
from tests.trainer.health.test_rules import HEALTHY, episode, group, recipe

FAILED, FINISHED = Status.FAILED, Status.FINISHED

FAST = HEALTHY | {"policy/lr": 1.0}
IDLE = HEALTHY | {"policy/grad_norm": 0.0}


class Ear(Watcher):
    def __init__(self) -> None:
        self.heard: list[Notice] = []
        self.noted_texts: list[str] = []

    def noted(self, text: str) -> None:
        self.noted_texts.append(text)

    def diagnosed(self, notice: Notice) -> None:
        self.heard.append(notice)


def monitor(folder: Path, **sections: Any) -> tuple[Health, Ear]:
    ear = Ear()
    return Health(recipe(**sections), RunDirectory(folder).create(), ear), ear


def go(health: Health, folder: Path, rows: list[dict[str, float]], first: int = 1) -> None:
    """Steps as the loop takes them."""
    file = MetricsFile(RunDirectory(folder).metrics)
    for step, row in enumerate(rows, start=first):
        file.append(step, row | health.examine(step, row, Evidence()))


def test_a_lasting_finding_is_told_ever_less_often() -> None:
    courses = Courses()
    told = [(step, state) for step in range(1, 100) for _, state in courses.advance(step, ["x"])]
    assert told == [(1, "began"), (11, "goes on"), (21, "goes on"), (41, "goes on"), (81, "goes on")]


def test_a_finding_that_becomes_grave_is_told_at_once_also_after_a_resume(tmp_path: Path) -> None:
    def evidence(failed: int) -> Evidence:
        return Evidence((group(*(episode(i, 1.0, status=FAILED if i < failed else FINISHED) for i in range(8))),))

    health, ear = monitor(tmp_path)
    for step, failed in enumerate((2, 2, 8, 2, 8), start=1):
        health.examine(step, HEALTHY, evidence(failed))
    told = [(n.step, n.state, n.grave) for n in ear.heard if n.rule == "failed_episodes"]
    assert told == [(1, "began", False), (3, "goes on", True)]

    folder = tmp_path / "resumed"
    before, _ = monitor(folder)
    file = MetricsFile(RunDirectory(folder).metrics)
    file.append(1, HEALTHY | before.examine(1, HEALTHY, evidence(2)))
    after, ear = monitor(folder)
    after.restore()
    after.examine(2, HEALTHY, evidence(8))
    assert [(n.step, n.grave) for n in ear.heard if n.rule == "failed_episodes"] == [(2, True)]


def test_a_finding_that_comes_and_goes_is_told_once_until_it_is_over() -> None:
    courses = Courses()
    told = [
        (step, state) for step in range(1, 14) for _, state in courses.advance(step, ["x"] if step in (1, 4, 6) else [])
    ]
    assert told == [(1, "began"), (11, "ended")]


def test_a_sight_check_is_told_when_it_is_made_and_not_repeated_between(tmp_path: Path) -> None:
    health, ear = monitor(tmp_path)
    health.look(0, [SightResult("picture", 8, 0.5, 0.75, 2)])
    go(health, tmp_path, [HEALTHY] * 50)
    assert [(notice.step, notice.state) for notice in ear.heard] == [(0, "began")]
    seen = health.look(51, [SightResult("picture", 8, 0.9, 0.25, 2)])
    go(health, tmp_path, [HEALTHY | seen], first=51)
    assert [(notice.step, notice.state) for notice in ear.heard] == [(0, "began"), (51, "ended")]


def test_findings_are_on_record_in_metrics_and_in_the_run_directory(tmp_path: Path) -> None:
    health, ear = monitor(tmp_path)
    assert health.examine(1, FAST, Evidence()) == {"health/learning_rate": 1.0}
    assert health.damaged
    assert [notice.rule for notice in ear.heard] == ["learning_rate"]
    assert read_health(tmp_path / "health.jsonl").notices == tuple(ear.heard)


def test_a_resumed_run_tells_what_the_uninterrupted_one_does(tmp_path: Path) -> None:
    rows = [FAST] * 4 + [HEALTHY] * 3 + [FAST] * 8 + [HEALTHY] * 9
    sight = [SightResult("picture", 8, 0.5, 0.75, 2)]
    whole, _ = monitor(tmp_path / "whole")
    whole.look(0, sight)
    go(whole, tmp_path / "whole", rows)
    first, _ = monitor(tmp_path / "cut")
    first.look(0, sight)
    go(first, tmp_path / "cut", rows[:13])
    directory = RunDirectory(tmp_path / "cut")
    directory.drop_after(9)
    second, ear = monitor(tmp_path / "cut")
    second.restore()
    second.remind()
    heard = {notice.rule: (notice.step, notice.state) for notice in ear.heard}
    assert heard == {"learning_rate": (1, "before"), "blind": (0, "before")}
    go(second, tmp_path / "cut", rows[9:], first=10)
    for name in ("health.jsonl", "metrics.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_resumed_run_knows_the_evaluation_before_training(tmp_path: Path) -> None:
    good, bad = ({"name": "eval", "accuracy": share, "interval": [share - 0.1, share + 0.1]} for share in (0.6, 0.3))
    RunDirectory(tmp_path).create().write_summary(0, good)
    health, ear = monitor(tmp_path)
    health.restore()
    health.evaluated(1, bad)
    go(health, tmp_path, [HEALTHY] * 8)
    assert [(notice.step, notice.rule) for notice in ear.heard] == [(1, "held_out_fall")], "it stands until the next one"
    health.evaluated(9, good)
    go(health, tmp_path, [HEALTHY] * 5, first=9)
    assert (ear.heard[-1].step, ear.heard[-1].state) == (13, "ended")
    (tmp_path / "eval/step_000000_eval.json").write_text("{")
    resumed, ear = monitor(tmp_path)
    resumed.restore()
    assert "does not compare with the evaluations so far" in ear.noted_texts[0]


def test_processes_lost_after_a_resume_are_counted_on(tmp_path: Path) -> None:
    lost = HEALTHY | {"engine/replaced": 1.0}
    first, _ = monitor(tmp_path)
    go(first, tmp_path, [HEALTHY, lost])
    second, ear = monitor(tmp_path)
    second.restore()
    go(second, tmp_path, [lost] * 6, first=3)  # the counts of a resumed run begin anew
    told = ear.heard[-1]
    assert (told.step, told.rule, told.state) == (8, "lost_processes", "ended")
    assert "engines replaced 2 since the run began" in told.text


def test_a_run_without_updates_is_idle_after_the_steps_of_the_recipe(tmp_path: Path) -> None:
    health, _ = monitor(tmp_path, health={"stop_after": 3})
    go(health, tmp_path, [HEALTHY, IDLE, IDLE])
    assert not health.idle
    go(health, tmp_path, [IDLE], first=4)
    assert health.idle
    with pytest.raises(NothingTrained, match=r"last 3 steps made no update.*stop_after: 3"):
        health.refuse_untrained()


def test_with_stop_after_0_a_run_goes_on_but_does_not_end_well(tmp_path: Path) -> None:
    health, _ = monitor(tmp_path, health={"stop_after": 0})
    go(health, tmp_path, [IDLE] * 50)
    assert not health.idle
    with pytest.raises(NothingTrained, match="none of the 50 steps"):
        health.refuse_untrained()


def test_rl_that_trained_nothing_after_a_warm_start_is_told_apart(tmp_path: Path) -> None:
    health, _ = monitor(tmp_path, warm_start={"steps": 2})
    go(health, tmp_path, [{"policy/grad_norm": 1.0}] * 2 + [IDLE] * 3)
    with pytest.raises(NothingTrained, match="none of the 3 steps of RL"):
        health.refuse_untrained()


def test_a_short_run_that_trained_nothing_by_chance_is_noted_and_known_to_the_command(tmp_path: Path) -> None:
    health, ear = monitor(tmp_path)
    go(health, tmp_path, [IDLE] * 2)
    health.refuse_untrained()
    assert ear.noted_texts == [health.untrained()]
    assert "none of the 2 steps made an update" in run_untrained(RunDirectory(tmp_path), recipe())
    go(health, tmp_path, [HEALTHY], first=3)
    assert not run_untrained(RunDirectory(tmp_path), recipe())


def test_a_short_run_whose_cause_is_known_is_refused(tmp_path: Path) -> None:
    health, _ = monitor(tmp_path)
    go(health, tmp_path, [{"groups/trained": 0, "policy/skipped": 1}])
    with pytest.raises(NothingTrained, match="the only step made no update"):
        health.refuse_untrained()


def test_a_resumed_run_whose_health_file_was_taken_away_still_tells(tmp_path: Path) -> None:
    health, _ = monitor(tmp_path)
    go(health, tmp_path, [FAST])
    RunDirectory(tmp_path).health.unlink()
    resumed, ear = monitor(tmp_path)
    resumed.restore()
    resumed.remind()
    assert ear.heard
    assert all("health.jsonl" in notice.text for notice in ear.heard)


def test_an_error_that_follows_its_findings_does_not_repeat_them(tmp_path: Path) -> None:
    health, _ = monitor(tmp_path)
    go(health, tmp_path, [{"groups/trained": 0, "policy/skipped": 1}] * 3)
    with pytest.raises(NothingTrained) as stopped:
        health.refuse_untrained()
    cause = "the first episode was left out"
    assert cause in str(stopped.value)
    assert cause not in stopped.value.short
    assert "health.jsonl" in stopped.value.short


def test_rows_that_are_lost_may_have_trained_so_nothing_is_claimed_of_them(tmp_path: Path) -> None:
    health, _ = monitor(tmp_path)
    go(health, tmp_path, [HEALTHY, IDLE, IDLE])
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(rows[1:]))
    again, _ = monitor(tmp_path)
    again.restore(3)
    assert not again.untrained()

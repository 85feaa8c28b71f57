"""Success by kind of task, and the level of a curriculum, on the console and in the report."""

import io
from pathlib import Path

from rich.console import Console

from sensorium.report.console import KINDS, ConsoleWatcher, category_lines
from sensorium.report.page import kinds_table, render_report
from sensorium.report.watcher import RunStart
from sensorium.runs.metrics import MetricsFile
from tests.report.synthetic_run import make_run, summary

METRICS = {"reward/mean": 0.5, "accuracy": 0.5, "accuracy/click": 0.75, "accuracy/[b]drag": 0.25, "planner/level": 2.0}


def printed(terminal: bool, metrics: dict[str, float]) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    watcher = ConsoleWatcher(Console(file=stream, force_terminal=terminal, width=100, color_system=None))
    watcher.started(RunStart("demo", 1))
    watcher.stepped(1, metrics)
    watcher.evaluated(1, summary("eval", 0.5))
    watcher.finished()
    stream.seek(0)
    return stream.read()


def test_the_display_shows_each_kind_and_the_level() -> None:
    text = printed(True, METRICS | {"planner/success": 0.4})
    assert "by kind" in text
    assert text.index("[b]drag 0.25") < text.index("click 0.75"), "the lowest first"
    assert "success 0.40" in text
    many = printed(True, {f"accuracy/k{i}": i / 20 for i in range(20)})
    assert f"the lowest {KINDS} of 20" in many
    assert "k19" not in many


def test_a_log_has_the_level_and_a_line_for_each_kind_of_an_evaluation() -> None:
    text = printed(False, METRICS)
    assert "level 2" in text
    lines = category_lines(summary("eval", 0.5, 400) | {"categories": {
        "click": {"accuracy": 0.5, "interval": [0.4, 0.6], "tasks": 100}, "drag": {"accuracy": None, "tasks": 0},
        "type": {"accuracy": 0.25, "interval": [0.2, 0.3], "tasks": 60},
    }})  # fmt: skip
    assert lines == ["click: 50.0 % [40.0 to 60.0], n = 100", "type: 25.0 % [20.0 to 30.0], n = 60"]
    assert category_lines({"categories": {"all": {"accuracy": 0.5, "tasks": 3}}}) == []
    many = {f"k{i}": {"accuracy": i / 20, "interval": [0, 1], "tasks": 1} for i in range(20)}
    assert len(category_lines({"categories": many})) == KINDS + 1


def test_the_report_has_a_table_of_kinds_in_training_and_a_curve_of_levels(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=8)
    metrics = MetricsFile(run.metrics)
    for step in range(9, 13):
        metrics.append(step, METRICS | {"accuracy/click": step / 20})
    page = render_report(run)
    assert "Training by kind of task" in page
    assert "Level of the curriculum" in page
    assert "Accuracy by kind of task" in page
    assert "&lt;" not in kinds_table([{"step": 1}])
    table = kinds_table([{"step": i, "accuracy/<b>": i / 10} for i in range(1, 5)])
    assert "&lt;b&gt;" in table
    assert "15.0 %" in table
    assert "35.0 %" in table
    assert "+20.0" in table
    assert kinds_table([{"step": 1, "accuracy": 0.5}]) == ""

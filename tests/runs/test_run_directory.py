"""Rows are whole or absent, and a resumed run forgets what came after its checkpoint."""

import json
import math

import pytest

from sensorium.runs.durable import append_row, read_rows, write_whole
from sensorium.runs.metrics import MetricsFile, ordered, read_metrics, repeatable
from sensorium.runs.run_directory import RunDirectory
from sensorium.vocabulary.errors import SensoriumError


def test_paths_are_those_of_the_design(tmp_path) -> None:
    run = RunDirectory(tmp_path / "demo").create()
    assert run.episodes_of(12) == tmp_path / "demo/episodes/step_000012.jsonl"
    assert run.checkpoint_of(10) == tmp_path / "demo/checkpoints/step_000010"
    assert run.media.is_dir()
    assert not run.exists()
    write_whole(run.recipe, "name: demo\n")
    assert run.exists()


def test_a_torn_row_is_no_row_and_is_taken_away_by_the_next(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_row(path, {"step": 1})
    path.write_bytes(path.read_bytes() + b'{"step":2,"rew')
    assert list(read_rows(path)) == [{"step": 1}]
    append_row(path, {"step": 2})
    assert path.read_text() == '{"step":1}\n{"step":2}\n'


def test_a_broken_row_is_named(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1}\n{"step":\n{"step":3}\n')
    with pytest.raises(SensoriumError, match=r"metrics\.jsonl, line 2"):
        list(read_rows(path))


def test_rows_and_files_past_a_step_are_dropped_byte_for_byte(tmp_path) -> None:
    run = RunDirectory(tmp_path).create()
    writer = MetricsFile(run.metrics)
    for step in range(1, 4):
        writer.append(step, {"reward/mean": step / 3})
        write_whole(run.episodes_of(step), "{}\n")
        run.write_summary(step, {"name": "eval", "accuracy": 0.5})
    first_two = b"".join(run.metrics.read_bytes().splitlines(keepends=True)[:2])
    run.drop_after(2)
    assert run.metrics.read_bytes() == first_two
    assert sorted(path.name for path in run.episodes.iterdir()) == ["step_000001.jsonl", "step_000002.jsonl"]
    assert [summary["step"] for summary in run.summaries()] == [1, 2]


def test_a_failed_write_leaves_the_old_file(tmp_path) -> None:
    path = tmp_path / "report.html"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\udc80")
    assert path.read_text() == "old"


def test_metrics_have_one_order_whatever_order_they_come_in(tmp_path) -> None:
    metrics = {
        "time/step_s": 1.0,
        "reward/format": 1.0,
        "policy/loss": 0.1,
        "reward/mean": 0.5,
        "accuracy": 0.4,
        "eval/x": 1,
    }
    assert list(ordered(metrics)) == ["reward/mean", "reward/format", "accuracy", "policy/loss", "eval/x", "time/step_s"]
    assert list(ordered(dict(reversed(metrics.items())))) == list(ordered(metrics))


def test_what_was_not_measured_is_null_on_disk_and_absent_when_read(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).append(3, {"accuracy": math.nan, "reward/mean": 0.25, "time/step_s": 9.0})
    assert json.loads(path.read_text()) == {"step": 3, "reward/mean": 0.25, "accuracy": None, "time/step_s": 9.0}
    [row] = read_metrics(path)
    assert row == {"step": 3, "reward/mean": 0.25, "time/step_s": 9.0}
    assert repeatable(row) == {"step": 3, "reward/mean": 0.25}

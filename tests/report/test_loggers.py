"""Loggers show metrics and episodes with their media, name what is not installed, and never fail a run."""

import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sensorium.data.made_media import encode_clip
from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.data.sound import encode_wav
from sensorium.recipe.load import load_recipe
from sensorium.recipe.registry import build
from sensorium.recipe.schema import LoggingSection
from sensorium.report.watcher import (
    BackgroundLogger,
    Logger,
    Metrics,
    RunStart,
    SampleTable,
    Watcher,
    input_and_output,
)
from sensorium.runs.metrics import read_metrics, repeatable
from sensorium.trainer.run import train
from sensorium.vocabulary import Episode, Group, Media, Message, Score, Segment, Status, Task, Text, Thread, Turn, user
from sensorium.vocabulary.errors import NothingTrained, SensoriumError
from tests.data.clips import middle, numbered, tone
from tests.trainer.small import small

CLIP, WAVE = encode_clip(numbered(), 8.0, tone()), encode_wav(tone(0.5))
LOGGED = LoggingSection(generations=2, project="trial")


@pytest.fixture(autouse=True)
def _no_service_named() -> Iterator[None]:
    """wandb sets this variable for child processes; CapRL's settings read all of wandb's."""
    yield
    os.environ.pop("WANDB_SERVICE", None)


def test_tensorboard_gets_every_scalar_of_every_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = build("logger", "tensorboard", {}, "logging.loggers", run_dir=tmp_path, logging=LoggingSection())
    logger.started(RunStart("demo", 2))
    logger.evaluated(0, {"name": "eval", "accuracy": 0.25})
    logger.stepped(1, {"reward/mean": 0.5, "eval/accuracy": 0.75})
    logger.stepped(2, {"reward/mean": 0.75})
    logger.finished()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.5), (2, 0.75)]
    assert [(event.step, event.value) for event in events.Scalars("eval/accuracy")] == [(0, 0.25), (1, 0.75)]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_a_missing_package_is_named_with_its_remedy(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [known for known in sys.modules if known.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SensoriumError, match=rf"pip install .*{name}"):
        build("logger", name, {}, "logging.loggers", run_dir=tmp_path, logging=LoggingSection())


def test_wandb_stays_offline_unless_told_and_keeps_no_key_of_the_recipe_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("SENSORIUM_SERVICE_KEY", "key-by-variable")
    tool = {
        "url": "https://me:key-in-user@host:1/mcp?token=key-in-query",
        "headers": {"Authorization": "Bearer key-in-header"},
    }
    recipe = {"name": "seen-by-all", "tools": [{"mcp": tool}, {"mcp": {"command": "x", "env": {"KEY": "key-in-env"}}}]}
    monkeypatch.setattr(sys, "argv", ["sensorium", "train", f"tools={json.dumps(recipe['tools'])}"])
    logger = build("logger", "wandb", {}, "logging.loggers", run_dir=tmp_path, logging=LoggingSection(project="trial"))
    logger.started(RunStart("demo", 1, recipe=recipe))
    logger.stepped(1, {"reward/mean": 0.5})
    logger.finished()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b"seen-by-all" in data and b"https://host:1/mcp?***" in data for data in files)
    assert not any(re.search(rb"key-(in|by)-", data) for data in files)


def test_wandb_gets_generations_with_their_pictures_and_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that evaluates at its start: the files that ``wandb sync`` uploads hold a table, and the pictures in it."""
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    lake = "{environment: frozen_lake, options: {max_turns: 2}, size: 8, distinct: false}"
    settings = [
        f"run_dir={tmp_path / 'run'}", "model.path=tiny:qwen2_5_vl", "steps=1", "threads=1", "health.sight_tasks=0",
        *(f"tasks.{side}=[{{source: environments, options: {lake}}}]" for side in ("train", "evaluate")),
        "batch={prompts_per_step: 2, group_size: 2}", "rollout={max_turns: 2, max_new_tokens: 8}",
        "rewards.terms=[{name: environment}]", "evaluation={at_start: true}", "checkpoint.every=0",
        "logging={loggers: [wandb], generations: 3}",
    ]  # fmt: skip
    with suppress(NothingTrained):  # two groups may all be rewarded alike
        train(load_recipe("shapes", settings))
    (files,) = (tmp_path / "run" / "wandb").glob("offline-run-*/files")
    (table,) = (json.loads(path.read_text()) for path in files.glob("media/table/eval/generations_0_*.json"))
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert len({row["task"] for row in rows}) == 3
    for row in rows:
        assert (row["step"], row["text"].count("<picture>"), row["text"].count("assistant: ")) == (0, 2, 2)
        assert row["reward"] is not None
    pictures = list(files.glob("media/images/eval/pictures_0_*.png"))
    assert len(pictures) == 3  # named by content: nothing moves, so both turns show the same one
    for path in pictures:
        with Image.open(path) as picture:
            assert picture.width == picture.height > 16


def test_wandb_writes_where_its_own_variable_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "logs" / "here"))
    logger = build("logger", "wandb", {}, "logging.loggers", run_dir=tmp_path / "run", logging=LoggingSection())
    logger.started(RunStart("demo", 1, recipe={"steps": 1}))
    logger.finished()
    assert list((tmp_path / "logs" / "here" / "wandb").glob("offline-run-*/*.wandb"))
    assert not (tmp_path / "run" / "wandb").exists()
    (tmp_path / "file").touch()
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "file"))
    with pytest.raises(SensoriumError, match="WANDB_DIR"):
        logger.started(RunStart("demo", 1, recipe={"steps": 1}))


def answered(number: int, step: int, *media: Media, turns: int = 1) -> Group:
    """A group of one episode that was shown these media, and answered by its number and the step."""
    task = Task(f"task{number}", (user(*media, f"what is {number}?"),))
    said = [Segment("model", (1,), text=f"<{number}|at {step}>", name=f"{number}/{turn}") for turn in range(turns)]
    seen = [task.messages, *((Message("user", (Text(f"again {turn}"),)),) for turn in range(1, turns))]
    thread = Thread(tuple(said), (True,) * turns)
    played = tuple(Turn(turn, seen[turn], said[turn], 0, turn) for turn in range(turns))
    scores = (Score("exact", number / 4, correct=number > 1),)
    return Group(
        task.id, task, (Episode(f"{task.id}/0", task.id, task.id, 0, (thread,), played, Status.FINISHED, scores=scores),)
    )


def evaluation(store: MediaStore, step: int) -> list[Group]:
    """Three groups: one with a picture, one with a video and a sound, and one that is not asked for."""
    picture = store.put(encode_png(Image.new("RGB", (24, 20), (step, 0, 0))), "picture", "row 1")
    video, sound = store.put(CLIP, "video", "row 2", middle(frames=3)), store.put(WAVE, "sound", "row 2")
    return [answered(1, step, picture), answered(2, step, video, sound), answered(3, step)]


def logged(name: str, run_dir: Path, logging: LoggingSection = LOGGED) -> None:
    """Two evaluations of a run that is continued after the first."""
    store = MediaStore(run_dir / "media")
    for first in (0, 1):
        logger = build("logger", name, {}, "logging.loggers", run_dir=run_dir, logging=logging)
        logger.started(RunStart("demo", 2, first=first, recipe={"steps": 2, "model": {"path": "m"}, "mean@4": [1]}))
        logger.stepped(first + 1, {"reward/mean": 0.5 + first, "eval/mean@4": 0.25})
        logger.generated(first + 1, evaluation(store, first + 1), store)
        logger.finished()


def test_the_table_of_samples_has_a_row_for_each_step_and_columns_for_each_sample() -> None:
    table = SampleTable()
    for step in (0, 10):
        groups = [answered(number, step, turns=number) for number in (1, 2)]
        table.add(step, [(group.task, group.episodes[0]) for group in groups])
    assert table.columns == ["step", "input_1", "output_1", "score_1", "input_2", "output_2", "score_2"]
    assert [row[0] for row in table.rows] == [0, 10]
    assert table.rows[0][1:4] == ["user: what is 1?", "<1|at 0>", 0.25]
    assert table.rows[1][5] == "assistant: <2|at 10>\n\nuser: again 1\n\nassistant: <2|at 10>"
    table.add(20, [(answered(1, 20).task, answered(1, 20).episodes[0])])
    assert {len(row) for row in table.rows} == {7}


def test_an_episode_without_turns_has_its_question_as_input() -> None:
    task = Task("t", (user("why?"),))
    assert input_and_output(task, Episode("e", "t", "g", 0, (), (), Status.FAILED)) == ("user: why?", "")


def test_tensorboard_shows_episodes_as_tables_pictures_clips_and_sounds(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = events.Images("eval/pictures/1")
    assert [(one.step, one.width, one.height) for one in found] == [(1, 24, 20), (2, 24, 20)]
    with Image.open(BytesIO(found[1].encoded_image_string)) as picture:
        assert picture.getpixel((0, 0)) == (2, 0, 0)
    with Image.open(BytesIO(events.Images("eval/videos/2")[0].encoded_image_string)) as clip:
        assert (clip.format, clip.n_frames) == ("GIF", 3)  # type: ignore[attr-defined]
    (heard, _) = events.Audio("eval/sounds/3")
    assert (heard.encoded_audio_string[:4], heard.sample_rate) == (b"RIFF", 16000)
    (first, second) = (
        event.tensor_proto.string_val[0].decode() for event in events.Tensors("val/generations/text_summary")
    )
    assert first.count("\n") == 3
    assert "&lt;1\\|at 1>" in first
    assert "at 2" in second
    assert len(events.Tensors("eval/generations/text_summary")) == 2


def test_wandb_shows_the_table_of_samples_videos_and_sounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    store = MediaStore(tmp_path / "media")
    logger = build("logger", "wandb", {}, "logging.loggers", run_dir=tmp_path, logging=LOGGED)
    logger.started(RunStart("demo", 2, recipe={"steps": 2}))
    for step in (1, 2):
        logger.generated(step, evaluation(store, step), store)
        logger.stepped(step, {"reward/mean": 0.5})
    logger.finished()
    (files,) = (tmp_path / "wandb").glob("offline-run-*/files/media")
    tables = [json.loads(path.read_text()) for path in sorted(files.glob("table/val/generations_*.json"))]
    assert [len(table["data"]) for table in tables] == [1, 2], "each step logs the rows before it, too"
    assert tables[1]["columns"][:4] == ["step", "input_1", "output_1", "score_1"]
    assert [row[0] for row in tables[1]["data"]] == [1, 2]
    assert {path.read_bytes() for path in files.glob("videos/eval/*.mp4")} == {CLIP}
    assert {path.read_bytes()[:4] for path in files.glob("audio/eval/*.wav")} == {b"RIFF"}
    assert len(list(files.glob("images/eval/*.png"))) == 2


def test_mlflow_gets_metrics_parameters_tables_and_media_and_a_resumed_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'sensorium[mlflow]'")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    logged("mlflow", tmp_path)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("trial").experiment_id])
    assert (run.info.run_name, run.info.status) == ("demo", "FINISHED")
    assert run.data.params == {"steps": "2", "model.path": "m", "mean_4": "[1]"}
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(one.step, one.value) for one in history] == [(1, 0.5), (2, 1.5)]
    assert run.data.metrics["eval/mean_4"] == 0.25
    files = {path.relative_to(tmp_path): path for path in (tmp_path / "mlflow_artifacts").rglob("*") if path.is_file()}
    table = json.loads(next(path for path in files.values() if path.match("val/generations.json")).read_text())
    assert table["columns"] == ["step", "input_1", "output_1", "score_1", "input_2", "output_2", "score_2"]
    assert [row[0] for row in table["data"]] == [1, 2]
    assert {path.read_bytes() for path in files.values() if path.match("eval/videos/*.mp4")} == {CLIP}
    assert len([path for path in files.values() if path.match("eval/sounds/*.wav")]) == 2
    assert len([path for path in files.values() if path.suffix == ".png"]) == 2


def test_trackio_gets_metrics_tables_and_media(tmp_path: Path) -> None:
    """In a process of its own: trackio reads TRACKIO_DIR when it is imported."""
    pytest.importorskip("trackio", reason="trackio is not installed: pip install 'sensorium[trackio]'")
    import sqlite3
    import subprocess

    code = f"from pathlib import Path; from {__name__} import logged; logged('trackio', Path({str(tmp_path)!r}))"
    places = os.pathsep.join(place for place in sys.path if place)
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "store"), "PYTHONPATH": places}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    with sqlite3.connect(tmp_path / "store/trial.db") as db:
        rows = {step: json.loads(metrics) for step, metrics in db.execute("SELECT step, metrics FROM metrics ORDER BY id")}
    assert sorted(rows) == [1, 2]
    shown = json.dumps(rows)
    for name in ("val/generations", "eval/generations", "eval/pictures/1", "eval/videos/2", "eval/sounds/3"):
        assert name in shown
    kinds = {path.suffix for path in (tmp_path / "store/media").rglob("*") if path.is_file()}
    assert {".png", ".mp4", ".wav"} <= kinds


def test_a_lost_medium_is_left_out_and_counted_and_the_rest_is_shown(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    store = MediaStore(tmp_path / "media")
    groups = evaluation(store, 1)
    (picture,) = groups[0].task.messages[0].media
    (tmp_path / "media" / picture.hash).unlink()
    told: list[str] = []
    inner = build("logger", "tensorboard", {}, "logging.loggers", run_dir=tmp_path, logging=LOGGED)
    logger = BackgroundLogger("tensorboard", inner)
    logger.tell = told.append
    logger.generated(1, groups, MediaStore(tmp_path / "media"))
    logger.stepped(1, {"reward/mean": 0.5})
    logger.finished()
    assert logger.failures == len(told) == 1
    assert picture.hash[:12] in told[0]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert len(events.Audio("eval/sounds/2")) == len(events.Scalars("reward/mean")) == 1


class Broken(Logger):
    """Fails whenever it is given metrics."""

    def __init__(self, run_dir: Path, logging: LoggingSection) -> None:
        self.path = run_dir / "seen.txt"

    def started(self, run: RunStart) -> None:
        raise ConnectionError("no route to the tracker")

    def stepped(self, step: int, metrics: Metrics) -> None:
        with self.path.open("a") as file:
            file.write(f"{step}\n")
        raise ValueError(f"step {step} is not wanted")


class Said(Watcher):
    """What a person would read."""

    shown = True

    def __init__(self) -> None:
        self.lines: list[str] = []

    def noted(self, text: str) -> None:
        self.lines.append(text)


def test_a_logger_that_fails_is_reported_once_and_counted_and_the_run_is_the_same(tmp_path: Path) -> None:
    said = Said()
    train(small(tmp_path / "plain" / "run"))
    train(small(tmp_path / "broken" / "run", logging={"loggers": [f"{__name__}:Broken"]}), watchers=[said])
    broken, plain = (read_metrics(tmp_path / name / "run/metrics.jsonl") for name in ("broken", "plain"))
    (name,) = {key for row in broken for key in row if key.startswith("logger/")}
    counts = [row[name] for row in broken]
    assert counts == sorted(counts)
    assert 1 <= counts[-1] <= 1 + len(broken)
    assert [repeatable(row) for row in broken] == [repeatable(row) for row in plain]
    assert (tmp_path / "broken/run/seen.txt").read_text().split() == ["1", "2", "3"], "it is asked again in each step"
    attention = [line for line in said.lines if "no route to the tracker" in line]
    assert len(attention) == 1
    assert "Broken" in attention[0]
    assert name in attention[0]
    assert [line for line in said.lines if "4 times" in line]


class Hanging(Logger):
    """Never comes back from its first step, until it is let go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.steps: list[int] = []

    def stepped(self, step: int, metrics: Metrics) -> None:
        self.steps.append(step)
        self.go_on.wait()


def test_a_logger_that_hangs_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sensorium.report.watcher.MOST_WAITING", 3)
    inner, told = Hanging(), list[str]()
    logger = BackgroundLogger("slow:One", inner, patience_s=0.01)
    logger.tell = told.append
    for step in range(1, 6):
        logger.stepped(step, {})
    assert logger.own_metrics() == {"logger/slow_One_failures": 2.0}
    logger.finished()
    assert len(told) == 2
    assert inner.steps == [1]
    inner.go_on.set()


def test_calls_of_a_logger_are_made_in_their_order_and_those_it_leaves_out_cost_no_thread() -> None:
    class Order(Logger):
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def started(self, run: RunStart) -> None:
            self.calls.append(run.name)

        def stepped(self, step: int, metrics: Metrics) -> None:
            self.calls.append(step)

        def finished(self) -> None:
            self.calls.append("finished")

    inner = Order()
    logger = BackgroundLogger("order", inner)
    logger.progress(1)
    assert logger._worker is None
    logger.started(RunStart("demo", 3))
    for step in range(1, 4):
        logger.stepped(step, {"reward/mean": 1.0})
    logger.finished()
    assert inner.calls == ["demo", 1, 2, 3, "finished"]
    assert logger.failures == 0

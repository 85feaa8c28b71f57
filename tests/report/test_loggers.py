"""Optional loggers write what they are told, and say what to install when they cannot."""

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from PIL import Image

from sensorium.recipe.load import load_recipe
from sensorium.recipe.registry import build
from sensorium.recipe.schema import LoggingSection
from sensorium.report.watcher import RunStart
from sensorium.trainer.run import train
from sensorium.vocabulary.errors import NothingTrained, SensoriumError


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


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_with_its_remedy(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [known for known in sys.modules if known.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SensoriumError, match=rf"pip install .*{name}"):
        build("logger", name, {}, "logging.loggers", run_dir=tmp_path, logging=LoggingSection())


def test_wandb_stays_offline_unless_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = build("logger", "wandb", {}, "logging.loggers", run_dir=tmp_path, logging=LoggingSection(project="trial"))
    logger.started(RunStart("demo", 1, recipe={"steps": 1}))
    logger.stepped(1, {"reward/mean": 0.5})
    logger.finished()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_wandb_keeps_no_key_of_the_recipe_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

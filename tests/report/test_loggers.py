"""Optional loggers write what they are told, and say what to install when they cannot."""

import sys
from pathlib import Path

import pytest

from sensorium.recipe.names import build
from sensorium.recipe.schema import LoggingSection
from sensorium.report.watcher import RunStart
from sensorium.vocabulary.errors import SensoriumError


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
    with pytest.raises(SensoriumError, match=f"pip install {name}"):
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

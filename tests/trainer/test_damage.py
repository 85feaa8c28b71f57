"""A run directory with anything in it damaged is gone on with and exported right, or refused in one paragraph."""

import random
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sensorium.cli.export import export
from sensorium.recipe.load import load_recipe
from sensorium.report.page import write_report
from sensorium.runs.checkpoint_layout import checkpoint_of_run
from sensorium.runs.metrics import read_metrics, repeatable
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.run import train
from sensorium.vocabulary.errors import SensoriumError
from tests.trainer.small import small
from tests.trainer.test_going_on import Notes

TRIES = 8


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with evaluations, four steps long."""
    held_out = {"train": [{"source": "shapes", "options": {"size": 8, "picture_size": 56}}]}
    tasks = held_out | {"evaluate": [{"source": "shapes", "options": {"size": 2, "picture_size": 56}}]}
    settings = {"evaluation": {"every": 1}, "model": {"path": "tiny:qwen2_5_vl", "device": "cpu"}}
    return train(small(tmp_path_factory.mktemp("whole") / "run", "steps=4", tasks=tasks, **settings))


def damage(run: Path, draw: random.Random) -> str:
    """Do something to a file of a run; returns what."""
    path = draw.choice(sorted(p for p in run.rglob("*") if p.is_file() and p.name != "run.lock"))
    name, data = str(path.relative_to(run)), bytearray(path.read_bytes())
    kind = draw.choice(["flip", "cut", "empty", "garbage", "remove", "append", "folder", "zero"])
    if kind == "flip" and data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del data[draw.randrange(len(data) + 1) :]
    elif kind == "empty":
        data.clear()
    elif kind == "garbage":
        data = bytearray(draw.randbytes(200) + b"\n" + draw.randbytes(50))
    elif kind == "append":
        data += b'{"step": "x"}\n[]\n'
    elif kind == "zero" and data:
        at = draw.randrange(len(data))
        data[at : at + 64] = bytes(len(data[at : at + 64]))
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind != "remove":
        path.write_bytes(data)
    return f"{kind} {name}"


def test_random_damage_never_gives_a_traceback_nor_another_result(whole: Path, tmp_path: Path) -> None:
    rows = [repeatable(row) for row in read_metrics(whole / "metrics.jsonl")]
    weights = {path.parent.name: load_file(path) for path in whole.glob("checkpoints/*/model.safetensors")}
    chosen = checkpoint_of_run(whole).name
    draw, resumed = random.Random(0), 0
    for tried in range(TRIES):
        run = tmp_path / f"run{tried}"
        shutil.copytree(whole, run)
        what = [damage(run, draw) for _ in range(draw.choice([1, 1, 3]))]
        try:
            with suppress(SensoriumError):
                write_report(RunDirectory(run))
            with suppress(SensoriumError):
                found = checkpoint_of_run(run)
                export(found, run / "exported")
                assert found.name == chosen
                assert_same(load_file(run / "exported" / "model.safetensors"), weights[chosen])
            with suppress(SensoriumError):
                notes = Notes()
                train(load_recipe(run), resume=True, watchers=[notes])
                resumed += 1
                left = [repeatable(row) for row in read_metrics(run / "metrics.jsonl")]
                told = any("lacks the rows" in text for text in notes.texts)
                assert left == ([row for row in rows if row in left] if told else rows)
                assert_same(load_file(run / "checkpoints/step_000004/model.safetensors"), weights["step_000004"])
        except BaseException as error:
            raise AssertionError(f"after {what}: {type(error).__name__}: {error}") from error
        shutil.rmtree(run)
    assert resumed


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)

"""Runs that are killed and resumed, and what they must share with the uninterrupted run: all but times.

The recipes are those of studies/recipes.py. tests/trainer/test_resume.py kills each once at a chosen moment;
studies/kills.py kills some of them at random moments, many times.
"""

import os
import shutil
import signal
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from sensorium.recipe.load import load_recipe
from sensorium.report.watcher import Metrics, Watcher
from sensorium.runs.checkpoint_layout import ADAPTER_FOLDER, CheckpointFolder
from sensorium.runs.metrics import read_metrics, repeatable
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.run import train


class PhaseFile(Watcher):
    """Keeps in a file beside the run which phase of which step it is in, so that a kill can be told by its moment."""

    def __init__(self, directory: Path) -> None:
        self.path = phase_file(directory)
        self.path.write_text("start")

    def phase(self, step: int, name: str, total: int = 0) -> None:
        """Write the phase."""
        self.path.write_text(name)

    def stepped(self, step: int, metrics: Metrics) -> None:
        """After a step's rows comes its checkpoint."""
        self.path.write_text("checkpoint or end of step")


class Moment(Watcher):
    """Acts as a step enters a phase: ``3:update``; ``3:rollout:2`` is the second time step 3 enters it."""

    def __init__(self, moment: str, act: Callable[[], object]) -> None:
        step, self.name, *nth = moment.split(":")
        self.step, self.left, self.act = int(step), int(nth[0]) if nth else 1, act

    def phase(self, step: int, name: str, total: int = 0) -> None:
        """Count the phases down."""
        if (step, name) == (self.step, self.name):
            self.left -= 1
            if not self.left:
                self.act()


def train_recipe(recipe: str, directory: str, mode: str = "", copy: str = "") -> None:
    """Train a recipe file. Mode: ``resume``, or a moment at which the process kills itself (``3:update``).

    With ``copy`` it goes on at that moment, and leaves there what a kill would have left: the run's files as they are.
    A run that was killed before its first checkpoint is resumed from the beginning.
    """

    def act() -> None:
        if not copy:
            os.kill(os.getpid(), signal.SIGKILL)
        shutil.copytree(directory, copy, copy_function=copy_if_there)

    watchers: list[Watcher] = [Moment(mode, act)] if ":" in mode else [PhaseFile(Path(directory))]
    saved = bool(CheckpointFolder(RunDirectory(Path(directory)).checkpoints).complete())
    again = mode == "resume"
    found = load_recipe(Path(recipe), [f"run_dir={directory}"])
    train(found, resume=again and saved, restart=again and not saved, watchers=watchers)


def copy_if_there(source: str, target: str) -> None:
    """Copy a file of a run that goes on: a clip that its threads evict meanwhile would be gone after a kill, too."""
    with suppress(FileNotFoundError):
        shutil.copy2(source, target)


def phase_file(directory: Path) -> Path:
    """Where a run's phase is kept: beside the run, which it is no part of."""
    return directory.with_name(f"{directory.name}.phase")


def differences(whole: Path, again: Path) -> list[str]:
    """What a resumed run does not share with the uninterrupted one; equal runs give nothing."""
    rows = [[repeatable(row) for row in read_metrics(path / "metrics.jsonl")] for path in (whole, again)]
    found = ["metrics.jsonl"] if rows[0] != rows[1] else []
    names = [{str(p.relative_to(path)) for p in _same_bytes(path)} for path in (whole, again)]
    found += sorted(names[0] ^ names[1])
    found += [name for name in sorted(names[0] & names[1]) if (whole / name).read_bytes() != (again / name).read_bytes()]
    found += ["ledger.sqlite"] if _ledger(whole) != _ledger(again) else []
    weights = [load_file(next(_last_checkpoint(path).glob("*.safetensors"))) for path in (whole, again)]
    if weights[0].keys() != weights[1].keys():
        return [*found, "names of weights"]
    return found + [name for name, tensor in weights[0].items() if not tensor.equal(weights[1][name])]


def moved(run: Path) -> bool:
    """True if training changed the weights between the first and the last checkpoint that are kept."""
    first, last = (load_file(next(path.glob("*.safetensors"))) for path in _checkpoints(run)[:: len(_checkpoints(run)) - 1])
    return any(not tensor.equal(first[name]) for name, tensor in last.items())


def _same_bytes(run: Path) -> list[Path]:
    """Files that equal runs write byte for byte."""
    folders = [run / "episodes", run / "eval", _last_checkpoint(run) / ADAPTER_FOLDER]
    return [path for folder in folders for path in folder.glob("*") if path.is_file()]


def _ledger(run: Path) -> dict[str, list[Any]]:
    """Every table of the ledger, in one order."""
    with sqlite3.connect(run / "ledger.sqlite") as ledger:
        tables = [name for (name,) in ledger.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
        return {name: sorted(ledger.execute(f"SELECT * FROM {name}").fetchall(), key=repr) for name in tables}


def _last_checkpoint(run: Path) -> Path:
    return _checkpoints(run)[-1]


def _checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step_*"))

"""The run directory: where a run keeps everything."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

from sensorium.runs.durable import read_json, rewrite_rows, write_whole, writing
from sensorium.vocabulary.errors import RecordError

STEP = re.compile(r"step_(\d+)")


class RunDirectory:
    """Paths below ``runs/<name>``."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.recipe = self.path / "recipe.yaml"
        self.modules = self.path / "modules.json"
        self.source = self.path / "source.json"
        self.tasks = self.path / "tasks.json"
        self.metrics = self.path / "metrics.jsonl"
        self.health = self.path / "health.jsonl"
        self.ledger = self.path / "ledger.sqlite"
        self.report = self.path / "report.html"
        self.episodes = self.path / "episodes"
        self.media = self.path / "media"
        self.decoded = self.path / "decoded"
        self.eval = self.path / "eval"
        self.checkpoints = self.path / "checkpoints"
        self.kept = self.path / "kept"
        self.reference = self.path / "reference"

    def create(self) -> "RunDirectory":
        """Make the folders."""
        for folder in (self.path, self.episodes, self.media, self.eval, self.checkpoints):
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
        return self

    def exists(self) -> bool:
        """True if a run was started here."""
        return self.recipe.exists()

    def is_barren(self) -> bool:
        """True if the run here never finished a step: a start that failed, which costs nothing to forget."""
        kept = (self.checkpoints, self.kept, self.eval)
        return not self.metrics.exists() and not any(folder.is_dir() and any(folder.iterdir()) for folder in kept)

    def how_to_continue(self) -> str:
        """How a run that was stopped goes on: from its last checkpoint, or from the start where none was written yet."""
        if any(self.checkpoints.glob("step_*")):
            return f"to go on from the last checkpoint: sensorium train {self.path} --resume"
        again = "the same command starts over" if self.is_barren() else "the same command with --restart starts over"
        return f"no checkpoint was written yet (checkpoint.every says how often that is done): {again}"

    def clear(self) -> None:
        """Take away a barren run's files; anything else in the folder stays."""
        if self.exists():
            self.recipe.unlink()
            for path in [
                p for pattern in ("ledger.sqlite*", "report.html", "health.jsonl") for p in self.path.glob(pattern)
            ]:
                path.unlink()

    def forget(self, *, ledger: bool) -> None:
        """Take away what a run has written: rows, episodes, evaluations, report, and the ledger if asked to."""
        for path in (self.metrics, self.health, self.report, *(self.path.glob("ledger.sqlite*") if ledger else ())):
            path.unlink(missing_ok=True)
        for folder in (self.episodes, self.eval):
            for path in folder.glob("step_*"):
                path.unlink()

    def recipe_until(self, step: int) -> Path:
        """The recipe that a run had until a step, where it went on with another."""
        return self.path / f"recipe_until_{step_name(step)}.yaml"

    def episodes_of(self, step: int) -> Path:
        """The episodes of a training step."""
        return self.episodes / f"{step_name(step)}.jsonl"

    def summary_of(self, step: int, name: str = "eval") -> Path:
        """The summary of an evaluation at a step."""
        return self.eval / f"{step_name(step)}_{name}.json"

    def eval_episodes_of(self, step: int, name: str = "eval") -> Path:
        """The episodes of an evaluation at a step."""
        return self.eval / f"{step_name(step)}_{name}.jsonl"

    def checkpoint_of(self, step: int) -> Path:
        """The checkpoint of a step."""
        return self.checkpoints / step_name(step)

    def write_summary(self, step: int, summary: dict[str, Any]) -> Path:
        """Keep an evaluation's summary under its name."""
        path = self.summary_of(step, str(summary.get("name", "eval")))
        write_whole(path, json.dumps({"step": step, **summary}, indent=1) + "\n")
        return path

    def summaries(self) -> list[dict[str, Any]]:
        """Every evaluation's summary, by step, then name."""
        found = [_summary(path) for path in sorted(self.eval.glob("step_*.json"))]
        return sorted(found, key=lambda summary: (summary["step"], summary["name"]))

    def drop_after(self, step: int) -> None:
        """Forget rows and files of steps past ``step``: a resumed run writes them again."""
        for rows in (self.metrics, self.health):
            rewrite_rows(rows, partial(_belongs_to, rows, step))
        for folder in (self.episodes, self.eval):
            for path in folder.glob("step_*"):
                if STEP.match(path.name) and step_of(path) > step:
                    path.unlink()


def _belongs_to(path: Path, last: int, row: dict[str, Any]) -> bool:
    """True if a row is of a step up to ``last``."""
    step = row.get("step", 0)
    if not isinstance(step, int):
        raise RecordError(f"'{path}' is damaged: the step of a row is no number ({str(row)[:60]}…). Mend or remove it.")
    return step <= last


def _summary(path: Path) -> dict[str, Any]:
    """The summary in a file; one that lacks what every summary has is damaged."""
    way_out = "Remove it (that evaluation is then missing in the report), or put back a copy."
    summary = read_json(path, way_out)
    if not isinstance(summary.get("step"), int) or not isinstance(summary.get("name"), str):
        raise RecordError(f"'{path}' is damaged: it is no evaluation's summary. {way_out}")
    return summary


def step_name(step: int) -> str:
    """The name of a step's files: ``step_000012``."""
    return f"step_{step:06d}"


def step_of(path: Path) -> int:
    """The step a file or folder belongs to."""
    match = STEP.match(path.name)
    assert match, f"'{path}' is not named after a step"
    return int(match.group(1))

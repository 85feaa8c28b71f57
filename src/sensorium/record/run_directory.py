"""The run directory: where a run keeps everything."""

import json
import re
from pathlib import Path
from typing import Any

from sensorium.record.durable import rewrite_rows, write_whole

STEP = re.compile(r"step_(\d+)")


class RunDirectory:
    """Paths below ``runs/<name>``."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.recipe = self.path / "recipe.yaml"
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
            folder.mkdir(parents=True, exist_ok=True)
        return self

    def exists(self) -> bool:
        """True if a run was started here."""
        return self.recipe.exists()

    def is_barren(self) -> bool:
        """True if the run here never finished a step: a start that failed, which costs nothing to forget."""
        kept = (self.checkpoints, self.kept, self.eval)
        return not self.metrics.exists() and not any(folder.is_dir() and any(folder.iterdir()) for folder in kept)

    def clear(self) -> None:
        """Take away a barren run's files; anything else in the folder stays."""
        if self.exists():
            self.recipe.unlink()
            for path in [
                p for pattern in ("ledger.sqlite*", "report.html", "health.jsonl") for p in self.path.glob(pattern)
            ]:
                path.unlink()

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
        found = [json.loads(path.read_text()) for path in sorted(self.eval.glob("step_*.json"))]
        return sorted(found, key=lambda summary: (summary["step"], summary["name"]))

    def drop_after(self, step: int) -> None:
        """Forget rows and files of steps past ``step``: a resumed run writes them again."""
        for rows in (self.metrics, self.health):
            rewrite_rows(rows, lambda row: row.get("step", 0) <= step)
        for folder in (self.episodes, self.eval):
            for path in folder.glob("step_*"):
                if step_of(path) > step:
                    path.unlink()


def step_name(step: int) -> str:
    """The name of a step's files: ``step_000012``."""
    return f"step_{step:06d}"


def step_of(path: Path) -> int:
    """The step a file or folder belongs to."""
    match = STEP.match(path.name)
    assert match, f"'{path}' is not named after a step"
    return int(match.group(1))

"""Metrics for Weights & Biases. Offline unless WANDB_MODE says otherwise, so that nothing leaves the machine unasked."""

import os
from pathlib import Path
from typing import Any

from sensorium.recipe.schema import LoggingSection
from sensorium.report.watcher import Metrics, RunStart, Summary, Watcher
from sensorium.vocabulary.errors import SensoriumError


class WandbLogger(Watcher):
    """Logs to a wandb run named after the run directory, kept below ``<run>/wandb``; ``wandb sync`` uploads it later."""

    def __init__(self, run_dir: Path, logging: LoggingSection) -> None:
        try:
            import wandb
        except ImportError as error:
            raise SensoriumError(
                "logging.loggers asks for wandb, which is not installed; run: pip install wandb"
            ) from error
        self._wandb: Any = wandb
        self._run_dir, self._project = run_dir, logging.project
        self._run: Any = None

    def started(self, run: RunStart) -> None:
        """Open the run with its recipe as config."""
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            project=self._project,
            name=run.name,
            dir=str(self._run_dir),
            config=dict(run.recipe),
            mode=os.environ.get("WANDB_MODE", "offline"),
        )

    def stepped(self, step: int, metrics: Metrics) -> None:
        """Log a step's metrics."""
        self._run.log(dict(metrics), step=step)

    def evaluated(self, step: int, summary: Summary) -> None:
        """Log an evaluation that no step's row holds: the one at the start."""
        if step == 0 and summary.get("accuracy") is not None:
            self._run.log({"eval/accuracy": summary["accuracy"]}, step=0)

    def finished(self) -> None:
        """Close the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None

"""Metrics for TensorBoard, written with its own event writer (no torch)."""

import time
from pathlib import Path
from typing import Any

from sensorium.recipe.schema import LoggingSection
from sensorium.report.watcher import Metrics, RunStart, Summary, Watcher
from sensorium.vocabulary.errors import SensoriumError


class TensorboardLogger(Watcher):
    """Writes scalars below ``<run>/tensorboard``. A resumed run tells TensorBoard to forget the steps it repeats."""

    def __init__(self, run_dir: Path, logging: LoggingSection) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise SensoriumError(
                "logging.loggers asks for tensorboard, which is not installed; run: pip install 'sensorium[tensorboard]'"
            ) from error
        self._events, self._summaries = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(run_dir / "tensorboard"))

    def started(self, run: RunStart) -> None:
        """Mark where this session begins."""
        session = self._events.SessionLog(status=self._events.SessionLog.START)
        self._add(run.first + 1, session_log=session)

    def stepped(self, step: int, metrics: Metrics) -> None:
        """Write a step's scalars."""
        values = [self._summaries.Summary.Value(tag=tag, simple_value=float(value)) for tag, value in metrics.items()]
        self._add(step, summary=self._summaries.Summary(value=values))

    def evaluated(self, step: int, summary: Summary) -> None:
        """Write an evaluation that no step's row holds: the one at the start."""
        if step == 0 and summary.get("accuracy") is not None:
            self.stepped(0, {"eval/accuracy": summary["accuracy"]})

    def finished(self) -> None:
        """Flush and close."""
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **content))

"""Loggers: TensorBoard, through its own event writer (without torch), and wandb."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sensorium.data.media_store import MediaStore
from sensorium.recipe.schema import LoggingSection
from sensorium.report.watcher import Metrics, RunStart, Summary, Watcher
from sensorium.vocabulary.content import Text, assistant
from sensorium.vocabulary.episode import Episode, Group
from sensorium.vocabulary.errors import SensoriumError
from sensorium.vocabulary.secrets import without_keys


class TensorboardLogger(Watcher):
    """Writes scalars below ``<run>/tensorboard``. After a resume TensorBoard drops the steps that are repeated."""

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
        session = self._events.SessionLog(status=self._events.SessionLog.START)
        self._add(run.first + 1, session_log=session)

    def stepped(self, step: int, metrics: Metrics) -> None:
        values = [self._summaries.Summary.Value(tag=tag, simple_value=float(value)) for tag, value in metrics.items()]
        self._add(step, summary=self._summaries.Summary(value=values))

    def evaluated(self, step: int, summary: Summary) -> None:
        """Write the evaluation at the start, which belongs to no step."""
        if step == 0 and summary.get("accuracy") is not None:
            self.stepped(0, {"eval/accuracy": summary["accuracy"]})

    def finished(self) -> None:
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **content))


COLUMNS = ["step", "task", "text", "reward", "correct", "status"]


def conversation(episode: Episode) -> str:
    """An episode as text, role by role; a medium is shown as its kind in angle brackets."""
    messages = list(episode.head)
    for turn in episode.turns:
        messages += [*turn.observation, assistant(turn.response.text)]
    texts = []
    for message in messages:
        blocks = (block.text if isinstance(block, Text) else f"<{block.kind}>" for block in message.content)
        texts.append(f"{message.role}: {''.join(blocks)}")
    return "\n\n".join(texts)


class WandbLogger(Watcher):
    """Logs to a wandb run in ``WANDB_DIR``, else below ``<run>/wandb``; ``wandb sync`` uploads it later."""

    def __init__(self, run_dir: Path, logging: LoggingSection) -> None:
        try:
            import wandb
        except ImportError as error:
            raise SensoriumError(
                "logging.loggers asks for wandb, which is not installed; run: pip install 'sensorium[wandb]'"
            ) from error
        self._wandb: Any = wandb
        self._run_dir, self._project, self._generations = run_dir, logging.project, logging.generations
        self._run: Any = None

    def started(self, run: RunStart) -> None:
        folder = Path(os.environ.get("WANDB_DIR") or self._run_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SensoriumError(f"wandb cannot write to '{folder}' (WANDB_DIR): {error.strerror}.") from error
        config = without_keys(run.recipe)
        # wandb would store the command line, whose overrides may hold keys that the config hides.
        hidden = {} if config == run.recipe else {"settings": self._wandb.Settings(x_disable_meta=True)}
        self._run = self._wandb.init(
            project=self._project,
            name=run.name,
            dir=str(folder),
            config=config,
            mode=os.environ.get("WANDB_MODE", "offline"),
            **hidden,
        )

    def stepped(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def evaluated(self, step: int, summary: Summary) -> None:
        """Log the evaluation at the start, which belongs to no step."""
        if step == 0 and summary.get("accuracy") is not None:
            self._run.log({"eval/accuracy": summary["accuracy"]}, step=0)

    def generated(self, step: int, groups: Sequence[Group], store: MediaStore) -> None:
        """Log ``logging.generations`` episodes: the table ``eval/generations``, and ``eval/pictures``.

        Pictures are not in the table, since wandb would stage those outside the run directory.
        """
        if not self._generations:
            return
        listed = sorted((episode for group in groups for episode in group.episodes), key=lambda episode: episode.index)
        table, images = self._wandb.Table(COLUMNS), []
        for episode in listed[: self._generations]:
            facts = (episode.reward, episode.correct, str(episode.status))
            table.add_data(step, episode.task_id, conversation(episode), *facts)
            messages = [*episode.head, *(message for turn in episode.turns for message in turn.observation)]
            pictures = [medium for message in messages for medium in message.media if medium.kind == "picture"]
            for number, picture in enumerate(pictures, 1):
                images.append(self._wandb.Image(store.picture(picture), caption=f"{episode.task_id}, picture {number}"))
        self._run.log({"eval/generations": table, **({"eval/pictures": images} if images else {})}, step=step)

    def finished(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None

"""Watchers of a run: the trainer calls them, and they never change it. Here: loggers for TensorBoard and wandb."""

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sensorium.data.media_store import MediaStore
from sensorium.recipe.schema import LoggingSection
from sensorium.runs.metrics import Notice
from sensorium.vocabulary.content import Text
from sensorium.vocabulary.episode import Episode, Group
from sensorium.vocabulary.errors import SensoriumError
from sensorium.vocabulary.secrets import without_keys

Metrics = Mapping[str, float]
# An evaluation's summary: name, tasks, episodes, accuracy, interval [low, high], majority and given {answer, share,
# different} (the most frequent of the known and of the model's answers), reward, terms {name: mean}, categories
# {name: {accuracy, interval, tasks, reward, terms}}, length_mean, failed, missing, and of k > 1 samples mean@k, best@k and
# majority@k {value, interval}. ``accuracy`` and ``reward`` are None if nothing was judged.
Summary = Mapping[str, Any]


@dataclass(frozen=True)
class RunStart:
    """The start of a run: ``first`` steps are done already (of a resumed run); the first ``warm_start`` are supervised."""

    name: str
    steps: int
    first: int = 0
    warm_start: int = 0
    episodes_per_step: int = 0
    facts: tuple[str, ...] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)


class Watcher:
    """Base of watchers: methods may be left out. ``shown``: a person sees its notes at once."""

    shown = False

    def started(self, run: RunStart) -> None:
        """The run starts or continues."""

    def phase(self, step: int, name: str, total: int = 0) -> None:
        """A step enters a phase (rollout, score, update, evaluate, …) of ``total`` items, 0 if unknown."""

    def progress(self, done: int) -> None:
        """So many items of the phase are done."""

    def stepped(self, step: int, metrics: Metrics) -> None:
        """A step is over; these are its metrics."""

    def evaluated(self, step: int, summary: Summary) -> None:
        """An evaluation is over."""

    def generated(self, step: int, groups: Sequence[Group], store: MediaStore) -> None:
        """The episodes of an evaluation; the store has their media."""

    def began(self, group: Group) -> None:
        """The first group of RL was played and scored."""

    def diagnosed(self, notice: Notice) -> None:
        """Something is wrong with the run, still, or no longer."""

    def noted(self, text: str) -> None:
        """Something worth a line happened."""

    def attention(self, text: str) -> None:
        """Note something important: also on stderr if no person sees notes."""
        if not self.shown:
            print(text, file=sys.stderr)
        self.noted(text)

    def finished(self) -> None:
        """The run is over, well or not: release resources."""


def _to_each(method: str) -> Any:
    def call(self: "Watchers", *values: Any, **named: Any) -> None:
        for watcher in self.watchers:
            getattr(watcher, method)(*values, **named)

    return call


class Watchers(Watcher):
    """Several watchers as one."""

    def __init__(self, watchers: Iterable[Watcher] = ()) -> None:
        self.watchers = tuple(watchers)
        self.shown = any(watcher.shown for watcher in self.watchers)

    started = _to_each("started")
    phase = _to_each("phase")
    progress = _to_each("progress")
    stepped = _to_each("stepped")
    evaluated = _to_each("evaluated")
    generated = _to_each("generated")
    began = _to_each("began")
    diagnosed = _to_each("diagnosed")
    noted = _to_each("noted")
    finished = _to_each("finished")


class Logger(Watcher):
    """A watcher that writes each step's metrics; the evaluation at the start belongs to no step."""

    def evaluated(self, step: int, summary: Summary) -> None:
        if step == 0 and summary.get("accuracy") is not None:
            self.stepped(0, {"eval/accuracy": summary["accuracy"]})


class TensorboardLogger(Logger):
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

    def finished(self) -> None:
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **content))


COLUMNS = ["step", "task", "text", "reward", "correct", "status"]


def conversation(episode: Episode) -> str:
    """An episode as text, role by role; a medium is shown as its kind in angle brackets."""
    texts = []
    for message in episode.conversation:
        blocks = (block.text if isinstance(block, Text) else f"<{block.kind}>" for block in message.content)
        texts.append(f"{message.role}: {''.join(blocks)}")
    return "\n\n".join(texts)


class WandbLogger(Logger):
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

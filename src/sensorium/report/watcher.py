"""Watchers of a run: the trainer calls them, and they never change it. Here: loggers for TensorBoard, W&B, MLflow, trackio.

A logger gets metrics, and of each evaluation ``logging.generations`` episodes with their media. It runs behind a
``BackgroundLogger``: one that fails or hangs is reported once and counted, and the run goes on as if it were not there.
"""

import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from sensorium.cluster.pool import Call, Worker
from sensorium.data.media_store import MediaStore
from sensorium.recipe.schema import LoggingSection
from sensorium.runs.metrics import Notice
from sensorium.vocabulary.content import Media, Message, Text
from sensorium.vocabulary.episode import Episode, Group
from sensorium.vocabulary.errors import MediaError, SensoriumError
from sensorium.vocabulary.plain import words
from sensorium.vocabulary.secrets import without_keys
from sensorium.vocabulary.task import Task

if TYPE_CHECKING:
    from sensorium.data.decoder import Decoder

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

    def own_metrics(self) -> dict[str, float]:
        """What it counts of itself, for the row of a step."""
        return {}


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

    def own_metrics(self) -> dict[str, float]:
        return {name: value for watcher in self.watchers for name, value in watcher.own_metrics().items()}


MOST_WAITING = 1000  # calls of a logger
PATIENCE_S = 60.0  # for a logger at the end of a run


def _behind(method: str) -> Any:
    def call(self: "BackgroundLogger", *values: Any, **named: Any) -> None:
        self.submit(method, values, named)

    return call


class BackgroundLogger(Watcher):
    """A logger in a thread of its own, which can neither fail a run nor keep it waiting.

    Its calls are made in their order. The first that fails is reported by ``tell``; all are counted in ``failures``. A
    logger that hangs gets no more than ``MOST_WAITING`` calls, and ``PATIENCE_S`` at the end.
    """

    def __init__(self, name: str, logger: Watcher, patience_s: float = PATIENCE_S) -> None:
        self.name, self.logger, self.patience_s = name, logger, patience_s
        self.failures = 0
        self.tell: Callable[[str], None] = lambda text: print(text, file=sys.stderr)
        self._worker: Worker | None = None
        self._open: deque[Call] = deque()

    def submit(self, method: str, values: Sequence[Any], named: Mapping[str, Any]) -> Call | None:
        """Let the logger do this when what was asked before is done; None where it has nothing to do or is too slow."""
        self._count_failures()
        function = getattr(self.logger, method, None)
        if function is None or getattr(function, "__func__", None) is getattr(Watcher, method):
            return None
        if len(self._open) >= MOST_WAITING:
            self._failed(f"it is slow, and {MOST_WAITING:,} calls wait for it")
            return None
        self._worker = self._worker or Worker(f"logger {self.name}")
        call = self._worker.submit(partial(function, *values, **named), self.patience_s)
        self._open.append(call)
        return call

    started = _behind("started")
    phase = _behind("phase")
    progress = _behind("progress")
    stepped = _behind("stepped")
    evaluated = _behind("evaluated")
    generated = _behind("generated")
    began = _behind("began")
    diagnosed = _behind("diagnosed")
    noted = _behind("noted")

    def finished(self) -> None:
        """Let the logger finish what it has begun, as long as ``patience_s`` lasts."""
        last = self.submit("finished", (), {}) or (self._open[-1] if self._open else None)
        if last is not None and not last.wait(self.patience_s):
            self._failed(f"it had not finished {self.patience_s:g} s after the end of the run")
        self._count_failures()
        if self._worker is not None:
            self._worker.stop()
        if self.failures > 1:
            self.tell(f"logging.loggers: '{self.name}' failed {self.failures:,} times in this run; what it shows has gaps.")

    def own_metrics(self) -> dict[str, float]:
        self._count_failures()
        return {f"logger/{re.sub(r'[^a-zA-Z0-9]+', '_', self.name)}_failures": float(self.failures)}

    def _count_failures(self) -> None:
        while self._open and self._open[0].ended is not None:
            error = self._open.popleft().error
            if error is not None:
                self._failed(str(error) if isinstance(error, SensoriumError) else words(error))

    def _failed(self, why: str) -> None:
        self.failures += 1
        if self.failures == 1:
            counter = f"{next(iter(self.own_metrics()))} in the metrics counts on"
            self.tell(f"ATTENTION: logging.loggers: '{self.name}' failed, and the run goes on without: {why}. {counter}.")


class Logger(Watcher):
    """A watcher that writes each step's metrics; the evaluation at the start belongs to no step."""

    def evaluated(self, step: int, summary: Summary) -> None:
        found = {f"eval/{name}": summary[name] for name in ("accuracy", "reward") if summary.get(name) is not None}
        if step == 0 and found:
            self.stepped(0, found)


COLUMNS = ["step", "task", "text", "reward", "correct", "status"]
EPISODES, SAMPLES = "eval/generations", "val/generations"  # tables: a row for each episode, a row for each evaluation
SHOWN_OF_AN_EPISODE = 32  # media
CLIP_BYTES = 16 * 1024 * 1024  # of larger clips the frames that the model was given are sent
CLIPS = {"video/mp4": "mp4", "video/webm": "webm", "image/gif": "gif"}
DECODED_MIB, GIF_MS = 64, 250


def conversation(episode: Episode) -> str:
    """An episode as text, role by role; a medium is shown as its kind in angle brackets."""
    return _text(episode.conversation)


def _text(messages: Iterable[Message]) -> str:
    texts = []
    for message in messages:
        blocks = (block.text if isinstance(block, Text) else f"<{block.kind}>" for block in message.content)
        texts.append(f"{message.role}: {''.join(blocks)}")
    return "\n\n".join(texts)


def input_and_output(task: Task, episode: Episode) -> tuple[str, str]:
    """What the model was given before it first wrote, and all that followed: of one turn the response alone."""
    before = len(episode.head) + len(episode.turns[0].observation) if episode.turns else 0
    messages = episode.conversation
    given = _text(messages[:before] or task.messages)
    if len(episode.turns) == 1:
        return given, episode.response
    return given, _text(messages[before:])


class SampleTable:
    """verl's and VAGEN's table of validation generations: a row for each logged step, three columns for each sample.

    Of two evaluations of two tasks: columns ``step, input_1, output_1, score_1, input_2, output_2, score_2`` and two rows.
    A column has the same task in all rows.
    """

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []

    def add(self, step: int, samples: Sequence[tuple[Task, Episode]]) -> None:
        """Add the row of an evaluation."""
        cells = [cell for task, episode in samples for cell in (*input_and_output(task, episode), episode.reward)]
        self.rows.append([step, *cells])
        width = max(map(len, self.rows))
        self.rows = [row + [None] * (width - len(row)) for row in self.rows]

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        count = (max(map(len, self.rows), default=1) - 1) // 3
        return ["step", *(f"{part}_{n}" for n in range(1, count + 1) for part in ("input", "output", "score"))]


@dataclass(frozen=True)
class SentMedium:
    """A medium as files show it: a picture (PNG), a clip or its frames (GIF), the sound that was heard (WAV)."""

    kind: str
    caption: str
    data: bytes
    suffix: str
    sample_rate: int = 0


class GenerationLogger(Logger):
    """A logger that also shows episodes of evaluations: ``show`` gets the tables and the media of the chosen ones."""

    plays_clips = True  # else it is given the frames of each

    def __init__(self, run_dir: Path, logging: LoggingSection) -> None:
        self.run_dir, self.project, self.generations = run_dir, logging.project, logging.generations
        self.samples = SampleTable()

    def generated(self, step: int, groups: Sequence[Group], store: MediaStore) -> None:
        """Show ``logging.generations`` episodes, one of each task before the second of any."""
        if not self.generations:
            return
        from sensorium.data.decoder import Decoder

        played = [(group.task, episode) for group in groups for episode in group.episodes]
        chosen = sorted(played, key=lambda one: one[1].index)[: self.generations]
        self.samples.add(step, chosen)
        rows = [[step, e.task_id, conversation(e), e.reward, e.correct, str(e.status)] for _, e in chosen]
        unreadable: list[MediaError] = []
        with closing(Decoder(store, memory_mib=DECODED_MIB)) as decoder:
            sent = partial(sent_media, store=store, decoder=decoder, unreadable=unreadable, plays=self.plays_clips)
            media = [one for _, episode in chosen for one in sent(episode)]
        self.show(step, rows, media)
        if unreadable:
            raise MediaError(f"{len(unreadable)} media of the evaluation at step {step} were left out: {unreadable[0]}")

    def show(self, step: int, rows: list[list[Any]], media: Sequence[SentMedium]) -> None:
        """Show the rows of ``COLUMNS``, ``self.samples``, and the media."""
        raise NotImplementedError


def sent_media(
    episode: Episode, store: MediaStore, decoder: "Decoder", unreadable: list[MediaError], *, plays: bool
) -> Iterator[SentMedium]:
    """The media of an episode in their order, each once; those that cannot be read go to ``unreadable``."""
    from sensorium.report.album import asked, given_clips

    given = given_clips(episode)
    media = dict.fromkeys(medium for message in episode.conversation for medium in message.media)
    for number, medium in enumerate(list(media)[:SHOWN_OF_AN_EPISODE], 1):
        caption = f"{episode.task_id}, {medium.kind} {number}"
        try:
            yield _sent(given.get(asked(medium), medium), caption, store, decoder, plays=plays)
        except MediaError as error:
            unreadable.append(error)


def _sent(medium: Media, caption: str, store: MediaStore, decoder: "Decoder", *, plays: bool) -> SentMedium:
    from sensorium.data.media_files import HEAD_BYTES, mime_type
    from sensorium.data.pictures import encode_png
    from sensorium.data.sound import DecodedAudio, encode_wav

    if medium.kind == "picture":
        return SentMedium("picture", caption, encode_png(store.picture(medium)), "png")
    if medium.kind == "video":
        part = medium.parameters
        whole = not getattr(part, "start", 0.0) and getattr(part, "end", None) is None and medium.augmentation is None
        suffix = CLIPS.get(mime_type(store.head_of(medium, HEAD_BYTES), "video"), "")
        if plays and whole and suffix and store.size_of(medium) <= CLIP_BYTES:
            return SentMedium("video", caption, store.bytes_of(medium), suffix)
        return SentMedium("video", caption, _gif_of(decoder.get(medium)), "gif")
    clip = decoder.get(medium)
    assert isinstance(clip, DecodedAudio), "it is a sound"
    return SentMedium("sound", caption, encode_wav(clip.samples, clip.sample_rate), "wav", clip.sample_rate)


def _gif_of(clip: Any) -> bytes:
    """The frames that the model was given, as a picture that moves."""
    from PIL import Image

    first, *others = (Image.fromarray(frame) for frame in clip.frames)
    buffer = BytesIO()
    first.save(buffer, format="GIF", save_all=True, append_images=others, duration=GIF_MS, loop=0)
    return buffer.getvalue()


def _missing(name: str, what: str = "") -> SensoriumError:
    """The error of a logger whose package is not there."""
    return SensoriumError(
        f"logging.loggers asks for {name}, which is not installed; run: pip install 'sensorium[{what or name}]'"
    )


class TensorboardLogger(GenerationLogger):
    """Writes below ``<run>/tensorboard``. After a resume TensorBoard drops the steps that are repeated.

    Tables are texts, clips the frames that the model was given.
    """

    plays_clips = False

    def __init__(self, run_dir: Path, logging: LoggingSection) -> None:
        super().__init__(run_dir, logging)
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise _missing("tensorboard") from error
        self._events, self._summaries, self._tensors = event_pb2, summary_pb2, tensor_pb2
        self._make_writer = partial(EventFileWriter, str(run_dir / "tensorboard"))
        self._writer: Any = None

    def started(self, run: RunStart) -> None:
        session = self._events.SessionLog(status=self._events.SessionLog.START)
        self._add(run.first + 1, session_log=session)

    def stepped(self, step: int, metrics: Metrics) -> None:
        values = [self._summaries.Summary.Value(tag=tag, simple_value=float(value)) for tag, value in metrics.items()]
        self._add(step, summary=self._summaries.Summary(value=values))

    def show(self, step: int, rows: list[list[Any]], media: Sequence[SentMedium]) -> None:
        samples = dict(zip(self.samples.columns, self.samples.rows[-1], strict=True))
        parts = [[samples[f"{part}_{n}"] for part in ("input", "output", "score")] for n in range(1, len(rows) + 1)]
        values = [
            self._text(EPISODES, COLUMNS, rows),
            self._text(SAMPLES, ["input", "output", "score"], parts),
            *(self._medium(n, one) for n, one in enumerate(media, 1)),
        ]
        self._add(step, summary=self._summaries.Summary(value=values))

    def finished(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _text(self, tag: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Any:
        lines = [columns, ["---"] * len(columns), *rows]
        table = "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)
        plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        tensor = self._tensors.TensorProto(dtype="DT_STRING", string_val=[table.encode()])
        tensor.tensor_shape.dim.add(size=1)
        metadata = self._summaries.SummaryMetadata(plugin_data=plugin)
        return self._summaries.Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)

    def _medium(self, number: int, medium: SentMedium) -> Any:
        from PIL import Image

        tag = f"eval/{medium.kind}s/{number}"
        if medium.kind == "sound":
            frames = (len(medium.data) - 44) // 2
            audio = self._summaries.Summary.Audio(
                sample_rate=medium.sample_rate,
                num_channels=1,
                length_frames=frames,
                encoded_audio_string=medium.data,
                content_type="audio/wav",
            )
            return self._summaries.Summary.Value(tag=tag, audio=audio)
        with Image.open(BytesIO(medium.data)) as picture:
            width, height = picture.size
        image = self._summaries.Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=medium.data)
        return self._summaries.Summary.Value(tag=tag, image=image)

    def _add(self, step: int, **content: Any) -> None:
        self._writer = self._writer or self._make_writer()
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **content))


def _cell(value: Any) -> str:
    """A cell of a Markdown table, in which what a model wrote is text."""
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").replace("\n", "<br>")


class WandbLogger(GenerationLogger):
    """Logs to a wandb run in ``WANDB_DIR``, else below ``<run>/wandb``; ``wandb sync`` uploads it later."""

    def __init__(self, run_dir: Path, logging: LoggingSection) -> None:
        super().__init__(run_dir, logging)
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb") from error
        self._wandb: Any = wandb
        self._run: Any = None

    def started(self, run: RunStart) -> None:
        folder = Path(os.environ.get("WANDB_DIR") or self.run_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SensoriumError(f"wandb cannot write to '{folder}' (WANDB_DIR): {error.strerror}.") from error
        config = without_keys(run.recipe)
        # wandb would store the command line, whose overrides may hold keys that the config hides.
        hidden = {} if config == run.recipe else {"settings": self._wandb.Settings(x_disable_meta=True)}
        self._run = self._wandb.init(
            project=self.project,
            name=run.name,
            dir=str(folder),
            config=config,
            mode=os.environ.get("WANDB_MODE", "offline"),
            **hidden,
        )

    def stepped(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def show(self, step: int, rows: list[list[Any]], media: Sequence[SentMedium]) -> None:
        """Log the two tables, and ``eval/pictures``, ``eval/videos`` and ``eval/sounds``.

        Pictures are not in the tables, since wandb would stage those outside the run directory.
        """
        make, found = self._wandb, dict[str, Any]()
        found[EPISODES] = make.Table(columns=COLUMNS, data=rows)
        found[SAMPLES] = make.Table(columns=self.samples.columns, data=self.samples.rows)
        with TemporaryDirectory(prefix="sensorium_wandb_") as folder:
            for number, one in enumerate(media):
                path = Path(folder) / f"{number}.{one.suffix}"
                path.write_bytes(one.data)
                if one.kind == "video":
                    item = make.Video(str(path), caption=one.caption, format=one.suffix)
                else:
                    item = (make.Image if one.kind == "picture" else make.Audio)(str(path), caption=one.caption)
                found.setdefault(f"eval/{one.kind}s", []).append(item)
            self._run.log(found, step=step)

    def finished(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


class TrackioLogger(GenerationLogger):
    """Logs to a trackio run: in ``TRACKIO_DIR``, else where ``trackio show`` looks, or in ``TRACKIO_SPACE_ID``."""

    def __init__(self, run_dir: Path, logging: LoggingSection) -> None:
        super().__init__(run_dir, logging)
        try:
            import trackio
        except ImportError as error:
            raise _missing("trackio") from error
        self._trackio: Any = trackio
        self._run: Any = None

    def started(self, run: RunStart) -> None:
        self._run = self._trackio.init(
            project=self.project,
            name=run.name,
            config=dict(without_keys(run.recipe)),
            resume="allow" if run.first else "never",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def stepped(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def show(self, step: int, rows: list[list[Any]], media: Sequence[SentMedium]) -> None:
        make, found = self._trackio, dict[str, Any]()
        found[EPISODES] = make.Table(columns=COLUMNS, data=rows)
        found[SAMPLES] = make.Table(columns=self.samples.columns, data=self.samples.rows)
        with TemporaryDirectory(prefix="sensorium_trackio_") as folder:
            for number, one in enumerate(media, 1):
                path = Path(folder) / f"{number}.{one.suffix}"
                path.write_bytes(one.data)
                kinds = {"picture": make.Image, "video": make.Video, "sound": make.Audio}
                found[f"eval/{one.kind}s/{number}"] = kinds[one.kind](str(path), caption=one.caption)
            self._run.log(found, step=step)

    def finished(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


RUN_TAG = "sensorium.run_dir"
LONGEST_PARAMETER, MOST_AT_ONCE = 500, 100


class MlflowLogger(GenerationLogger):
    """Logs to MLflow at ``MLFLOW_TRACKING_URI``, else into ``<run>/mlflow.db``: ``mlflow ui --backend-store-uri sqlite:///…``.

    A resumed run goes on in its MLflow run.
    """

    def __init__(self, run_dir: Path, logging: LoggingSection) -> None:
        super().__init__(run_dir, logging)
        try:
            import mlflow
        except ImportError as error:
            raise _missing("mlflow") from error
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # the run has its own
        self._mlflow: Any = mlflow
        self._client: Any = None
        self._run = ""

    def started(self, run: RunStart) -> None:
        folder = self.run_dir.absolute()
        named = os.environ.get("MLFLOW_TRACKING_URI")
        client = self._client = self._mlflow.MlflowClient(tracking_uri=named or f"sqlite:///{folder / 'mlflow.db'}")
        known = client.get_experiment_by_name(self.project)
        place = None if named else (folder / "mlflow_artifacts").as_uri()
        experiment = client.create_experiment(self.project, place) if known is None else known.experiment_id
        mine = f"tags.`{RUN_TAG}` = '{str(folder).replace(chr(39), '')}'"
        before = client.search_runs([experiment], mine, max_results=1) if run.first else []
        if before:
            self._run = before[0].info.run_id
            client.update_run(self._run, status="RUNNING")
            return
        tags = {RUN_TAG: str(folder).replace("'", "")}
        self._run = client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        flat = [
            self._mlflow.entities.Param(_mlflow_name(key), str(value)[:LONGEST_PARAMETER])
            for key, value in _flat(without_keys(run.recipe))
        ]
        for first in range(0, len(flat), MOST_AT_ONCE):
            client.log_batch(self._run, params=flat[first : first + MOST_AT_ONCE])

    def stepped(self, step: int, metrics: Metrics) -> None:
        now = int(time.time() * 1000)
        rows = [
            self._mlflow.entities.Metric(_mlflow_name(name), float(value), now, step) for name, value in metrics.items()
        ]
        self._client.log_batch(self._run, metrics=rows)

    def show(self, step: int, rows: list[list[Any]], media: Sequence[SentMedium]) -> None:
        """Append to the two tables; pictures become images of a step, clips and sounds artifacts."""
        from PIL import Image

        columns = {name: [row[i] for row in rows] for i, name in enumerate(COLUMNS)}
        self._client.log_table(self._run, columns, f"{EPISODES}.json")
        last = zip(self.samples.columns, self.samples.rows[-1], strict=True)
        self._client.log_table(self._run, {name: [value] for name, value in last}, f"{SAMPLES}.json")
        with TemporaryDirectory(prefix="sensorium_mlflow_") as folder:
            for number, one in enumerate(media, 1):
                if one.kind == "picture":
                    with Image.open(BytesIO(one.data)) as picture:
                        self._client.log_image(self._run, picture, key=f"eval/pictures/{number}", step=step)
                    continue
                path = Path(folder) / f"step_{step:06d}_{number}.{one.suffix}"
                path.write_bytes(one.data)
                self._client.log_artifact(self._run, str(path), f"eval/{one.kind}s")

    def finished(self) -> None:
        if self._run:
            self._client.set_terminated(self._run)


def _mlflow_name(name: str) -> str:
    """A name of the characters that MLflow takes."""
    return re.sub(r"[^\w./ :-]", "_", name)


def _flat(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings by their dotted keys."""
    if isinstance(value, Mapping) and value:
        for key, held in value.items():
            yield from _flat(held, f"{place}.{key}" if place else str(key))
    else:
        yield place, value

"""What if: a run's checkpoint answers an episode again, with its media or prompt changed, or from one of its turns on.

Of an episode that showed a picture and answered ``circle``:

    answer    blank the picture: the log-prob of ``circle`` goes from -0.1 to -2.3, and the new answer is ``square``
    map       cover the picture's places one after the other: which of them the answer depends on
    fork      play the environment from its seed, act as recorded up to turn 3, then let the model or a person go on

Invariants: nothing is written to the run. One thread loads and computes, one request at a time; a request that finds too
many waiting is refused, and one whose page is closed ends. All sizes are bounded. A model that nobody asks is freed.
Edited media exist only decoded, for one request, under names of their own (``EditedMedia``).
"""

import asyncio
import base64
import hashlib
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import pairwise
from math import ceil, isclose, sqrt
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import numpy as np
from fastapi import APIRouter
from PIL import Image, ImageFilter
from pydantic import BaseModel, Field, StringConstraints, model_validator
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response as Reply
from starlette.responses import StreamingResponse

from sensorium.data.decoder import Decoded, Decoder
from sensorium.data.made_media import GREY
from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import decode_picture, encode_png
from sensorium.data.sound import DecodedAudio
from sensorium.data.video import DecodedVideo
from sensorium.report.album import loudness, strip_of
from sensorium.runs.checkpoint_layout import CheckpointFolder
from sensorium.runs.episodes import episode_from_json, task_from_json
from sensorium.runs.run_directory import RunDirectory
from sensorium.viewer.episode import BARS, FRAME, FRAMES, head_of, media_of, medium_of
from sensorium.viewer.runs import ViewedRun
from sensorium.vocabulary.content import Media, Message, Text
from sensorium.vocabulary.episode import Episode, MediaSpan, Segment, Status, Thread, Turn
from sensorium.vocabulary.errors import EnvironmentFailure, MediaError, RecordError, SensoriumError
from sensorium.vocabulary.plain import counted, printable
from sensorium.vocabulary.task import Task

if TYPE_CHECKING:  # torch is loaded with the first model
    from sensorium.engines.protocol import Request, Response, Sampling
    from sensorium.models.chat_processor import ChatProcessor
    from sensorium.recipe.schema import Recipe

MOST_WAITING = 4  # requests beside the one that is computed
MOST_S = 120.0  # of one request, loading apart
MOST_CONTEXT = 32_768  # expanded tokens of a context
MOST_NEW = 1024  # tokens of a new response
MOST_CELLS, CELLS = 64, 49  # of a map
MOST_TURNS, MOST_TYPED = 16, 16  # that a fork goes on for, and that a person writes
MOST_TEXT = 100_000  # characters of an edited text
MOST_BODY = 24 << 20  # bytes of a request: one picture as base64
TOGETHER = 8  # contexts of one pass
IDLE_S = 600.0  # after which a model is freed
BEAT_S = 2.0  # between lines while nothing is new, so that a closed page is noticed
GLANCE_S = 0.1  # in which a response that is being written notices that its page was closed
PREVIEW = 384  # pixels of the longer side of a picture in a reply
START = "start"
PREFIX = "what_if"
FORBIDDEN = -1e29  # a log-prob below it is that of a token that the model may not write

Json = dict[str, Any]
Share = Annotated[float, Field(ge=0, le=1)]
Box = tuple[Share, Share, Share, Share]
Typed = Annotated[str, StringConstraints(max_length=MOST_TEXT)]
Found = TypeVar("Found")


class Asked(BaseModel, frozen=True, extra="forbid"):
    """A turn of an episode, and which checkpoint answers: ``start``, a step, or empty for the default one."""

    run: str = Field(max_length=100)
    file: str = Field(max_length=300)
    id: str = Field(max_length=2000)
    turn: int = Field(0, ge=0)
    checkpoint: str = Field("", max_length=20)


class Sampled(BaseModel, frozen=True, extra="forbid"):
    """How a new response is written: greedy at temperature 0."""

    temperature: float = Field(default=0.0, ge=0, le=10)
    seed: int = Field(default=0, ge=0, lt=1 << 31)
    max_new_tokens: int = Field(default=256, ge=1, le=MOST_NEW)


class OtherMedium(BaseModel, frozen=True, extra="forbid"):
    """A medium of another episode of the run; -1: its first one of the same kind."""

    file: str = Field(max_length=300)
    id: str = Field(max_length=2000)
    medium: int = Field(-1, ge=-1)


class MediumEdit(BaseModel, frozen=True, extra="forbid"):
    """A change of one medium of the episode; ``box`` (left, top, right, bottom) are shares of width and height.

    ``blank`` makes it grey or silent, ``crop`` enlarges the box to the whole, ``blur`` has a radius in pixels, ``mute``
    silences seconds of a sound or of a video's sound, ``drop`` shows the frame before instead of a video's ``frame``,
    ``swap`` shows another medium, or the picture of a file in base64.
    """

    medium: int = Field(ge=0)
    change: Literal["blank", "crop", "blur", "mute", "drop", "swap"]
    box: Box = (0.0, 0.0, 1.0, 1.0)
    radius: float = Field(4.0, gt=0, le=64)
    start: float = Field(0.0, ge=0)
    end: float | None = Field(None, gt=0)
    frame: int | None = Field(None, ge=0)
    other: OtherMedium | None = None
    picture: str = Field("", max_length=MOST_BODY)

    @model_validator(mode="after")
    def _whole(self) -> "MediumEdit":
        left, top, right, bottom = self.box
        if left >= right or top >= bottom:
            raise ValueError("the box (left, top, right, bottom) is empty")
        if self.end is not None and self.end <= self.start:
            raise ValueError("end must come after start")
        if self.change == "swap" and (self.other is None) == (not self.picture):
            raise ValueError("swap takes either another medium or a picture")
        if self.change == "drop" and self.frame is None:
            raise ValueError("drop takes the number of a frame")
        return self

    @property
    def words(self) -> str:
        """The change for people."""
        if self.change == "mute":
            return f"mute {self.start:g} s to {'the end' if self.end is None else f'{self.end:g} s'}"
        more = f" {self.radius:g} px" if self.change == "blur" else ""
        more += f" frame {self.frame + 1}" if self.frame is not None else ""
        part = "" if self.box == (0, 0, 1, 1) else f" {' '.join(f'{100 * share:.0f}' for share in self.box)} %"
        return f"{self.change}{more}{part}"


class TextEdit(BaseModel, frozen=True, extra="forbid"):
    """Another text for a block of what was shown: of a turn's observation, or of the head (turn -1)."""

    turn: int = Field(ge=-1)
    message: int = Field(ge=0)
    block: int = Field(ge=0)
    text: Typed


class AskedAnswer(Asked, frozen=True):
    """The log-probs of a written response with and without edits, and a new response."""

    media: tuple[MediumEdit, ...] = Field((), max_length=16)
    texts: tuple[TextEdit, ...] = Field((), max_length=32)
    new: Sampled | None = None


class AskedMap(Asked, frozen=True):
    """How the log-prob of a response moves where places of a picture are covered, ``cells`` of them at most."""

    medium: int = Field(ge=0)
    cells: int = Field(CELLS, ge=2, le=MOST_CELLS)


class AskedFork(Asked, frozen=True):
    """An episode from a turn on: first with the ``responses`` that a person wrote, then, if it shall, by the model."""

    responses: tuple[Typed, ...] = Field((), max_length=MOST_TYPED)
    go_on: bool = True
    new: Sampled = Sampled()

    @model_validator(mode="after")
    def _acts(self) -> "AskedFork":
        if not self.responses and not self.go_on:
            raise ValueError("nobody goes on: give a response, or let the model")
        return self


class Ended(Exception):
    """The page that asked was closed, or the viewer ends."""


class Job:
    """One request: its work, and the lines that its page is sent."""

    def __init__(self, work: "Callable[[Job], Json]") -> None:
        self.work = work
        self.lines: asyncio.Queue[Json] = asyncio.Queue()
        self.cancelled = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._until = 0.0

    def begin(self) -> None:
        """The time that the request may take counts from now on."""
        self._until = time.monotonic() + MOST_S

    @property
    def left_s(self) -> float:
        return self._until - time.monotonic()

    def say(self, words: str) -> None:
        """What is done now, for the page."""
        self.send({"state": words})

    def check(self) -> None:
        """Raise if nobody waits any longer, or if it has taken too long."""
        if self.cancelled.is_set():
            raise Ended
        if self.left_s <= 0:
            raise RecordError(
                f"this took longer than the {MOST_S:g} s that one request may: ask for fewer places of a map, fewer new "
                "tokens or a shorter episode, or view on a machine with a GPU."
            )

    def send(self, line: Json) -> None:
        with suppress(RuntimeError):  # the server's loop has ended
            self._loop.call_soon_threadsafe(self.lines.put_nowait, line)


class EditedMedia(Decoder):
    """A decoder that also knows edited media, which have no file. They are forgotten with their request."""

    def __init__(self, store: MediaStore, memory_mib: float) -> None:
        super().__init__(store, memory_mib=memory_mib)
        self._edits: dict[str, Decoded] = {}

    def make(self, media: Media, what: str, decoded: Decoded) -> Media:
        """The reference to an edited medium; ``what`` names the edit."""
        name = hashlib.sha256(f"{PREFIX} {media.key} {what}".encode()).hexdigest()
        made = replace(media, hash=name, origin=f"{media.name} ({what})", augmentation=None)
        self._edits[made.key] = decoded
        return made

    def request(self, media: Media) -> "Future[Decoded]":
        made = self._edits.get(media.key)
        if made is None:
            return super().request(media)
        done: Future[Decoded] = Future()
        done.set_result(made)
        return done

    def forget(self) -> None:
        """Drop all that was made."""
        self._edits.clear()


def edited(shown: Decoded, edit: MediumEdit) -> Decoded:
    """A decoded medium with a change of its own (all but ``swap``); what its kind lacks is refused."""
    if isinstance(shown, DecodedAudio):
        if edit.change not in ("blank", "mute"):
            raise MediaError(f"a sound cannot be changed by {edit.change}; use blank or mute.")
        samples = shown.samples.copy()
        rate, whole = shown.sample_rate, edit.change == "blank"
        first = 0 if whole else max(0, round((edit.start - shown.start_s) * rate))
        last = len(samples) if whole or edit.end is None else max(0, round((edit.end - shown.start_s) * rate))
        if first >= min(last, len(samples)):
            raise MediaError(f"the model heard {shown.start_s:.2f} to {shown.end_s:.2f} s, so there is nothing to mute.")
        samples[first:last] = 0
        return replace(shown, samples=samples)
    if isinstance(shown, DecodedVideo):
        if edit.change == "mute":
            raise MediaError("the model heard nothing of this video, so there is nothing to mute.")
        if edit.frame is not None and edit.frame >= len(shown.frames):
            raise MediaError(
                f"the model was given {counted(len(shown.frames), 'frame')}, and none of number {edit.frame + 1}."
            )
        frames = shown.frames.copy()
        if edit.change == "drop":
            assert edit.frame is not None, "the request was checked"
            frames[edit.frame] = frames[edit.frame - 1 if edit.frame else min(1, len(frames) - 1)]
            return replace(shown, frames=frames)
        for i in range(len(frames)) if edit.frame is None else [edit.frame]:
            frames[i] = np.asarray(_edited_picture(Image.fromarray(frames[i]), edit))
        return replace(shown, frames=frames)
    if edit.change in ("mute", "drop"):
        raise MediaError(f"a picture cannot be changed by {edit.change}; use blank, crop, blur or swap.")
    return _edited_picture(shown, edit)


def _edited_picture(picture: Image.Image, edit: MediumEdit) -> Image.Image:
    """A picture of the same size, so that it takes the same number of tokens."""
    width, height = picture.size
    left, top, right, bottom = (share * side for share, side in zip(edit.box, (width, height) * 2, strict=True))
    if edit.change == "crop":
        return picture.resize((width, height), Image.Resampling.BICUBIC, box=(left, top, right, bottom))
    inside = round(left), round(top), max(round(left) + 1, round(right)), max(round(top) + 1, round(bottom))
    changed = picture.copy()
    if edit.change == "blank":
        changed.paste((GREY, GREY, GREY), inside)
    else:
        changed.paste(picture.filter(ImageFilter.GaussianBlur(edit.radius)).crop(inside), inside[:2])
    return changed


def preview_of(decoded: Decoded) -> Json:
    """A medium for the page: a picture as data, frames side by side, or loudness."""
    if isinstance(decoded, DecodedAudio):
        return {"loudness": [round(loud, 4) for loud in loudness(decoded, BARS)]}
    buffer = BytesIO()
    if isinstance(decoded, DecodedVideo):
        strip_of(decoded, FRAMES, FRAME)[0].save(buffer, format="JPEG", quality=80)
        return {"picture": _data_url(buffer.getvalue(), "image/jpeg")}
    small = decoded.copy()
    small.thumbnail((PREVIEW, PREVIEW))
    return {"picture": _data_url(encode_png(small), "image/png")}


def _data_url(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def checkpoints_of(run: RunDirectory, recipe: Mapping[str, Any]) -> list[Json]:
    """The models that a run can be asked with: what it began with, and its complete checkpoints, by step."""
    path = str((recipe.get("model") or {}).get("path", ""))
    folder, best = CheckpointFolder(run.checkpoints), None
    with suppress(SensoriumError):
        best = folder.best()
    steps = folder.complete() if run.checkpoints.is_dir() else []
    found = [{"name": str(step), "step": step, "best": best is not None and best.step == step} for step in steps]
    return [*([{"name": START, "step": 0, "best": False, "model": path}] if path else []), *found]


def default_checkpoint(known: Sequence[Json], file: str, step: int) -> str:
    """The last checkpoint from before an episode was sampled: step 40 was sampled by the weights after step 39."""
    last = step if file.startswith("eval/") else step - 1
    before = [one for one in known if one["step"] <= last]
    return str((before or known[:1])[-1]["name"]) if known else ""


def refuse_absent(path: str, revision: str) -> None:
    """Refuse a hub id whose weights are not on this machine: a page fetches nothing."""
    from sensorium.models.checkpoint_path import has_weights, is_hub_id, may_be_hub_id
    from sensorium.recipe.model_shape import cached_folder

    if is_hub_id(path) and may_be_hub_id(path):
        folder = cached_folder(path, revision)
        if folder is None or not has_weights(folder):
            raise RecordError(
                f"the model '{path}' is not on this machine, and nothing is fetched from here. Fetch it (hf download "
                f"{path}) and ask again, or choose a checkpoint of the run."
            )


class LoadedModel:
    """A checkpoint of a run, what samples from it, and the media of the run."""

    def __init__(self, run: ViewedRun, recipe: "Recipe", path: str, words: str) -> None:
        from sensorium.assembly.models import load_model
        from sensorium.assembly.playing import stored_media
        from sensorium.engines.native.native_engine import NativeEngine

        self.recipe, self.run = recipe, run
        self.store = stored_media(recipe, run.directory.media)
        self.decoder = EditedMedia(self.store, memory_mib=64)
        try:
            self.policy = load_model(recipe, path, self.store, decoder=self.decoder)
            self.engine = NativeEngine(self.policy)
        except BaseException:
            self.decoder.close()
            raise
        self.words = f"{words}, on {self.policy.device.type} in {recipe.model.dtype}"

    @property
    def chat(self) -> "ChatProcessor":
        return self.policy.chat

    def forget(self) -> None:
        """Drop what a request left behind."""
        self.engine.reset_cache()
        self.decoder.forget()
        self.store.forget_others(())

    def close(self) -> None:
        self.engine.close()
        self.decoder.close()


@dataclass(frozen=True)
class StoredTurn:
    """A turn of a logged episode: its context, and how it was sampled."""

    file: str
    row: Json
    task: Task
    episode: Episode
    turn: Turn

    @staticmethod
    def of(row: Json, file: str, number: int) -> "StoredTurn":
        """Turn ``number`` of a log's row."""
        episode = episode_from_json(row["episode"])
        if number >= len(episode.turns):
            raise RecordError(f"the episode has {counted(len(episode.turns), 'turn')}, and none of number {number + 1}.")
        return StoredTurn(file, row, task_from_json(row["task"]), episode, episode.turns[number])

    @property
    def held_out(self) -> bool:
        return self.file.startswith("eval/")

    @property
    def context(self) -> tuple[Segment, ...]:
        """What the model was given before it wrote the response."""
        return self.episode.threads[self.turn.thread].segments[: self.turn.segment]

    @property
    def head(self) -> tuple[Message, ...]:
        """The messages before the first observation."""
        return head_of(self.task, self.episode)

    def sampling(self, recipe: "Recipe", new: Sampled | None = None) -> "Sampling":
        """As it was sampled; with ``new`` as a new response is."""
        from sensorium.assembly.playing import sampling_of

        held_out = recipe.held_out_rollout, recipe.evaluation.temperature
        sampling = sampling_of(*held_out) if self.held_out else sampling_of(recipe.rollout)
        if new is None:
            return sampling
        return replace(sampling, temperature=new.temperature, top_p=1.0, top_k=0, max_new_tokens=new.max_new_tokens)


def context_with(model: LoadedModel, stored: StoredTurn, edits: Sequence[TextEdit]) -> tuple[Segment, ...]:
    """The context of a turn, rendered again with other texts; refused where it would differ without them, too."""
    from sensorium.rollout.play import Renderer, ThreadBuilder

    section = model.recipe.held_out_rollout if stored.held_out else model.recipe.rollout
    observed = [stored.head, *(turn.observation for turn in stored.episode.turns[: stored.turn.index + 1])]

    def rendered(shown: Sequence[tuple[Message, ...]]) -> tuple[Segment, ...]:
        builder, context = ThreadBuilder(Renderer(model.chat), shown[0], section.window), tuple[Segment, ...]()
        for turn, messages in zip(stored.episode.turns, shown[1:], strict=False):
            context = builder.observe(messages, turn.after)
            if turn.index < stored.turn.index:
                builder.respond(turn.response)
        return context

    if [segment.key for segment in rendered(observed)] != [segment.key for segment in stored.context]:
        raise RecordError(
            "its text cannot be edited: rendered again, the prompt has other tokens than the model was given then (another "
            "chat template, or rollout.window was changed). Its media can be."
        )
    for edit in edits:
        try:
            message = observed[edit.turn + 1][edit.message]
            if not isinstance(message.content[edit.block], Text):
                raise IndexError
        except IndexError:
            raise RecordError(f"turn {edit.turn} shows no text {edit.message}.{edit.block} before this response.") from None
        blocks = (*message.content[: edit.block], Text(edit.text), *message.content[edit.block + 1 :])
        messages = list(observed[edit.turn + 1])
        messages[edit.message] = replace(message, content=blocks)
        observed[edit.turn + 1] = tuple(messages)
    return rendered(observed)


def shown_instead(context: Sequence[Segment], instead: Mapping[Media, Media]) -> tuple[Segment, ...]:
    """A context with other media in the places of some; one that it does not show is refused."""
    there = {span.media for segment in context for span in segment.media}
    if missing := [media for media in instead if media not in there]:
        raise MediaError(f"the model was not shown the {missing[0].kind} before this turn, so changing it changes nothing.")

    def changed(segment: Segment) -> Segment:
        if not any(span.media in instead for span in segment.media):
            return segment
        spans = tuple(MediaSpan(span.index, instead.get(span.media, span.media)) for span in segment.media)
        return replace(segment, media=spans)

    return tuple(changed(segment) for segment in context)


class WhatIf:
    """Answers what-if requests with the models of the runs: one thread, one model, one request at a time."""

    def __init__(self, device: str = "auto", busy: Callable[[], bool] = lambda: False) -> None:
        self.device, self._busy = device, busy
        self._jobs: queue.Queue[Job] = queue.Queue(MOST_WAITING)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._model: tuple[object, LoadedModel] | None = None

    def submit(self, job: Job) -> None:
        """Have a request worked on; refused where too many wait."""
        with self._lock:
            if self._closed.is_set():
                raise HTTPException(503, "the viewer ends")
            try:
                self._jobs.put_nowait(job)
            except queue.Full:
                raise HTTPException(503, f"{MOST_WAITING} what-if requests wait already: wait for an answer.") from None
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=PREFIX, daemon=True)
                self._thread.start()
        if (waiting := self._jobs.qsize() - 1) > 0:
            job.say(f"{counted(waiting, 'request')} before this one")

    def close(self) -> None:
        """End the thread after the pass that it computes, and free the model."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(BEAT_S)

    def _serve(self) -> None:
        idle_since = time.monotonic()
        while not self._closed.is_set():
            try:
                job = self._jobs.get(timeout=GLANCE_S if self._model is None else 1.0)
            except queue.Empty:
                if time.monotonic() - idle_since > IDLE_S:
                    self._free()
                continue
            self._work(job)
            idle_since = time.monotonic()
        self._free()

    def _work(self, job: Job) -> None:
        try:
            job.begin()
            job.check()
            job.send({"result": job.work(job)})
        except Ended:
            pass
        except SensoriumError as error:
            job.send({"problem": str(error)})
        except Exception as error:  # of a model, an environment or a GPU: the page hears of it, and the model is dropped
            self._free()
            where = "" if self.device == "cpu" else " If its GPU has no room, view with --device cpu."
            job.send({"problem": f"{type(error).__name__}: {printable(str(error))[:600]}.{where}"})
        finally:
            if self._model is not None:
                self._model[1].forget()

    def _free(self) -> None:
        held, self._model = self._model, None
        if held is not None:
            from sensorium.models.policy import release_unused

            held[1].close()
            del held
            release_unused()

    def model(self, job: Job, run: ViewedRun, stored: StoredTurn, wanted: str) -> LoadedModel:
        """The model that answers, loaded where it is not yet."""
        known = checkpoints_of(run.directory, run.recipe())
        name = wanted or default_checkpoint(known, stored.file, int(stored.row["step"]))
        chosen = next((one for one in known if one["name"] == name), None)
        if chosen is None:
            there = ", ".join(str(one["name"]) for one in known) or "none"
            raise RecordError(
                f"the run keeps no checkpoint '{name}' (any more); there are: {there}. A recipe's checkpoint.every and "
                "checkpoint.keep say which are kept."
            )
        path = str(chosen["model"]) if name == START else str(run.directory.checkpoint_of(chosen["step"]))
        words = f"the model before training ({path})" if name == START else f"the checkpoint of step {name}"
        key = run.id, path
        if self._model is None or self._model[0] != key:
            self._free()
            job.say(f"loading {words}")
            recipe = self._recipe(run)
            if name == START:
                refuse_absent(path, recipe.model.revision)
            self._model = key, LoadedModel(run, recipe, path, words)
            job.begin()
        return self._model[1]

    def _recipe(self, run: ViewedRun) -> "Recipe":
        """The run's recipe on this machine: without a GPU's memory while a run that is watched may need that."""
        from sensorium.recipe.load import load_recipe

        device = "cpu" if self.device == "auto" and self._busy() else self.device
        return load_recipe(run.directory.path, [f"model.device={device}"])

    def answer(self, job: Job, run: ViewedRun, row: Json, asked: AskedAnswer, find: Callable[[str, str], Json]) -> Json:
        """The log-probs of a response before and after edits, and a new response."""
        stored = StoredTurn.of(row, asked.file, asked.turn)
        model = self.model(job, run, stored, asked.checkpoint)
        context = stored.context
        changed = context_with(model, stored, asked.texts) if asked.texts else context
        instead, shown = self._instead(model, row, asked.media, find)
        changed = shown_instead(changed, instead)
        is_edited = bool(asked.texts or asked.media)
        job.say("computing log-probs")
        contexts = [context, changed] if is_edited else [context]
        logprobs = self._logprobs(job, model, stored, contexts)
        before, after = logprobs[0], logprobs[1] if is_edited else None
        response = stored.turn.response
        result = {
            "model": model.words,
            "tokens": response.token_texts(),
            "stored": _numbers(response.logprobs),
            "before": _summed(before),
            "after": None if after is None else _summed(after),
            "edited": shown,
        }
        if asked.new is not None:
            job.say("writing a new answer")
            result["new"] = self._written(job, model, stored, changed, asked.new)
        return result

    def _instead(
        self, model: LoadedModel, row: Json, edits: Sequence[MediumEdit], find: Callable[[str, str], Json]
    ) -> tuple[dict[Media, Media], list[Json]]:
        """What the model is shown instead of the media that are edited, and the same for the page."""
        instead: dict[Media, Media] = {}
        shown: dict[Media, Json] = {}
        for edit in edits:
            media = medium_of(row, edit.medium)
            if edit.change == "mute" and media.sound is not None:
                media = media.sound
            now = instead.get(media, media)
            if edit.other is not None:
                made = _found(find(edit.other.file, edit.other.id), edit.other.medium, media.kind)
                if made.kind != media.kind or len(made.parts) != len(media.parts):
                    raise MediaError(f"a {media.kind} can be swapped only with a {media.kind} of the same parts.")
                instead |= dict(zip(media.parts, made.parts, strict=True))
                made_decoded = model.decoder.get(made)
            else:
                if edit.change == "swap":
                    made_decoded = _uploaded(edit, media, model.store)
                else:
                    made_decoded = edited(model.decoder.get(now), edit)
                what = f"{edit.model_dump_json(exclude={'picture'})} {hashlib.sha256(edit.picture.encode()).hexdigest()}"
                made = model.decoder.make(now, what, made_decoded)
                instead[media] = made
            words = [*shown[media]["words"]] if media in shown else []
            shown[media] = {"medium": edit.medium, "words": [*words, edit.words], **preview_of(made_decoded)}
            if isinstance(made_decoded, DecodedAudio):
                shown[media]["before"] = preview_of(model.decoder.get(media))["loudness"]
        return instead, list(shown.values())

    def _logprobs(
        self, job: Job, model: LoadedModel, stored: StoredTurn, contexts: Sequence[Sequence[Segment]]
    ) -> list[list[float]]:
        """The log-probs of the response's tokens after each of these contexts."""
        from sensorium.learner.credited_episode import uncredited
        from sensorium.learner.forward import LogprobScorer
        from sensorium.learner.packing import pack, pack_rows

        policy, response = model.policy, stored.turn.response
        if not response.tokens:
            raise RecordError("the response has no tokens.")
        sampling, limit = stored.sampling(model.recipe), model.recipe.batch.tokens_per_microbatch
        scorer = LogprobScorer(policy, sampling.temperature or 1.0, stop_tokens=sampling.stop_tokens)
        length = sum(len(model.chat.layout(segment)) for segment in contexts[0]) + len(response.tokens)
        if length > MOST_CONTEXT:
            raise RecordError(f"the turn takes {length:,} tokens with its context, and what-if takes {MOST_CONTEXT:,}.")
        together = min(TOGETHER, max(1, limit // length))
        found: list[list[float]] = []
        for start in range(0, len(contexts), together):
            job.check()
            some = contexts[start : start + together]
            groups = uncredited([[_one_turn(context, response, str(i))] for i, context in enumerate(some)])
            packing = (
                pack(groups, model.chat.layout, limit, policy.device, matched=policy.matched)
                if policy.general is None
                else pack_rows(groups, policy, limit)
            )
            numbers = scorer.logprobs(packing).tolist()
            size = len(response.tokens)
            found += [numbers[i * size : (i + 1) * size] for i in range(len(some))]
            if len(contexts) > 2:
                job.say(f"{len(found) - 1} of {len(contexts) - 1} places covered")
        return found

    def _written(self, job: Job, model: LoadedModel, stored: StoredTurn, context: Sequence[Segment], new: Sampled) -> Json:
        """A new response after a context."""
        from sensorium.engines.protocol import Request, response_key

        sampling = stored.sampling(model.recipe, new)
        length = sum(len(model.chat.layout(segment)) for segment in context)
        section = model.recipe.held_out_rollout if stored.held_out else model.recipe.rollout
        room = min(section.max_context_tokens, MOST_CONTEXT) - length
        if room <= 0:
            raise RecordError(f"the prompt takes {length:,} tokens, which leaves no room for a response.")
        sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
        key = response_key(new.seed, 0, f"{PREFIX}:{stored.task.id}", 0, stored.turn.index)
        request = Request(PREFIX, tuple(context), sampling, (0,), key, f"{PREFIX}/{stored.turn.index}")
        response = run_within(job, model.engine.generate(request))
        found = _response(response.segment) | {"finish": response.finish}
        if stored.task.environment is not None:  # it would have to be played for a reward
            return found
        turn = replace(stored.turn, response=response.segment, cut=response.finish == "length")
        status = Status.TRUNCATED if turn.cut else Status.FINISHED
        return found | scored(job, model, stored.task, replace(stored.episode, turns=(turn,), status=status, failure=""))

    def map(self, job: Job, run: ViewedRun, row: Json, asked: AskedMap) -> Json:
        """How a response's log-prob changes where places of a picture are covered with its mean colour."""
        stored = StoredTurn.of(row, asked.file, asked.turn)
        media = medium_of(row, asked.medium)
        if media.kind != "picture":
            raise MediaError(f"a map is drawn over a picture, and this is a {media.kind}: blank its parts instead.")
        model = self.model(job, run, stored, asked.checkpoint)
        picture = model.decoder.get(media)
        assert isinstance(picture, Image.Image), "it is a picture"
        across, down = cells_of(model.chat, media, picture.size, asked.cells)
        mean = tuple(round(float(value)) for value in np.asarray(picture).reshape(-1, 3).mean(0))
        contexts = [stored.context]
        for top, bottom in pairwise(down):
            for left, right in pairwise(across):
                covered, (width, height) = picture.copy(), picture.size
                covered.paste(
                    mean, (round(left * width), round(top * height), round(right * width), round(bottom * height))
                )
                made = model.decoder.make(media, f"{left} {top} {right} {bottom}", covered)
                contexts.append(shown_instead(stored.context, {media: made}))
        sums = [sum(values) for values in self._logprobs(job, model, stored, contexts)]
        wide = len(across) - 1
        moved = [value - sums[0] for value in sums[1:]]
        rows = [_numbers(moved[start : start + wide]) for start in range(0, len(moved), wide)]
        return {"model": model.words, "before": sums[0], "across": across, "down": down, "changes": rows}

    def fork(self, job: Job, run: ViewedRun, row: Json, asked: AskedFork) -> Json:
        """The episode from a turn on, in an environment that was played again up to there."""
        stored = StoredTurn.of(row, asked.file, asked.turn)
        spec = stored.task.environment
        if spec is not None and "agent" in (spec.name, spec.options.get("environment")):
            raise RecordError(
                "the episode was played by an agent, a program of its own: what that does cannot be repeated from the log. "
                "Edit the prompt of one of its turns instead."
            )
        model = self.model(job, run, stored, asked.checkpoint)
        job.say("playing the environment again")
        return Fork(job, model, stored, asked).play()


class Fork:
    """An episode that is played again with its recorded responses, then with new ones.

    It is the engine of its rollout: of a recorded turn it gives what was written then, of the next ones what a person
    wrote, and after those it asks the model.
    """

    def __init__(self, job: Job, model: LoadedModel, stored: StoredTurn, asked: AskedFork) -> None:
        self.job, self.model, self.stored, self.asked = job, model, stored, asked
        self.first = asked.turn
        self.problem = ""
        self.next: tuple[Message, ...] = ()
        self._seen = 0
        self.capabilities = model.engine.capabilities
        self.version = model.engine.version

    def play(self) -> Json:
        """Play it, and give the new turns for the page."""
        from sensorium.assembly.playing import EnvironmentMaker
        from sensorium.envs.protocol import WatchedEnvironment
        from sensorium.rollout.play import Attempt, Rollout

        recipe, stored, asked = self.model.recipe, self.stored, self.asked
        section = recipe.held_out_rollout if stored.held_out else recipe.rollout
        last = self.first + len(asked.responses) + (MOST_TURNS if asked.go_on else 0)
        limits = {
            "max_turns": min(section.max_turns, last) if asked.go_on else last,
            "max_context_tokens": min(section.max_context_tokens, MOST_CONTEXT),
        }
        section = section.model_copy(update=limits)
        maker = EnvironmentMaker(self.model.store)
        rollout = Rollout(
            self.model.chat, self, section, lambda task: WatchedEnvironment(maker(task), self._began, self._stepped)
        )
        sampling = stored.sampling(recipe, asked.new)
        try:
            stream = rollout.stream([stored.task], 1, Attempt(asked.new.seed, 0, PREFIX), sampling)
            (group,) = run_within(self.job, stream.in_order())
        finally:
            rollout.close()
        (episode,) = group.episodes
        if self.problem or len(episode.turns) < self.first:
            raise RecordError(
                self.problem or episode.failure or "the episode ended before this turn when it was played again."
            )
        new = episode.turns[self.first :]
        return {
            "model": self.model.words,
            "first": self.first,
            "turns": [self._turn(turn) for turn in new],
            "next": self._messages(self.next) if len(episode.turns) == limits["max_turns"] else [],
            "status": episode.status.value,
            "failure": episode.failure,
            "success": episode.info.get("success"),
            "reward": sum(turn.reward or 0.0 for turn in episode.turns),
            **scored(self.job, self.model, stored.task, episode),
        }

    async def generate(self, request: "Request", episodes: Any = None) -> "Response":
        """The recorded response of a turn, a person's, or the model's."""
        from sensorium.engines.protocol import Response

        turn = int(request.name.rpartition("/")[2])
        if turn < self.first:
            recorded = self.stored.episode.turns[turn]
            return Response(recorded.response, "length" if recorded.cut else "stop")
        if turn - self.first < len(self.asked.responses):
            return Response(self.model.chat.respond(self.asked.responses[turn - self.first], request.name), "stop")
        self.job.say(f"turn {turn + 1}: the model writes")
        return await self.model.engine.generate(request, episodes)

    def start(self) -> None:
        """The model's engine has started."""

    def release(self, thread: str) -> None:
        self.model.engine.release(thread)

    def update_weights(self, source: Any, version: int) -> None:
        raise AssertionError("the weights of a fork stay")

    def reset_cache(self) -> None:
        """Done with the request."""

    def close(self) -> None:
        """The model is kept."""

    def _began(self, begun: Any) -> Any:
        head, observation = begun
        if tuple(head) != self.stored.episode.head and self.stored.task.environment is not None:
            self._differs("its head")
        self._saw(tuple(observation.messages))
        return begun

    def _stepped(self, result: Any) -> Any:
        self.next = () if result.observation is None or result.done else tuple(result.observation.messages)
        if self.next:
            self._saw(self.next)
        elif self._seen <= self.first:
            self.problem = f"when it was played again, the environment ended after turn {self._seen}."
        return result

    def _saw(self, messages: tuple[Message, ...]) -> None:
        if self._seen <= self.first and messages != self.stored.episode.turns[self._seen].observation:
            self._differs(f"turn {self._seen + 1}")
        self._seen += 1

    def _differs(self, what: str) -> None:
        self.problem = (
            f"when it was played again from its seed and recorded acts, the environment showed something else at {what} "
            "than then: it is not a function of these, or it was changed since. The episode cannot be forked there."
        )
        raise EnvironmentFailure(self.problem)

    def _turn(self, turn: Turn) -> Json:
        typed = turn.index - self.first < len(self.asked.responses)
        return _response(turn.response) | {
            "index": turn.index,
            "by": "person" if typed else "model",
            "observation": self._messages(turn.observation),
            "reward": turn.reward,
            "parts": turn.parts,
            "info": turn.info,
        }

    def _messages(self, messages: Iterable[Message]) -> list[Json]:
        def block(part: Text | Media) -> Json:
            return {"text": part.text} if isinstance(part, Text) else preview_of(self.model.decoder.get(part))

        return [{"role": message.role, "blocks": [block(part) for part in message.content]} for message in messages]


def run_within(job: Job, work: Coroutine[Any, Any, Found]) -> Found:
    """Run a coroutine to its end, unless its time is over or nobody waits for it."""
    from sensorium.cluster.event_loop import run_async

    async def watched() -> Found:
        running = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({running}, timeout=GLANCE_S))[0]:
                job.check()
            return running.result()
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait({running})

    return run_async(watched())


def scored(job: Job, model: LoadedModel, task: Task, episode: Episode) -> Json:
    """What the recipe's reward terms give a new episode; those that ask a judge or a service are left out, by name."""
    from sensorium.assembly.playing import make_scorer
    from sensorium.rewards.reward_term import asks_others

    scores: list[Json] = []
    left_out: list[str] = []
    for term in model.recipe.rewards.terms:
        try:
            scorer = make_scorer(model.recipe.rewards.model_copy(update={"terms": (term,)}), None, model.store)
        except SensoriumError:  # it needs the recipe's judges
            left_out.append(term.name)
            continue
        try:
            if asks_others(scorer.terms[0][0]):
                left_out.append(scorer.terms[0][0].name)
                continue
            found = run_within(job, scorer.score(task, episode))
            scores += [
                {"name": one.name, "value": one.value, "correct": one.correct, "weight": one.weight} for one in found.scores
            ]
        finally:
            scorer.close()
    return {"scores": scores, "unscored": left_out}


def cells_of(chat: "ChatProcessor", media: Media, size: tuple[int, int], most: int) -> tuple[list[float], list[float]]:
    """The edges of a picture's places, across and down, as shares: its tokens, as many to a place as make at most ``most``.

    The places of a small picture are its patches. A family that cuts tiles has no such grid: its places are squares.
    """
    extent = chat.prepared.extent(media)
    _, high, wide = extent.grid
    merge = sqrt(high * wide / max(1, chat.media_format.expand(extent).count))
    if isclose(merge, round(merge)) and high % round(merge) == wide % round(merge) == 0:
        rows, columns = high // round(merge), wide // round(merge)
        if high * wide <= most:
            rows, columns = high, wide
    else:
        width, height = size
        columns = max(1, min(most, round(sqrt(most * width / height))))
        rows = max(1, min(most // columns, round(columns * height / width)))
    step = 1
    while ceil(rows / step) * ceil(columns / step) > most:
        step += 1
    return _edges(columns, step), _edges(rows, step)


def _edges(count: int, step: int) -> list[float]:
    return [place / count for place in (*range(0, count, step), count)]


def _found(row: Json, number: int, kind: str) -> Media:
    """A medium of another episode: by its number, or the first of a kind."""
    if number < 0:
        media = media_of(task_from_json(row["task"]), episode_from_json(row["episode"]))
        number = next((n for n, one in enumerate(media) if one.kind == kind), -1)
        if number < 0:
            raise MediaError(f"that episode shows no {kind}.")
    return medium_of(row, number)


def _uploaded(edit: MediumEdit, media: Media, store: MediaStore) -> Image.Image:
    if media.kind != "picture":
        raise MediaError(f"only a picture can be swapped with a file; swap this {media.kind} with one of another episode.")
    try:
        data = base64.b64decode(edit.picture.rpartition(",")[2], validate=True)
    except ValueError as error:
        raise MediaError("the picture is no base64.") from error
    return decode_picture(data, "the file that was chosen", store.limits)


def _one_turn(context: Sequence[Segment], response: Segment, name: str) -> Episode:
    home = (False,) * len(context) + (True,)
    turn = Turn(0, (), response, 0, len(context))
    return Episode(name, "", name, 0, (Thread((*context, response), home),), (turn,), Status.FINISHED)


def _response(segment: Segment) -> Json:
    texts = segment.token_texts()
    return {"text": segment.text, "tokens": texts, "logprobs": _numbers(segment.logprobs)}


def _summed(values: Sequence[float]) -> Json:
    possible = all(value > FORBIDDEN for value in values)
    total = sum(values) if possible else None
    return {"logprobs": _numbers(values), "sum": total, "mean": None if total is None else total / max(1, len(values))}


def _numbers(values: Iterable[float]) -> list[float | None]:
    """Numbers for the page; none where the model may not write the token, or the number is not finite."""
    return [round(value, 6) if FORBIDDEN < value < float("inf") else None for value in values]


def _usual_new(recipe: Json) -> int:
    """The length of answers that the page offers first: the run's own, as far as it may be asked."""
    rollout = recipe.get("rollout")
    length = rollout.get("max_new_tokens") if isinstance(rollout, dict) else None
    return min(length, MOST_NEW) if isinstance(length, int) and length > 0 else 256


def offered(run: ViewedRun, row: Json, file: str) -> Json:
    """What the page needs before anything is asked: checkpoints, and texts by turn, message and block."""
    known = checkpoints_of(run.directory, run.recipe())
    episode = episode_from_json(row["episode"])
    observed: Iterator[tuple[int, Sequence[Message]]] = iter(
        [(-1, StoredTurn(file, row, task_from_json(row["task"]), episode, turn).head) for turn in episode.turns[:1]]
        + [(turn.index, turn.observation) for turn in episode.turns]
    )
    return {
        "checkpoints": known,
        "default": default_checkpoint(known, file, int(row["step"])),
        "texts": [
            {"turn": turn, "message": m, "block": b, "role": message.role, "text": block.text}
            for turn, messages in observed
            for m, message in enumerate(messages)
            for b, block in enumerate(message.content)
            if isinstance(block, Text)
        ],
        "cells": CELLS,
        "most_new": MOST_NEW,
        "usual_new": _usual_new(run.recipe()),
    }


def what_if_routes(what_if: WhatIf, find: Callable[[str, str, str], tuple[ViewedRun, Json]]) -> APIRouter:
    """The routes below ``/api/what_if``; ``find`` gives the run and the log row of an episode."""
    router = APIRouter(prefix="/api/what_if")

    def answered(work: Callable[[Job], Json]) -> Reply:
        """Lines of JSON: what is done, then the result or the problem."""
        job = Job(work)
        what_if.submit(job)

        async def lines() -> AsyncIterator[bytes]:
            last: Json = {"state": "waiting"}
            try:
                while not {"result", "problem"} & last.keys():
                    with suppress(TimeoutError):
                        last = await asyncio.wait_for(job.lines.get(), BEAT_S)
                    yield to_json(last, inf_nan_mode="strings", fallback=str) + b"\n"
            finally:
                job.cancelled.set()

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    @router.get("")
    def offers(run: str, file: str, id: str) -> Reply:
        return Reply(to_json(offered(*find(run, file, id), file)), media_type="application/json")

    @router.post("/answer")
    async def answer(asked: AskedAnswer) -> Reply:
        run, row = await asyncio.to_thread(find, asked.run, asked.file, asked.id)
        return answered(lambda job: what_if.answer(job, run, row, asked, lambda file, id: find(asked.run, file, id)[1]))

    @router.post("/map")
    async def map(asked: AskedMap) -> Reply:
        run, row = await asyncio.to_thread(find, asked.run, asked.file, asked.id)
        return answered(lambda job: what_if.map(job, run, row, asked))

    @router.post("/fork")
    async def fork(asked: AskedFork) -> Reply:
        run, row = await asyncio.to_thread(find, asked.run, asked.file, asked.id)
        return answered(lambda job: what_if.fork(job, run, row, asked))

    return router

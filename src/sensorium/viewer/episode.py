"""One episode for the page, as plain data: turns, media, tokens with their numbers, what was named in pictures, judges.

Media of an episode are numbered in the order in which they were shown, so an address names one by the episode and a number:
what is changed or blanked later (what-if) is named in the same way.
"""

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sensorium.data.decoder import Decoder
from sensorium.data.made_media import encode_clip
from sensorium.data.media_files import HEAD_BYTES, mime_type
from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.data.sound import DecodedAudio, encode_wav
from sensorium.data.video import DecodedVideo
from sensorium.report.album import asked, given_clips, loudness, strip_of
from sensorium.runs.episodes import (
    TRAINED,
    TRANSCRIPTS,
    EpisodeCredit,
    credit_from_json,
    episode_from_json,
    read_transcripts,
    task_from_json,
)
from sensorium.runs.run_directory import RunDirectory
from sensorium.viewer.index import DAMAGED
from sensorium.vocabulary.content import Media, Message, Text
from sensorium.vocabulary.episode import Episode, Turn, category_of
from sensorium.vocabulary.errors import MediaError, RecordError
from sensorium.vocabulary.plain import shown as printed
from sensorium.vocabulary.task import Task

Json = dict[str, Any]
HASH = re.compile(r"[0-9a-f]{64}")
SHOWN_AS_THEY_ARE = ("image/png", "image/jpeg", "image/gif", "image/webp")
BARS, FRAMES, FRAME = 240, 64, (192, 144)
FILM_FRAMES, FILM_SIZE, FILM_MS = 240, 512, 500
MEMORY_MIB = 64
MOST_PLACES = 200

NUMBER = r"(-?\d{1,6}(?:\.\d{1,6})?)"
GAP = r"\s{0,3},\s{0,3}"
PLACES = (  # how responses name places, the most specific first: two numbers are a point, four a box
    ("box", re.compile(rf"\({NUMBER}{GAP}{NUMBER}\){GAP}\({NUMBER}{GAP}{NUMBER}\)")),
    ("box", re.compile(rf"[\[(]\s?{NUMBER}{GAP}{NUMBER}{GAP}{NUMBER}{GAP}{NUMBER}\s?[\])]")),
    (
        "point",
        re.compile(
            rf"\b\w{{0,40}}(?:click|tap|press|point|move|hover|touch|scroll)\w{{0,40}}\(\s?(?:x=)?{NUMBER}{GAP}(?:y=)?{NUMBER}"
        ),
    ),
    (
        "point",
        re.compile(rf'"(?:coordinates?|point(?:_2d)?|position|start|end)"\s?:\s?[\[(]\s?{NUMBER}{GAP}{NUMBER}\s?[\])]'),
    ),
    ("point", re.compile(rf"<point>\s?{NUMBER}[\s,]{{1,3}}{NUMBER}\s?</point>")),
    ("percent", re.compile(rf'<point\s[^<>]{{0,40}}?x="{NUMBER}"\s{{1,3}}y="{NUMBER}"')),
)
NAMING = re.compile(r"(?i)(bbox|box|point|click|coordinates?|position|target)(_?2d)?")  # keys of an environment's info


def episode_page(run: RunDirectory, row: Mapping[str, Any]) -> Json:
    """An episode of a log as the page shows it."""
    task, episode, credit = _read(row)
    media = media_of(task, episode)
    numbers = {medium: n for n, medium in enumerate(media)}
    known = credit or EpisodeCredit("")
    responses = [turn.response for turn in episode.turns]
    return {
        "id": episode.id,
        "step": row["step"],
        "task": {
            "id": task.id,
            "answer": None if task.answer is None else str(task.answer),
            "category": category_of(task, episode),
            "environment": task.environment and {"name": task.environment.name, "seed": task.environment.seed},
            "options": _plain(task.environment.options) if task.environment else None,
            "metadata": _plain(task.metadata),
            "demonstration": list(task.demonstration),
        },
        "group": episode.group_id,
        "place": episode.index,
        "status": episode.status.value,
        "failure": episode.failure,
        "reward": episode.reward,
        "correct": episode.correct,
        "fate": credit.fate if credit is not None else "",
        "info": _plain(episode.info),
        "head": _messages(head_of(task, episode), numbers),
        "turns": [_turn(turn, known, numbers) for turn in episode.turns],
        "scores": [
            {
                "name": score.name,
                "value": score.value,
                "weight": score.weight,
                "scope": score.scope,
                "turn": score.turn,
                "span": score.span,
                "correct": score.correct,
                "reason": score.reason,
            }
            for score in episode.scores
        ],
        "media": [_medium(medium) for medium in media],
        "film": [
            {"turn": turn.index, "medium": numbers[medium]}
            for turn in episode.turns
            for message in turn.observation
            for medium in message.media
            if medium.kind == "picture"
        ],
        "judges": read_transcripts(run.path / TRANSCRIPTS, episode.id),
        "stored": {
            "advantage": any(known.advantages),
            "logprob": any(response.logprobs for response in responses),
            "sampled": any(response.sampled_logprobs not in ((), response.logprobs) for response in responses),
            "entropy": any(known.entropies),
            "mismatch": any(known.mismatches),
        },
        "unmeasured": _why_unmeasured(credit),
    }


def _why_unmeasured(credit: EpisodeCredit | None) -> str:
    """Why there are no entropies and mismatches of an episode's tokens; "" where there are."""
    if credit is None:
        return "only the trainer computes it, of the episodes of a step; this is an evaluation's, or of an older version"
    if credit.fate != TRAINED:
        return f"the trainer computes it of what it trains on, and this episode was not trained on ({credit.fate})"
    return "" if credit.entropies else "a version of Sensorium wrote the log that did not keep it"


def head_of(task: Task, episode: Episode) -> tuple[Message, ...]:
    """The messages before the first observation. The system prompt of a question is in its task alone."""
    from sensorium.envs.question import question_of

    if not episode.turns:
        return (*episode.head, *task.messages)
    asks = task.environment is None and task.messages
    return question_of(task)[0] if asks and not episode.head else episode.head


def media_of(task: Task, episode: Episode) -> list[Media]:
    """The media of an episode, each once, in the order in which they were shown, with the parameters that the model had."""
    messages = [*head_of(task, episode), *(message for turn in episode.turns for message in turn.observation)]
    return list(dict.fromkeys(medium for message in messages for medium in message.media))


def medium_of(row: Mapping[str, Any], number: int) -> Media:
    """One of the media of an episode, as the model was given it."""
    task, episode, _ = _read(row)
    media = media_of(task, episode)
    if not 0 <= number < len(media):
        raise MediaError(f"the episode has {len(media)} media, and none of number {number + 1}.")
    return given_clips(episode).get(asked(media[number]), media[number])


def _read(row: Mapping[str, Any]) -> tuple[Task, Episode, EpisodeCredit | None]:
    try:
        episode = episode_from_json(row["episode"])
        return task_from_json(row["task"]), episode, credit_from_json(row, episode)
    except DAMAGED as error:
        cause = f"{type(error).__name__}: {error}"[:300]
        raise RecordError(f"The row of this episode is damaged ({cause}): it cannot be shown.") from error


def _turn(turn: Turn, credit: EpisodeCredit, numbers: Mapping[Media, int]) -> Json:
    response = turn.response
    advantages, entropies, mismatches = (
        _short(turns[turn.index]) if turn.index < len(turns) else []
        for turns in (credit.advantages, credit.entropies, credit.mismatches)
    )
    texts = response.token_texts()
    whole = len(texts) == len(response.tokens)
    tokens = None
    if whole and texts:
        sampled = response.sampled_logprobs if response.sampled_logprobs != response.logprobs else ()
        tokens = {
            "texts": texts,
            "ids": response.tokens,
            "logprobs": _short(response.logprobs),
            "sampled": _short(sampled),
            "advantages": advantages,
            "entropies": entropies,
            "mismatches": mismatches,
        }
    return {
        "index": turn.index,
        "after": turn.after,
        "observation": _messages(turn.observation, numbers),
        "response": response.text,
        "tokens": tokens,
        "count": len(response.tokens),
        "versions": [[span.version, span.start, span.end] for span in response.version_spans],
        "reward": turn.reward,
        "parts": turn.parts,
        "info": _plain(turn.info),
        "cut": turn.cut,
        "places": places_of(response.text, turn.info)[:MOST_PLACES],
    }


def places_of(text: str, info: Any) -> list[Json]:
    """The places that a response and the environment name. ``screen`` in its info: the size that they are positions in."""
    size = info.get("screen") if isinstance(info, Mapping) else None
    of: Json = {}
    if isinstance(size, list | tuple) and len(size) == 2 and all(isinstance(n, int | float) and n > 0 for n in size):
        of = {"of": list(size)}
    return [{**place, **of} for place in (*places_in(text), *places_named(info))]


def places_in(text: str) -> list[Json]:
    """The points and boxes that a response names, in its order, with the characters that name each.

    Example: ``click(320, 200)`` is a point; ``{"bbox_2d": [10, 20, 60, 80]}`` and ``(10, 20), (60, 80)`` are boxes.
    """
    found: list[Json] = []
    for kind, pattern in PLACES:
        for match in pattern.finditer(text[:100_000]):
            start, end = match.span()
            if len(found) < MOST_PLACES and not any(start < one["end"] and one["start"] < end for one in found):
                found.append({"kind": kind, "at": [float(n) for n in match.groups()], "start": start, "end": end})
    return sorted(found, key=lambda one: int(one["start"]))


def places_named(info: Any, depth: int = 4) -> Iterator[Json]:
    """The points and boxes in what an environment reports of a turn, by the names of its keys."""
    if not isinstance(info, Mapping) or not depth:
        return
    for key, value in info.items():
        numbers = isinstance(value, list | tuple) and all(isinstance(n, int | float) for n in value)
        if numbers and len(value) in (2, 4) and NAMING.search(str(key)):
            yield {"kind": "box" if len(value) == 4 else "point", "at": [float(n) for n in value], "by": str(key)}
        else:
            yield from places_named(value, depth - 1)


def _messages(messages: Sequence[Message], numbers: Mapping[Media, int]) -> list[Json]:
    return [
        {
            "role": message.role,
            "blocks": [{"text": b.text} if isinstance(b, Text) else {"medium": numbers[b]} for b in message.content],
            "tools": message.tools,
        }
        for message in messages
    ]


def _medium(media: Media) -> Json:
    changed = "" if media.augmentation is None else media.augmentation.description
    part = media.parameters
    return {
        "kind": media.kind,
        "hash": media.hash,
        "origin": media.origin,
        "augmented": changed,
        "start": getattr(part, "start", 0.0),
        "end": getattr(part, "end", None),
    }


def _short(values: Sequence[float]) -> list[float | None]:
    """Numbers for the page; one that is not finite is none, as JSON has none."""
    return [float(f"{value:.5g}") if abs(value) < float("inf") else None for value in values]


def _plain(value: Any, depth: int = 6) -> Any:
    """JSON of what an environment or a row holds."""
    if isinstance(value, Mapping):
        return {str(key): _plain(held, depth - 1) for key, held in value.items()} if depth else "…"
    if isinstance(value, list | tuple):
        return [_plain(held, depth - 1) for held in value] if depth else "…"
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    return value if isinstance(value, str | int | bool) or value is None else printed(value)


class RunMedia:
    """The media of a run: files as they are, and what the model was given of them. Close it to end its threads."""

    def __init__(self, run: RunDirectory) -> None:
        self.folder = run.media
        self.decoder = Decoder(MediaStore(run.media, memory_mib=MEMORY_MIB), memory_mib=MEMORY_MIB)

    def close(self) -> None:
        """End the decoding threads."""
        self.decoder.close()

    def file_of(self, digest: str, kind: str) -> tuple[Path, str]:
        """The stored file of a medium and its type; refused if it is no regular file of the run."""
        path = self.folder / digest
        if not HASH.fullmatch(digest):
            raise MediaError("a medium is named by the 64 hexadecimal digits of its hash.")
        try:
            if not stat.S_ISREG(os.lstat(path).st_mode):
                raise MediaError(f"the file of medium {digest[:12]} is no regular file.")
            with path.open("rb") as file:
                head = file.read(HEAD_BYTES)
        except OSError as error:
            raise MediaError(f"medium {digest[:12]} is not in the run ({error.strerror}).") from error
        return path, mime_type(head, "sound" if kind == "sound" else "video" if kind == "video" else "picture")

    def picture(self, media: Media, size: int = 0) -> tuple[bytes, str]:
        """A picture as a browser shows it: its own bytes, or a PNG of what it is augmented to; or a small copy."""
        _, kind = self.file_of(media.hash, "picture")
        store = self.decoder.store
        if size:
            small = store.picture(media).copy()
            small.thumbnail((size, size))
            return encode_png(small), "image/png"
        if media.augmentation is None and kind not in SHOWN_AS_THEY_ARE:
            return encode_png(store.picture(media)), "image/png"
        return store.shown_bytes(media), "image/png" if media.augmentation is not None else kind

    def given(self, media: Media) -> list[Json]:
        """What the model was given of a clip, and of the sound that is heard with it."""
        if media.kind == "picture":
            raise MediaError("a picture has no parts in time.")
        return [self._given(part) for part in media.parts]

    def _given(self, media: Media) -> Json:
        self.file_of(media.hash, media.kind)
        clip = self.decoder.get(media)
        assert isinstance(clip, DecodedVideo | DecodedAudio), "pictures are not given in parts"
        span = {"kind": media.kind, "start": clip.start_s, "end": clip.end_s, "length": clip.duration_s}
        if isinstance(clip, DecodedAudio):
            return span | {"rate": clip.sample_rate, "loudness": [round(loud, 4) for loud in loudness(clip, BARS)]}
        strip, shown = strip_of(clip, FRAMES, FRAME)
        times = [round(float(clip.times_s[i]), 3) for i in shown]
        height, width = clip.frames.shape[1:3]
        size = {"width": width, "height": height, "tile": [strip.width // len(shown), strip.height]}
        return span | size | {"frames": len(clip.frames), "times": times}

    def strip(self, media: Media) -> bytes:
        """The frames that the model was given of a video, side by side, as one JPEG."""
        self.file_of(media.hash, "video")
        clip = self.decoder.get(media)
        if not isinstance(clip, DecodedVideo):
            raise MediaError("only a video has frames.")
        buffer = BytesIO()
        # Without subsampling: colours at edges would be others than the model was given.
        strip_of(clip, FRAMES, FRAME)[0].save(buffer, format="JPEG", quality=95, subsampling=0)
        return buffer.getvalue()

    def heard(self, media: Media) -> bytes:
        """The sound that the model was given, as WAV."""
        sound = media if media.kind == "sound" else media.sound
        if sound is None:
            raise MediaError("the model heard nothing of this medium.")
        self.file_of(sound.hash, "sound")
        clip = self.decoder.get(sound)
        assert isinstance(clip, DecodedAudio), "it is a sound"
        return encode_wav(clip.samples, clip.sample_rate)

    def film(self, row: Mapping[str, Any], kind: str = "gif") -> bytes:
        """The pictures that an environment showed, as a GIF or MP4 of half a second each."""
        _, episode, _ = _read(row)
        messages = [message for turn in episode.turns for message in turn.observation]
        media = [medium for message in messages for medium in message.media if medium.kind == "picture"][:FILM_FRAMES]
        if not media:
            raise MediaError("the environment showed no pictures.")
        frames = []
        for medium in media:
            self.file_of(medium.hash, "picture")
            frame = self.decoder.store.picture(replace(medium, origin="")).copy()
            frame.thumbnail((FILM_SIZE, FILM_SIZE))
            frames.append(frame)
        width, height = max(frame.width for frame in frames), max(frame.height for frame in frames)
        even = kind == "mp4"  # as the colours of a video that every player shows need it
        padded = [Image.new("RGB", (width + width % 2 * even, height + height % 2 * even)) for _ in frames]
        for sheet, frame in zip(padded, frames, strict=True):
            sheet.paste(frame)
        if kind == "mp4":
            return encode_clip([np.asarray(sheet) for sheet in padded], 1000 / FILM_MS)
        buffer = BytesIO()
        padded[0].save(buffer, format="GIF", save_all=True, append_images=padded[1:], duration=FILM_MS, loop=0)
        return buffer.getvalue()

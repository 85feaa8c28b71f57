"""Sight and sound: a short video of a coloured square, a tone, and a question that needs both; and generated data sets.

An index always gives the same task. The clips are real MP4 and WAV files, a few hundred of them, made when first needed.
For the kinds ``pair`` and ``agree``, colour or tone alone says nothing about the answer: all are equally likely. A clip's
content decides its split, so none occurs in both. ``make_intent`` and ``make_daily_omni`` write files in the layout of
those data sets; the same arguments give the same files.
"""

import hashlib
import json
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

import numpy as np

from sensorium.data.made_media import encode_clip
from sensorium.data.media_store import MediaStore
from sensorium.data.sound import encode_wav
from sensorium.systems.audio_visual.sources import COLUMNS
from sensorium.vocabulary.content import Media, user
from sensorium.vocabulary.decoding import AudioParameters, VideoParameters
from sensorium.vocabulary.errors import TaskError, nearest
from sensorium.vocabulary.task import Task

COLOURS = {"red": (214, 48, 49), "green": (46, 160, 67), "blue": (52, 92, 210), "yellow": (240, 200, 40)}
TONES = {"low": 250.0, "middle": 500.0, "high": 1000.0, "top": 2000.0}
LETTERS = ("A", "B", "C", "D")
QUESTIONS = {
    "pair": "Which letter do the colour and the tone make?",
    "agree": "Do the colour and the tone agree?",
    "colour": "Which colour is the square?",
    "tone": "Which tone is it?",
}
ANSWERS = {"pair": LETTERS, "agree": ("yes", "no"), "colour": tuple(COLOURS), "tone": tuple(TONES)}
GROUNDS = ((255, 255, 255), (236, 236, 240), (244, 240, 232))
GREY = (128, 128, 128)
VARIANTS = 64
TEST_SHARE = 4
RATE = 16000
FPS, CLIP_FPS = 4.0, 16.0


@dataclass(frozen=True)
class SightAndSoundScene:
    """One task; variants distinguish squares of one colour, and tones of one pitch."""

    kind: str
    colour: str
    tone: str
    answer: str
    square_variant: int
    tone_variant: int


class SightAndSound:
    """A source of ``size`` tasks of the given ``kinds``: "pair", "agree" (both senses), "colour", "tone" (one of them).

    "pair": colour and tone make a letter by a Latin square that must be learned. "agree": red goes with low, green with
    middle, blue with high, yellow with top. ``mute`` gives silence for every tone and ``blank`` a grey screen for every
    square, to test whether a model uses both. ``guessed``: kinds whose demonstration is a guess. ``sampling`` is the rule
    that picks frames; the shipped model was trained with ``middle``.
    """

    def __init__(
        self,
        *,
        store: MediaStore,
        split: Literal["train", "test"] = "train",
        size: int = 8192,
        seed: int = 0,
        kinds: Sequence[str] = ("pair",),
        guessed: Sequence[str] = (),
        mute: bool = False,
        blank: bool = False,
        frames: int = 4,
        picture_size: int = 56,
        seconds: float = 0.4,
        sampling: Literal["middle", "official"] = "middle",
    ) -> None:
        for kind in (*kinds, *guessed):
            if kind not in QUESTIONS:
                raise TaskError(f"sight_and_sound: there is no kind of question '{kind}'{nearest(kind, list(QUESTIONS))}")
        if split not in ("train", "test"):
            raise TaskError(f"sight_and_sound: there is no split '{split}'{nearest(split, ['train', 'test'])}")
        if not kinds or size < 1 or frames < 1 or picture_size < 16 or picture_size % 2 or not 0.05 <= seconds <= 30:
            raise TaskError(
                "sight_and_sound: needs a kind of question, a size and frames of at least 1, an even picture_size of at "
                "least 16, and 0.05 to 30 seconds of sound."
            )
        self.store, self.split, self.size, self.seed = store, split, size, seed
        self.kinds, self.guessed = tuple(kinds), frozenset(guessed)
        self.mute, self.blank, self.sampling = mute, blank, sampling
        self.frames, self.picture_size, self.seconds = frames, picture_size, seconds
        self._made: dict[tuple[str, int], Media] = {}
        self._squares = {
            c: self._of_split(square_frames(c, v, frames, picture_size) for v in range(VARIANTS)) for c in COLOURS
        }
        self._tones = {t: self._of_split(tone_samples(t, v, seconds) for v in range(VARIANTS)) for t in TONES}

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < self.size:
            raise IndexError(f"sight_and_sound: there is no task {index} among {self.size}")
        scene = self.scene(index)
        shown = scene.answer
        if scene.kind in self.guessed:
            shown = self._random("guess", index).choice(ANSWERS[scene.kind])
        name = f"sight_and_sound/{self.split}/{self.seed}/{index}"
        marks = "".join(f"/{mark}" for mark, on in (("mute", self.mute), ("blank", self.blank)) if on)
        return Task(
            id=name + marks,
            messages=(user(self._video(scene), self._sound(scene), QUESTIONS[scene.kind]),),
            answer=scene.answer,
            demonstration=(f"<answer>{shown}</answer>",),
            metadata={"category": scene.kind, "colour": scene.colour, "tone": scene.tone},
        )

    def scene(self, index: int) -> SightAndSoundScene:
        random = self._random("scene", index)
        kind = self.kinds[index % len(self.kinds)]
        colours, tones = list(COLOURS), list(TONES)
        colour, tone = random.choice(colours), random.choice(tones)
        if kind == "agree" and random.random() < 0.5:
            tone = tones[colours.index(colour)]
        elif kind == "agree":
            tone = random.choice([t for t in tones if t != tones[colours.index(colour)]])
        place = colours.index(colour), tones.index(tone)
        answers = {"pair": LETTERS[sum(place) % len(LETTERS)], "agree": "yes" if place[0] == place[1] else "no"}
        answer = (answers | {"colour": colour, "tone": tone})[kind]
        square_variant, tone_variant = random.choice(self._squares[colour]), random.choice(self._tones[tone])
        return SightAndSoundScene(kind, colour, tone, answer, square_variant, tone_variant)

    def _of_split(self, clips: Iterable[np.ndarray]) -> list[int]:
        """The variants of this split, by content: a quarter of all clips belong to the test split."""
        digests = [hashlib.sha256(clip.tobytes()).digest() for clip in clips]
        return [
            variant for variant, digest in enumerate(digests) if (digest[0] % TEST_SHARE == 0) == (self.split == "test")
        ]

    def _video(self, scene: SightAndSoundScene) -> Media:
        what, variant = ("blank", 0) if self.blank else (scene.colour, scene.square_variant)
        if (what, variant) not in self._made:
            frames_THWC = square_frames(None if self.blank else what, variant, self.frames, self.picture_size)
            asked = VideoParameters(frames=self.frames, sampling=self.sampling)
            origin = f"sight_and_sound, square {what} {variant}"
            self._made[what, variant] = self.store.put(encode_clip(frames_THWC, FPS), "video", origin, asked)
        return self._made[what, variant]

    def _sound(self, scene: SightAndSoundScene) -> Media:
        what, variant = ("silence", 0) if self.mute else (scene.tone, scene.tone_variant)
        if (what, variant) not in self._made:
            samples = tone_samples(None if self.mute else what, variant, self.seconds)
            origin = f"sight_and_sound, tone {what} {variant}"
            self._made[what, variant] = self.store.put(encode_wav(samples, RATE), "sound", origin, AudioParameters(RATE))
        return self._made[what, variant]

    def _random(self, purpose: str, index: int) -> Random:
        return Random(f"sight and sound {self.seed} {self.split} {purpose} {index}")


def square_frames(colour: str | None, variant: int, count: int, size: int) -> np.ndarray:
    """Frames [T, H, W, 3] of a square that drifts over a plain ground; grey throughout without a colour."""
    if colour is None:
        return np.full((count, size, size, 3), GREY, np.uint8)
    random = Random(f"square {colour} {variant}")
    radius = random.randint(size * 3 // 14, size * 5 // 14)
    x, y = random.randint(radius, size - radius), random.randint(radius, size - radius)
    across, down = random.choice((-2, -1, 1, 2)), random.choice((-2, -1, 1, 2))
    frames_THWC = np.empty((count, size, size, 3), np.uint8)
    frames_THWC[:] = random.choice(GROUNDS)
    for frame_HWC in frames_THWC:
        frame_HWC[max(0, y - radius) : y + radius, max(0, x - radius) : x + radius] = COLOURS[colour]
        x, y = x + across, y + down
    return frames_THWC


def tone_samples(tone: str | None, variant: int, seconds: float) -> np.ndarray:
    """Samples [N] of a tone, a little out of tune, with a soft beginning and end; silence without a tone."""
    count = round(seconds * RATE)
    if tone is None:
        return np.zeros(count, np.float32)
    random = Random(f"tone {tone} {variant}")
    pitch = TONES[tone] * 2 ** random.uniform(-1 / 12, 1 / 12)
    loud, phase = random.uniform(0.2, 0.6), random.uniform(0, 2 * np.pi)
    times_N = np.arange(count) / RATE
    soft_N = np.minimum(1.0, np.minimum(times_N, times_N[::-1]) / 0.02)
    return (loud * soft_N * np.sin(2 * np.pi * pitch * times_N + phase)).astype(np.float32)


def make_intent(
    folder: Path,
    count: int = 8,
    *,
    bench: bool = False,
    seed: int = 0,
    problem_types: Sequence[str] = ("multiple choice", "emer_ov_mc", "numerical", "judge", "free-form"),
    seconds: float = 2.0,
    size: int = 64,
) -> None:
    """Write IntentTrain (two manifests of ``count`` rows each) or IntentBench (one), and ``videos.zip``."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / "videos.zip", "w") as archive:
        for manifest in ("qa.json",) if bench else ("emer_rewrite.json", "social_iq_v2_rewrite.json"):
            rows = []
            for i in range(count):
                random = Random(f"intent {manifest} {seed} {i}")
                file = f"{Path(manifest).stem}_{i}.mp4"
                colour, tone = random.choice(list(COLOURS)), random.choice(list(TONES))
                # Half of the files lie at the root and half under videos/, as the published archives do.
                member = zipfile.ZipInfo(file if i % 2 else f"videos/{file}")
                archive.writestr(member, _clip(colour, tone, i, seconds, size))
                row = _intent_row(problem_types[i % len(problem_types)], colour, tone, random)
                rows.append({**row, "path" if i % 3 == 2 else "video": file, "data_type": "video"})
            (folder / manifest).write_text(json.dumps(rows, indent=1))


def make_daily_omni(
    folder: Path, count: int = 12, *, seed: int = 0, seconds: float = 2.0, size: int = 64, videos: int = 4
) -> None:
    """Write ``qa.json`` with ``count`` questions of all Types about ``videos`` videos, and their files."""
    shown = []
    for i in range(videos):
        random = Random(f"daily omni {seed} {i}")
        colour, tone = random.choice(list(COLOURS)), random.choice(list(TONES))
        place = folder / "Videos" / f"v{i}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"v{i}_video.mp4").write_bytes(_clip(colour, tone, i, seconds, size))
        (place / f"v{i}_audio.wav").write_bytes(encode_wav(tone_samples(tone, i, seconds)))
        shown.append((colour, tone))
    rows = []
    for i in range(count):
        options, answer = _options(*shown[i % videos], Random(f"daily omni question {seed} {i}"))
        row = {"Question": "What is seen while which tone sounds?", "Choice": options, "Answer": answer}
        kind = list(COLUMNS)[i % len(COLUMNS)]
        rows.append({**row, "video_id": f"v{i % videos}", "Type": kind, "video_duration": f"{seconds:g}s"})
    (folder / "qa.json").write_text(json.dumps(rows, indent=1))


def _intent_row(kind: str, colour: str, tone: str, random: Random) -> dict[str, object]:
    options: list[str] = []
    if kind == "multiple choice":
        problem = "What is seen while which tone sounds?"
        options, answer = _options(colour, tone, random)
    elif kind == "emer_ov_mc":
        problem = "Which of these occur?"
        options = [f"{chr(65 + i)}. {word}" for i, word in enumerate((*COLOURS, *TONES))]
        answer = ",".join(sorted(option[0] for option in options if option[3:] in (colour, tone)))
    elif kind == "numerical":
        problem, answer = "How many squares are there?", "1"
    elif kind == "judge":
        asked = random.choice(list(COLOURS))
        problem, answer = f"Is the square {asked}?", "Yes" if asked == colour else "No"
    else:
        problem, answer = "What happens?", f"A {colour} square drifts to a {tone} tone."
    return {"problem_type": kind, "problem": problem, "options": options, "answer": answer}


def _options(colour: str, tone: str, random: Random) -> tuple[list[str], str]:
    """Four options of which one is right in both colour and tone, and its letter."""
    other_colour = random.choice([c for c in COLOURS if c != colour])
    other_tone = random.choice([t for t in TONES if t != tone])
    pairs = [(colour, tone), (other_colour, tone), (colour, other_tone), (other_colour, other_tone)]
    shuffled = random.sample(pairs, len(pairs))
    options = [f"{chr(65 + i)}. a {c} square, a {t} tone" for i, (c, t) in enumerate(shuffled)]
    return options, chr(65 + shuffled.index(pairs[0]))


def _clip(colour: str, tone: str, variant: int, seconds: float, size: int) -> bytes:
    frames_THWC: np.ndarray = square_frames(colour, variant, round(seconds * CLIP_FPS), size)
    return encode_clip(frames_THWC, CLIP_FPS, tone_samples(tone, variant, seconds))

"""Sight and sound: answers take both senses, clips are real, splits share none of them."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from sensorium.data.decoder import Decoder
from sensorium.data.media_store import MediaStore
from sensorium.data.sound import DecodedAudio
from sensorium.data.video import DecodedVideo
from sensorium.systems.audio_visual.generated import (
    ANSWERS,
    COLOURS,
    LETTERS,
    QUESTIONS,
    TONES,
    VARIANTS,
    SightAndSound,
    square_frames,
    tone_samples,
)
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.errors import TaskError
from sensorium.vocabulary.task import Task
from tests.data.clips import pitch_of


def decoded(store: MediaStore, task: Task) -> tuple[DecodedVideo, DecodedAudio]:
    video, sound = Decoder(store).get_many(task.messages[0].media)
    assert isinstance(video, DecodedVideo)
    assert isinstance(sound, DecodedAudio)
    return video, sound


def seen_colour(video: DecodedVideo) -> str:
    """The colour of the square, by the pixels that are none of the ground's."""
    pixels = video.frames.reshape(-1, 3).astype(int)
    coloured = pixels[np.ptp(pixels, axis=1) > 60].mean(axis=0)
    return min(COLOURS, key=lambda name: float(np.abs(coloured - COLOURS[name]).sum()))


def heard_tone(sound: DecodedAudio) -> str:
    pitch = pitch_of(sound.samples, sound.sample_rate)
    return min(TONES, key=lambda name: abs(np.log2(TONES[name] / pitch)))


@pytest.mark.parametrize("split", ["train", "test"])
def test_what_is_seen_and_heard_gives_the_answer(split: Any) -> None:
    store = MediaStore()
    source = SightAndSound(store=store, split=split, size=40, kinds=list(QUESTIONS))
    for i in range(40):
        task = source[i]
        video, sound = decoded(store, task)
        colour, tone = list(COLOURS).index(seen_colour(video)), list(TONES).index(heard_tone(sound))
        answers = {
            "pair": LETTERS[(colour + tone) % 4],
            "agree": "yes" if colour == tone else "no",
            "colour": list(COLOURS)[colour],
            "tone": list(TONES)[tone],
        }
        assert task.answer == answers[task.metadata["category"]]
        assert task.demonstration == (f"<answer>{task.answer}</answer>",)
        assert video.frames.shape == (4, 56, 56, 3)
        assert len(sound.samples) == 6400


@pytest.mark.parametrize("kind", ["pair", "agree"])
def test_one_sense_alone_tells_nothing(kind: str) -> None:
    source = SightAndSound(store=MediaStore(), size=8000, kinds=[kind])
    scenes = [source.scene(i) for i in range(8000)]
    choices = ANSWERS[kind]
    for known in [*COLOURS, *TONES]:
        answers = Counter(scene.answer for scene in scenes if known in (scene.colour, scene.tone))
        for answer in choices:
            assert answers[answer] / sum(answers.values()) == pytest.approx(1 / len(choices), abs=0.05)


def test_splits_share_no_clip() -> None:
    store = MediaStore()

    def clips(split: Any) -> set[Media]:
        source = SightAndSound(store=store, split=split, size=1500, seed=1, frames=2, picture_size=16, seconds=0.05)
        return {media for i in range(len(source)) for media in source[i].messages[0].media}

    train, test = clips("train"), clips("test")
    assert not train & test
    assert min(len(train), len(test)) > 50


def test_variants_differ_in_content() -> None:
    squares = {square_frames(c, v, 4, 56).tobytes() for c in COLOURS for v in range(VARIANTS)}
    tones = {tone_samples(t, v, 0.4).tobytes() for t in TONES for v in range(VARIANTS)}
    assert len(squares) == len(tones) == 4 * VARIANTS


def test_an_index_always_gives_the_same_task() -> None:
    one, two = (SightAndSound(store=MediaStore(), seed=3) for _ in range(2))
    for index in (0, 7, 8191):
        assert one[index] == two[index]
    assert one[5].messages != SightAndSound(store=MediaStore(), seed=4)[5].messages
    with pytest.raises(IndexError):
        one[8192]


def test_mute_and_blank_take_one_sense_away_and_leave_the_rest() -> None:
    store = MediaStore()
    options: dict[str, Any] = {"store": store, "split": "test", "size": 30}
    own = SightAndSound(**options)
    mute, blank = SightAndSound(mute=True, **options), SightAndSound(blank=True, **options)
    for i in range(30):
        (video, sound), (muted, _), (_, heard) = (source[i].messages[0].media for source in (own, mute, blank))
        assert (video, sound) == (muted, heard)
        assert own[i].answer == mute[i].answer == blank[i].answer
        assert len({own[i].id, mute[i].id, blank[i].id}) == 3
    assert np.abs(decoded(store, mute[0])[1].samples).max() == 0
    assert decoded(store, mute[0])[1].samples.shape == decoded(store, own[0])[1].samples.shape
    shown = decoded(store, blank[0])[0].frames
    assert np.abs(shown.astype(int) - 128).max() <= 2
    assert shown.shape == decoded(store, own[0])[0].frames.shape


def test_a_guess_has_the_right_form_and_is_right_by_chance() -> None:
    source = SightAndSound(store=MediaStore(), size=800, kinds=["pair", "colour"], guessed=["pair"], picture_size=16)
    right = Counter()
    for i in range(800):
        task = source[i]
        kind = task.metadata["category"]
        (told,) = task.demonstration
        assert told.removeprefix("<answer>").removesuffix("</answer>") in ANSWERS[kind]
        right[kind] += told == f"<answer>{task.answer}</answer>"
    assert right["colour"] == 400
    assert 60 < right["pair"] < 140


@pytest.mark.parametrize(
    "options",
    [
        {"kinds": ["par"]},
        {"kinds": []},
        {"guessed": ["x"]},
        {"split": "dev"},
        {"size": 0},
        {"picture_size": 15},
        {"seconds": 0},
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match="sight_and_sound"):
        SightAndSound(store=MediaStore(), **options)

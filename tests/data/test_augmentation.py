"""Augmented media: a function of seed, row and content, media of their own to every cache, and shown as such."""

import json
from base64 import b64decode
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sensorium.data.augmentation import augmentation_notes, augmented_task
from sensorium.data.decoder import Decoder, DiskCache
from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.data.sound import DecodedAudio, encode_wav
from sensorium.data.video import DecodedVideo
from sensorium.recipe.load import load_recipe
from sensorium.recipe.schema import AugmentSection
from sensorium.report.album import Album
from sensorium.rewards.judges.transport import wire_messages
from sensorium.runs.episodes import task_from_json, task_to_json
from sensorium.vocabulary.content import Media, user
from sensorium.vocabulary.decoding import Augmentation, VideoParameters
from sensorium.vocabulary.errors import RecipeError
from sensorium.vocabulary.task import EnvironmentSpec, Task
from tests.data.clips import CLIP, middle, numbers, pitch_of, tone

ALL = {
    "picture": {"crop": [0.5, 0.9], "brightness": [0.5, 1.5], "contrast": 1.1, "saturation": [0, 2], "blur": [0, 2]},
    "sound": {"speed": [0.9, 1.1], "gain": [-6, 6], "noise": [5, 30]},
    "video": {"jitter": [0.5, 1]},
}


def section(**given: Any) -> AugmentSection:
    found = load_recipe("shapes", [f"tasks.augment={json.dumps(given)}"]).tasks.augment
    assert found is not None
    return found


def ramp(width: int = 64, height: int = 48) -> np.ndarray:
    """A picture that gets brighter to the right."""
    return np.repeat(np.linspace(0, 250, width).astype(np.uint8)[None, :, None], height, 0).repeat(3, 2)


def media_of(store: MediaStore) -> tuple[Media, Media, Media]:
    picture = store.put_picture(encode_png(ramp()), "ramp.png")
    return picture, store.put(CLIP, "video", "clip.mp4", middle(frames=6)), store.put(encode_wav(tone()), "sound", "a.wav")


def changed(media: Media, **values: Any) -> Media:
    return replace(media, augmentation=Augmentation(**values))


def test_what_is_drawn_is_a_function_of_seed_row_and_task_and_survives_the_log() -> None:
    picture, video, sound = media_of(MediaStore())
    task = Task("t", (user(picture, video, sound, "and", picture, "?"),), answer="A", metadata={"category": "c"})
    every = section(**ALL)
    drawn = augmented_task(task, every, 3, 17)
    assert drawn == augmented_task(task, every, 3, 17)
    first, clip, heard, again = drawn.messages[0].media
    assert first == again, "one picture shown twice is one picture still"
    assert [item.hash for item in (first, clip, heard)] == [picture.hash, video.hash, sound.hash]
    assert (drawn.id, drawn.answer, drawn.messages[0].text) == ("t", "A", "and?")
    assert task_from_json(json.loads(json.dumps(task_to_json(drawn)))) == drawn
    keys = {
        item.key for seed, row in ((3, 17), (3, 18), (4, 17)) for item in _media(augmented_task(task, every, seed, row))
    }
    assert len(keys) == 9
    assert not keys & {picture.key, video.key, sound.key}
    only_sound = augmented_task(task, section(sound=ALL["sound"]), 3, 17)
    assert [item.augmentation is None for item in only_sound.messages[0].media] == [True, True, False, True]
    assert augmented_task(task, section(picture={"crop": 1, "blur": 0}), 3, 17) == task, "no change is no other picture"


def _media(task: Task) -> tuple[Media, ...]:
    return tuple(item for message in task.messages for item in message.media)


def test_a_picture_keeps_its_size_and_shows_the_part_that_was_drawn() -> None:
    store = MediaStore()
    picture, *_ = media_of(store)
    shown = np.asarray(store.picture(changed(picture, crop=(0.5, 0.25, 0.5))))
    assert shown.shape == (48, 64, 3)
    assert abs(int(shown[0, 0, 0]) - 125) < 8
    assert abs(int(shown[0, -1, 0]) - 250) < 8
    assert np.asarray(store.picture(changed(picture, brightness=0.5))).mean() < 0.55 * ramp().mean()
    assert np.asarray(store.picture(changed(picture, contrast=0.0))).std() == 0
    assert np.asarray(store.picture(picture)).tolist() == ramp().tolist()
    edge = changed(picture, crop=(0.95, 0.95, 0.05), blur=64.0, brightness=4.0)
    assert store.picture(edge).size == (64, 48)
    assert store.picture(edge) is store.picture(replace(edge)), "changed once"
    assert store.pictures_decoded == 1
    dot = changed(store.put_picture(encode_png(np.zeros((1, 1, 3), np.uint8)), "dot"), crop=(0.3, 0.3, 0.05), blur=1.0)
    assert store.picture(dot).size == (1, 1)


def test_a_sound_is_faster_higher_softer_and_noisy_as_asked() -> None:
    store = MediaStore()
    decoder = Decoder(store)
    *_, sound = media_of(store)

    def heard(**values: Any) -> np.ndarray:
        found = decoder.get(changed(sound, **values))
        assert isinstance(found, DecodedAudio)
        assert found.sample_rate == 16000
        assert found.samples.dtype == np.float32
        return found.samples

    plain = heard(seed=1)
    faster = heard(speed=1.25)
    assert abs(len(faster) - len(plain) / 1.25) < 50
    assert abs(pitch_of(faster, 16000) - 550) < 2
    assert np.allclose(heard(gain=-20.0), plain / 10, atol=1e-4)
    assert np.abs(heard(gain=30.0)).max() == 1
    noise = heard(noise=20.0, seed=5) - plain
    assert abs(10 * np.log10(np.square(plain).mean() / np.square(noise).mean()) - 20) < 0.3
    assert not np.array_equal(heard(noise=20.0, seed=6) - plain, noise)
    silence = store.put(encode_wav(np.zeros(800, np.float32)), "sound", "silence")
    quiet = decoder.get(changed(silence, noise=20.0, gain=30.0, speed=4.0))
    assert isinstance(quiet, DecodedAudio)
    assert not quiet.samples.any()
    decoder.close()


@pytest.mark.parametrize("asked", [middle(frames=6), VideoParameters(frames=6, sampling="official")])
def test_frames_move_within_their_gaps_and_stay_in_order(asked: VideoParameters) -> None:
    store = MediaStore()
    decoder = Decoder(store)
    video = store.put(CLIP, "video", "clip.mp4", asked)
    still = decoder.get(video)
    assert isinstance(still, DecodedVideo)
    for seed in range(20):
        clip = decoder.get(changed(video, jitter=1.0, seed=seed))
        assert isinstance(clip, DecodedVideo)
        taken = numbers(clip.frames)
        assert taken == clip.indices.tolist()
        assert taken == sorted(set(taken))
        assert np.abs(clip.indices - still.indices).max() <= 2
        assert len(clip.frames) == len(still.frames)
        if seed == 0:
            assert taken != numbers(still.frames)
    decoder.close()


def test_caches_keep_augmented_media_apart_from_the_file_and_each_other(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media")
    _, video, sound = media_of(store)
    versions = [
        sound,
        changed(sound, gain=-6.0),
        changed(sound, noise=10.0, seed=1),
        video,
        changed(video, jitter=1.0, seed=1),
    ]
    first = Decoder(store, DiskCache(tmp_path / "decoded", 10**8))
    made = [_pixels(one) for one in first.get_many(versions)]
    later = Decoder(store, DiskCache(tmp_path / "decoded", 10**8))
    assert [_pixels(one) for one in later.get_many(versions)] == made
    assert len(set(made)) == 5
    kept = (later.counters.decoded - store.pictures_decoded, later.counters.disk_hits)
    assert kept == (3, 2), "what one draw made is not kept on disk"
    first.close()
    later.close()


def _pixels(decoded: Any) -> bytes:
    values: np.ndarray = decoded.frames if isinstance(decoded, DecodedVideo) else decoded.samples
    return values.tobytes()


def test_judges_and_the_report_are_shown_what_the_model_saw() -> None:
    store = MediaStore()
    decoder = Decoder(store)
    picture, video, sound = media_of(store)
    dark = changed(picture, brightness=0.2)
    (message,) = wire_messages([user(dark, "?")], store, "frames")
    data = message["content"][0]["image_url"]["url"].partition("base64,")[2]
    assert _shown(data) == np.asarray(store.picture(dark)).tolist()
    album = Album(store, 10**7, decoder)
    pages = [album.show(one) for one in (picture, dark, changed(sound, gain=-6.0), changed(video, jitter=0.5, seed=2))]
    assert [page.count("augmented: ") for page in pages] == [0, 1, 1, 1]
    assert "brightness 0.2" in pages[1]
    embedded = [part.partition('"')[0] for part in album.definitions().split("data:image/png;base64,")[1:]]
    assert [_shown(part) for part in embedded] == [np.asarray(store.picture(one)).tolist() for one in (picture, dark)]
    decoder.close()


def _shown(data: str) -> Any:
    return np.asarray(Image.open(BytesIO(b64decode(data))).convert("RGB")).tolist()


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("picture.crop", [1, 0.5]),
        ("picture.crop", [0, 1]),
        ("picture.crop", [0.5, 1.2]),
        ("picture.blur", [0, 1e9]),
        ("picture.brightness", [-1, 1]),
        ("picture.contrast", [1, 1, 1]),
        ("picture.saturation", "much"),
        ("picture.flip", 0.5),
        ("sound.speed", 0),
        ("sound.gain", [0, float("inf")]),
        ("sound.noise", [float("nan"), 20]),
        ("sound.noise", True),
        ("video.jitter", [0, 1.5]),
    ],
)
def test_ranges_that_cannot_be_are_refused_by_their_key(kind: str, value: Any) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe(
            "shapes", [f"tasks.augment.{kind}={json.dumps(value).replace('NaN', '.nan').replace('Infinity', '.inf')}"]
        )
    assert f"tasks.augment.{kind}" in str(refused.value)


def test_what_cannot_be_augmented_is_refused_or_noted_at_the_start() -> None:
    picture, *_ = media_of(MediaStore())
    shown = Task("a", (user(picture, "?"),))
    played = Task("b", environment=EnvironmentSpec("frozen_lake"))
    assert augmentation_notes(None, [played]) == []
    for nothing in ({}, {"sound": None}):
        assert len(augmentation_notes(section(**nothing), [shown])) == 1, "a sweep may switch it off"
    assert augmentation_notes(section(picture={"blur": 1}), [shown, played]) == []
    (note,) = augmentation_notes(section(picture={"blur": 1}, sound={"gain": 3}), [shown, played])
    assert "tasks.augment.sound" in note
    for given in ({"picture": {"blur": 1}}, {"sound": {"gain": 3}}):
        with pytest.raises(RecipeError, match=r"tasks\.augment"):
            augmentation_notes(section(**given), [played] if "picture" in given else [shown])

"""Pictures, videos and sounds as a judge's endpoint receives them."""

import base64
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sensorium.data.made_media import encode_clip
from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.data.sound import encode_wav
from sensorium.rewards.judges.client import JudgeClient
from sensorium.rewards.judges.judgements import JudgeRequest
from sensorium.vocabulary.content import Media, user
from sensorium.vocabulary.decoding import AudioParameters, VideoParameters
from sensorium.vocabulary.errors import JudgeRefusal
from tests.rewards.judges.server import Answer, judge_server, section_of

STORE = MediaStore()
RED = encode_png(np.full((8, 8, 3), (255, 0, 0), np.uint8))
PICTURE = STORE.put(RED, "picture")
CLIP = encode_clip(np.stack([np.full((32, 32, 3), shade, np.uint8) for shade in (0, 80, 160, 240)]), 4.0)
VIDEO = STORE.put(CLIP, "video", parameters=VideoParameters(frames=2, sampling="middle"))
TRIMMED = STORE.put(CLIP, "video", parameters=VideoParameters(frames=2, start=0.5, sampling="middle"))
SOUND = STORE.put(encode_wav(np.zeros(1600, np.float32)), "sound", parameters=AudioParameters(16000))


def received(*blocks: Media | str, video: str = "frames") -> list[dict[str, Any]]:
    """The content parts that a real server gets."""
    with judge_server(lambda _: "yes") as server:
        client = JudgeClient(section_of(server.url), STORE)
        try:
            client.ask_now(JudgeRequest("judge", (user(*blocks),), "p/1", video=video))
        finally:
            client.close()
        return server.asked[0]["messages"][0]["content"]


def data_of(url: str) -> bytes:
    return base64.b64decode(url.partition(";base64,")[2])


def test_a_picture_is_sent_as_it_is() -> None:
    picture, text = received(PICTURE, "what?")
    assert picture["image_url"]["url"].startswith("data:image/png;")
    assert data_of(picture["image_url"]["url"]) == RED
    assert text == {"type": "text", "text": "what?"}


def test_a_video_is_sent_as_frames_with_their_times() -> None:
    *parts, _ = received(VIDEO, "what?")
    assert [part["type"] for part in parts] == ["text", "image_url"] * 2
    shades = [np.asarray(Image.open(BytesIO(data_of(part["image_url"]["url"])))).mean() for part in parts[1::2]]
    assert shades[0] < 120 < shades[1]
    assert parts[0]["text"].endswith("seconds>")


def test_a_video_is_sent_as_a_file_unless_it_is_trimmed() -> None:
    (video, _) = received(VIDEO, "what?", video="file")
    assert data_of(video["video_url"]["url"]) == CLIP
    with pytest.raises(JudgeRefusal, match="trimmed"):
        received(TRIMMED, "what?", video="file")


def test_an_endpoint_that_takes_no_video_file_is_answered_with_the_way_out() -> None:
    with judge_server(lambda _: Answer("unknown part video_url", 400)) as server:
        client = JudgeClient(section_of(server.url), STORE)
        try:
            with pytest.raises(JudgeRefusal, match="video: frames"):
                client.ask_now(JudgeRequest("judge", (user(VIDEO, "what?"),), "p/1", video="file"))
            with pytest.raises(JudgeRefusal) as plain:
                client.ask_now(JudgeRequest("judge", (user(VIDEO, "what?"),), "p/1"))
        finally:
            client.close()
    assert "video: frames" not in str(plain.value)


def test_a_sound_is_sent_as_wav() -> None:
    (sound, _) = received(SOUND, "what?")
    assert sound["input_audio"]["format"] == "wav"
    assert base64.b64decode(sound["input_audio"]["data"])[:4] == b"RIFF"


def test_how_a_video_is_shown_is_part_of_what_a_judgement_is_known_by() -> None:
    keys = {
        JudgeRequest("judge", (user(media, "what?"),), "p/1", video=how).key
        for media in (VIDEO, TRIMMED)
        for how in ("frames", "file")
    }
    assert len(keys) == 4

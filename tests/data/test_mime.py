"""The type of a medium is told from its bytes, for files as encoders really write them."""

import numpy as np
import pytest

from sensorium.data.made_media import encode_clip
from sensorium.data.media_files import HEAD_BYTES, UNKNOWN, mime_type
from sensorium.data.pictures import encode_png
from sensorium.data.sound import encode_wav

from .clips import numbered, tone

CLIPS = {
    "video/mp4": {"format": "mp4"},
    "video/quicktime": {"format": "mov"},
    "video/x-matroska": {"format": "matroska"},
    "video/webm": {"format": "webm", "video_codec": "libvpx", "audio_codec": "libopus"},
    "video/x-msvideo": {"format": "avi"},
    "video/x-flv": {"format": "flv"},
}
SOUNDS = {
    "audio/mp4": {"format": "ipod", "audio_codec": "aac"},
    "audio/ogg": {"format": "ogg", "audio_codec": "libopus"},
    "audio/flac": {"format": "flac", "audio_codec": "flac"},
    "audio/mpeg": {"format": "mp3", "audio_codec": "libmp3lame"},
    "audio/aac": {"format": "adts", "audio_codec": "aac"},
}


@pytest.mark.parametrize("kind", CLIPS)
def test_clips_are_told_by_their_container_and_their_sound_is_a_sound(kind: str) -> None:
    rate = 48000 if "webm" in kind else 44100
    head = encode_clip(numbered(8), 8.0, tone(0.5, rate=rate), rate, **CLIPS[kind])[:HEAD_BYTES]  # type: ignore[arg-type]
    assert mime_type(head, "video") == kind
    assert mime_type(head, "sound") == kind.replace("video/", "audio/")


@pytest.mark.parametrize("kind", SOUNDS)
def test_sounds_are_told_by_their_format(kind: str) -> None:
    data = encode_clip(None, samples=tone(0.5, rate=48000), sample_rate=48000, **SOUNDS[kind])  # type: ignore[arg-type]
    assert mime_type(data[:HEAD_BYTES], "sound") == kind


def test_waves_pictures_and_what_nobody_knows() -> None:
    assert mime_type(encode_wav(tone(0.1))[:HEAD_BYTES], "sound") == "audio/wav"
    assert mime_type(encode_png(np.zeros((2, 2, 3), np.uint8))[:HEAD_BYTES], "picture") == "image/png"
    assert mime_type(b"\xff\xfb\x90\x00", "sound") == "audio/mpeg"
    for head in (b"", b"\xff", b"hello", b"RIFF????what"):
        assert mime_type(head, "sound") == UNKNOWN

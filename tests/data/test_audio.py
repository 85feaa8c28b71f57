"""Sounds become one channel at the rate asked for, whole, or are refused by name."""

import struct
from math import isclose
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sensorium.data.made_media import encode_clip
from sensorium.data.sound import SHARP, decode_audio, encode_wav
from sensorium.vocabulary.decoding import AudioParameters
from sensorium.vocabulary.errors import MediaError
from tests.data.clips import CLIP, index_first, numbered, pitch_of, remuxed, tone

WHOLE = AudioParameters()


@given(st.lists(st.integers(-32767, 32767), min_size=1, max_size=400))
def test_a_wave_at_the_same_rate_is_kept_sample_for_sample(levels: list[int]) -> None:
    samples = np.array(levels, np.float32) / 32767
    sound = decode_audio(encode_wav(samples), WHOLE, "x")
    assert (sound.samples.dtype, sound.sample_rate) == (np.float32, 16000)
    assert np.array_equal(sound.samples, np.array(levels, np.float32) / 32768)


@pytest.mark.parametrize(
    ("form", "codec"),
    [("wav", "pcm_s16le"), ("flac", "flac"), ("mp3", "libmp3lame"), ("ogg", "libopus"), ("ogg", "flac"), ("mp4", "aac"),
     ("adts", "aac"), ("matroska", "libopus")],
)  # fmt: skip
def test_usual_formats_keep_pitch_and_length(form: str, codec: str) -> None:
    sound = decode_audio(encode_clip(samples=tone(2.0, 440.0), format=form, audio_codec=codec), WHOLE, "x")
    assert isclose(sound.duration_s, 2.0, abs_tol=0.15)  # bare AAC has its run-in
    assert isclose(pitch_of(sound.samples, 16000), 440.0, abs_tol=2.0)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_any_rate_is_resampled(rate: int) -> None:
    sound = decode_audio(encode_wav(tone(1.0, 300.0, rate), rate), WHOLE, "x")
    assert len(sound.samples) == 16000
    assert isclose(pitch_of(sound.samples, 16000), 300.0, abs_tol=2.0)
    assert isclose(float(np.abs(sound.samples).max()), 0.5, abs_tol=0.02)


def test_channels_are_averaged_so_that_nothing_clips() -> None:
    loud = tone(1.0, loud=1.0)
    both = decode_audio(encode_wav(np.stack([loud, loud], 1)), WHOLE, "x").samples
    left = decode_audio(encode_wav(np.stack([loud, 0 * loud], 1)), WHOLE, "x").samples
    assert np.allclose(both, loud, atol=1e-4)
    assert np.allclose(left, loud / 2, atol=1e-4)


def test_more_channels_than_loudspeakers() -> None:
    """Past eight channels libav keeps them elsewhere."""
    loud = tone(0.2, loud=0.9)
    many = np.stack([loud * i / 11 for i in range(12)], 1)
    assert np.allclose(decode_audio(encode_wav(many), WHOLE, "x").samples, loud / 2, atol=1e-3)


def test_the_sound_track_of_a_video() -> None:
    sound = decode_audio(CLIP, WHOLE, "x")
    assert isclose(sound.duration_s, 3.0, abs_tol=0.02)
    assert isclose(pitch_of(sound.samples, 16000), 440.0, abs_tol=2.0)


@pytest.mark.parametrize(("start", "end"), [(0.0, 0.5), (0.25, 1.0), (1.5, None), (1.0, 2.2)])
def test_trimming_cuts_at_the_sample(start: float, end: float | None) -> None:
    ramp = np.linspace(-1, 1, 32000).astype(np.float32)
    whole = decode_audio(encode_wav(ramp), WHOLE, "x").samples
    part = decode_audio(encode_wav(ramp), AudioParameters(start=start, end=end), "x")
    last = 2.0 if end is None else min(2.0, end)
    assert np.array_equal(part.samples, whole[round(start * 16000) : round(last * 16000)])
    assert (part.start_s, part.end_s, part.duration_s) == (start, last, 2.0)


@pytest.mark.parametrize("form", ["mkv", "mp4", "ts"])
def test_a_track_that_begins_late_is_preceded_by_silence(form: str, tmp_path: Path) -> None:
    data = remuxed(encode_clip(numbered(), 8.0, tone(2.0)), tmp_path / f"late.{form}", sound_late_s=1.0)
    sound = decode_audio(data, WHOLE, "x")
    assert isclose(sound.duration_s, 3.0, abs_tol=0.15)
    assert np.abs(sound.samples[: int(0.85 * 16000)]).max() < 0.01
    assert isclose(pitch_of(sound.samples[20000:40000], 16000), 440.0, abs_tol=2.0)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "empty"),
        (b"this is not a sound at all", "known format"),
        (encode_clip(numbered()), "no audio track, only video"),
        (encode_wav(tone())[:50_000], "truncated: 46044 of its 96000 bytes"),
        (encode_clip(samples=tone(), format="matroska", audio_codec="libopus")[:12_000], "truncated"),
        (CLIP[: len(CLIP) // 2], "truncated"),
        (encode_wav(np.zeros(0, np.float32)), "zero length|no length"),
        (encode_wav(tone())[:24] + b"\x80\x3e\x00\x6d" + encode_wav(tone())[28:], "sample rate of 1828732544 Hz"),
        (CLIP.replace(b"mp4a", b"zzzz").replace(b"esds", b"zzzz"), "codec"),
    ],
    ids=lambda value: value if isinstance(value, str) else "data",  # containers hold random ids, workers compare names
)
def test_what_is_no_sound_is_refused_by_name(data: bytes, what: str) -> None:
    with pytest.raises(MediaError, match=f"train.jsonl:7: .*({what})"):
        decode_audio(data, WHOLE, "train.jsonl:7")


def test_a_truncated_file_that_still_opens_is_found(tmp_path: Path) -> None:
    whole = index_first(encode_clip(samples=tone(6.0)), tmp_path)
    with pytest.raises(MediaError, match=r"row 3: .*truncated"):
        decode_audio(whole[: len(whole) // 2], WHOLE, "row 3")


@pytest.mark.parametrize("trim", [{"start": 3.5}, {"start": 2.0, "end": 4.0}])
@pytest.mark.parametrize("form", ["wav", "mp4"])
def test_a_trim_outside_of_the_sound_is_refused(trim: dict[str, float], form: str) -> None:
    data = encode_wav(tone()) if form == "wav" else CLIP
    with pytest.raises(MediaError, match=r"row 3: the part asked for, .* outside of the sound"):
        decode_audio(data, AudioParameters(**trim), "row 3")  # type: ignore[arg-type]


@pytest.mark.parametrize("peak", [1e5, 1e19, 3e38])
def test_samples_beyond_any_recording_are_refused_with_their_size(peak: float) -> None:
    loud, scaled = np.zeros(1600, np.float32), np.zeros(1600, np.float32)
    loud[7], scaled[7] = peak, 32768.0
    with pytest.raises(MediaError, match=rf"row 3: .*{peak:.3g}".replace("+", r"\+")):
        decode_audio(float_wav(loud), WHOLE, "row 3")
    assert np.abs(decode_audio(float_wav(scaled), WHOLE, "row 3").samples).max() == 32768.0


def float_wav(samples: np.ndarray) -> bytes:
    """A WAV of 32-bit floats at 16 kHz."""
    data = samples.astype("<f4").tobytes()
    head = struct.pack("<HHIIHH", 3, 1, 16000, 64000, 4, 32)
    body = b"WAVEfmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


@settings(deadline=None, max_examples=75)
@given(st.data())
def test_no_damage_whatever_raises_anything_but_media_error(data: st.DataObject) -> None:
    original = data.draw(st.sampled_from([CLIP, encode_wav(tone(0.2))]))
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 20))):
        damaged[data.draw(st.integers(0, len(original) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert np.isfinite(decode_audio(bytes(damaged), WHOLE, "row 3").samples).all()
    except MediaError as error:
        if "row 3" not in str(error):
            raise AssertionError(str(error)) from error


def test_the_page_names_the_resampler_and_its_filter() -> None:
    page = (Path(__file__).parents[2] / "docs/guides/media.md").read_text()
    assert "libswresample" in page
    assert "aresample" in page
    assert all(f"`{part}`" in page for part in SHARP.split(":"))

"""Videos are sampled evenly, upright, within their budgets, or refused by name."""

import io
from math import isclose
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sensorium.data.frame_sizes import budgeted
from sensorium.data.made_media import encode_clip
from sensorium.data.sound import encode_wav
from sensorium.data.video import decode_video, sampled_times
from sensorium.vocabulary.decoding import VideoParameters
from sensorium.vocabulary.errors import MediaError
from tests.data.clips import CLIP, index_first, middle, numbered, numbers, tone


def test_each_frame_is_the_one_shown_in_the_middle_of_its_part() -> None:
    clip = decode_video(CLIP, middle(frames=4), "x")
    assert clip.times_s.tolist() == [0.375, 1.125, 1.875, 2.625]
    assert numbers(clip.frames) == [3, 9, 15, 21]
    assert (clip.frames.shape, clip.frames.dtype) == ((4, 48, 64, 3), np.uint8)
    assert (clip.source_fps, clip.duration_s, clip.size, clip.seconds_per_frame) == (8.0, 3.0, (64, 48), 0.75)


@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        (middle(frames=1), [12]),
        (middle(fps=1), [4, 12, 20]),
        (middle(), [2, 6, 10, 14, 18, 22]),
        (middle(fps=0.1, min_frames=2), [6, 18]),
        (middle(fps=100, max_frames=3), [4, 12, 20]),
        (middle(frames=2, start=1, end=2), [10, 14]),
        (middle(fps=8, start=2.5), [20, 21, 22, 23]),
        (middle(frames=48, start=2.75), [22] * 24 + [23] * 24),
        (middle(frames=2, start=2, end=3.4), [18, 22]),
    ],
)
def test_numbers_rates_and_trims(parameters: VideoParameters, found: list[int]) -> None:
    assert numbers(decode_video(CLIP, parameters, "x").frames) == found


def test_path_and_bytes_give_the_same(tmp_path: Path) -> None:
    (tmp_path / "concat:a.mp4").write_bytes(CLIP)
    read = decode_video(tmp_path / "concat:a.mp4", middle(frames=3), "x")
    assert np.array_equal(read.frames, decode_video(CLIP, middle(frames=3), "x").frames)


@pytest.mark.parametrize(
    ("form", "codec"),
    [("matroska", "libx264"), ("webm", "libvpx-vp9"), ("mpegts", "libx264"), ("avi", "mpeg4"), ("mp4", "mpeg4"),
     ("flv", "libx264"), ("h264", "libx264")],
)  # fmt: skip
def test_usual_containers_agree(form: str, codec: str) -> None:
    """mpegts and flv begin late, h264 has neither times nor length."""
    data = encode_clip(numbered(), 8.0, format=form, video_codec=codec)
    clip = decode_video(data, middle(frames=4), "x")
    assert numbers(clip.frames) == [3, 9, 15, 21]
    assert isclose(clip.duration_s, 3.0, abs_tol=0.01)


def test_an_animated_picture_is_a_video() -> None:
    pictures = [Image.fromarray(frame) for frame in numbered(5)]
    buffer = io.BytesIO()
    pictures[0].save(buffer, "GIF", save_all=True, append_images=pictures[1:], duration=200)
    assert numbers(decode_video(buffer.getvalue(), middle(frames=5), "x").frames) == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_a_frame_is_shown_until_the_next_begins() -> None:
    uneven = encode_clip(numbered(4), 8.0, times_s=[0.0, 0.5, 2.0, 2.5])
    clip = decode_video(uneven, middle(frames=5, end=2.5), "x")
    assert clip.times_s.tolist() == [0.25, 0.75, 1.25, 1.75, 2.25]
    assert numbers(clip.frames) == [0, 1, 1, 1, 2]


def test_a_single_frame_fills_the_clip() -> None:
    assert numbers(decode_video(encode_clip(numbered(1), 8.0), middle(frames=4), "x").frames) == [0] * 4


@pytest.mark.parametrize("turn", [90, 180, -90])
def test_rotation_is_done_to_the_pixels(turn: int) -> None:
    picture = np.zeros((48, 64, 3), np.uint8)
    picture[:24, :32] = (255, 0, 0)
    picture[24:, 32:] = (0, 0, 255)
    shown = decode_video(encode_clip(np.stack([picture] * 8), rotation=turn), middle(frames=1), "x")
    upright = np.rot90(picture, turn // 90)
    assert shown.frames.shape[1:] == upright.shape
    assert shown.size == upright.shape[1::-1]
    assert np.abs(shown.frames[0].astype(int) - upright).mean() < 6


def test_odd_sizes_and_colours_survive() -> None:
    red = np.broadcast_to(np.array([214, 48, 49], np.uint8), (8, 33, 17, 3))
    clip = decode_video(encode_clip(red), middle(frames=2), "x")
    assert clip.frames.shape == (2, 33, 17, 3)
    assert np.abs(clip.frames.astype(int) - red[0]).max() <= 3


def test_seeking_finds_what_decoding_through_finds() -> None:
    frames = numbered(30 * 4)
    data = encode_clip(frames, 4.0, keyframe_every=40)
    sparse = decode_video(data, middle(frames=5), "x")
    dense = decode_video(data, middle(fps=4), "x")
    indices = [list(dense.times_s).index(t) for t in sparse.times_s + 0.125]
    assert sparse.seconds_per_frame == 6.0
    assert np.array_equal(sparse.frames, dense.frames[indices])
    trimmed = decode_video(data, middle(fps=4, start=20.0, end=22.0), "x")
    assert np.array_equal(trimmed.frames, dense.frames[80:88])


def test_frames_fit_their_budgets_and_keep_their_aspect() -> None:
    one = decode_video(CLIP, middle(frames=2, max_pixels_per_frame=800), "x")
    assert one.frames.shape == (2, 24, 32, 3)
    all_of_them = decode_video(CLIP, middle(frames=4, max_pixels_per_clip=4 * 800), "x")
    assert all_of_them.frames.shape == (4, 24, 32, 3)
    assert all_of_them.size == (64, 48)
    enlarged = decode_video(CLIP, middle(frames=1, min_pixels_per_frame=4 * 64 * 48), "x")
    assert enlarged.frames.shape == (1, 96, 128, 3)
    assert numbers(enlarged.frames) == [12]


SIDES = st.integers(1, 4000)
BUDGETS = st.integers(1, 10**6)


@given(SIDES, SIDES, st.integers(1, 64), BUDGETS, BUDGETS, BUDGETS)
def test_budgets_hold_for_any_size(width: int, height: int, frames: int, frame: int, clip: int, least: int) -> None:
    asked = VideoParameters(
        sampling="middle", max_pixels_per_frame=frame, max_pixels_per_clip=clip, min_pixels_per_frame=least
    )
    new_width, new_height = budgeted((width, height), frames, asked)
    pixels = new_width * new_height
    assert pixels <= max(1, min(frame, clip // frames))
    if min(new_width, new_height) > 20:
        assert isclose(new_width / new_height, width / height, rel_tol=0.1)
        assert pixels >= 0.9 * min(width * height, frame, clip // frames)


@given(st.floats(0, 1000), st.floats(0.01, 1000), st.integers(1, 100))
def test_sampled_times_are_even_and_inside(start: float, length: float, count: int) -> None:
    times = sampled_times(middle(frames=count), start, start + length)
    assert start < times[0]
    assert times[-1] < start + length
    assert isclose(times[0] - start, start + length - times[-1], abs_tol=1e-9 + 1e-9 * start)
    assert np.allclose(np.diff(times), length / count)


@given(st.floats(0.01, 600), st.floats(0.05, 30), st.integers(1, 10), st.integers(10, 100))
def test_rates_give_a_number_within_its_bounds(length: float, fps: float, least: int, most: int) -> None:
    count = len(sampled_times(middle(fps=fps, min_frames=least, max_frames=most), 0.0, length))
    assert least <= count <= most
    if least < count < most:
        assert abs(count - length * fps) <= 0.5 + 1e-6


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "empty"),
        (b"this is not a video at all", "known format"),
        (b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n", "known format"),
        (CLIP[: len(CLIP) // 2], "truncated or damaged"),
        (encode_wav(tone()), "no video track, only audio"),
        (encode_clip(samples=tone(), format="mp3", audio_codec="libmp3lame"), "no video track"),
    ],
)
def test_what_is_no_video_is_refused_by_name(data: bytes, what: str) -> None:
    with pytest.raises(MediaError, match=f"train.jsonl:7: .*{what}"):
        decode_video(data, middle(frames=4), "train.jsonl:7")


@pytest.mark.parametrize("sampling", ["middle", "official"])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_a_truncated_file_that_still_opens_is_found(share: float, sampling: str, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (48, 48, 64, 3), dtype=np.uint8)
    asked = VideoParameters(sampling=sampling, frames=16, max_pixels_per_frame=4000)
    for data in (index_first(encode_clip(noise), tmp_path), encode_clip(noise, format="matroska")):
        assert decode_video(data, asked, "x").frames.shape[0] == 16
        with pytest.raises(MediaError, match=r"row 3.*truncated"):
            decode_video(data[: int(len(data) * share)], asked, "row 3")


def test_an_unknown_codec_is_named() -> None:
    with pytest.raises(MediaError, match=r"row 3: .*codec"):
        decode_video(CLIP.replace(b"avc1", b"zzzz"), middle(frames=4), "row 3")


@pytest.mark.parametrize("trim", [{"start": 3.0}, {"start": 9.0, "end": 10.0}, {"end": 3.6}])
def test_a_trim_outside_of_the_clip_is_refused(trim: dict[str, float]) -> None:
    with pytest.raises(MediaError, match=r"row 3: the part asked for, .* outside of the video, which lasts 3\.00 s"):
        decode_video(CLIP, middle(frames=2, **trim), "row 3")


@pytest.mark.parametrize("place", ["gone.mp4", "."])
def test_a_path_that_cannot_be_read_is_refused(place: str, tmp_path: Path) -> None:
    with pytest.raises(MediaError, match=r"row 3: cannot read the video"):
        decode_video(tmp_path / place, middle(frames=2), "row 3")


@settings(deadline=None, max_examples=75)
@given(st.data())
def test_no_damage_whatever_raises_anything_but_media_error(data: st.DataObject) -> None:
    damaged = bytearray(CLIP)
    for _ in range(data.draw(st.integers(1, 20))):
        damaged[data.draw(st.integers(0, len(CLIP) - 1))] = data.draw(st.integers(0, 255))
    asked = VideoParameters(sampling=data.draw(st.sampled_from(["middle", "official"])), frames=4)
    try:
        clip = decode_video(bytes(damaged), asked, "row 3")
        assert clip.frames.shape[0] == 4
    except MediaError as error:
        if "row 3" not in str(error):
            raise AssertionError(str(error)) from error


def test_decoded_frames_cannot_be_drawn_on() -> None:
    clip = decode_video(CLIP, middle(frames=1), "x")
    with pytest.raises(ValueError, match="read-only"):
        clip.frames[0, 0, 0, 0] = 1

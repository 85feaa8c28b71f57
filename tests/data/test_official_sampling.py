"""Frames, sizes and sounds are those of the Qwen models' own tools, where these are installed."""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sensorium.data.frame_sizes import official_size
from sensorium.data.made_media import encode_clip
from sensorium.data.sound import decode_audio, encode_wav
from sensorium.data.video import decode_video, nemo_rl_indices, official_indices
from sensorium.vocabulary.decoding import AudioParameters, FrameRule, VideoParameters
from sensorium.vocabulary.errors import MediaError
from tests.data.clips import CLIP, middle, numbered, numbers, tone

OLD = FrameRule()
NEW = FrameRule("official", 32, 128 * 32 * 32, 768 * 32 * 32, 115200 * 32 * 32)


def official(**asked: Any) -> VideoParameters:
    return VideoParameters(sampling="official", **asked).resolved(OLD)


@pytest.mark.parametrize(
    ("total", "fps", "asked", "count", "head", "seconds"),
    [
        (300, 30, {}, 20, [0, 16, 31, 47], 1.0),
        (210, 29.97, {}, 14, [0, 16, 32, 48], 1.001),
        (85, 25, {}, 6, [0, 17, 34, 50, 67, 84], 1.13333),
        (15, 30, {}, 4, [0, 5, 9, 14], 0.25),
        (3, 10, {}, 2, [0, 2], 0.3),
        (100, 8, {}, 24, [0, 4, 9, 13], 1.04167),
        (27000, 30, {}, 768, [0, 35, 70, 106], 2.34375),
        (300, 30, {"frames": 5}, 4, [0, 100, 199, 299], 5.0),
        (300, 30, {"frames": 7}, 8, [0, 43, 85, 128, 171, 214, 256, 299], 2.5),
        (300, 30, {"frames": 9}, 8, [0, 43, 85, 128], 2.5),
        (300, 30, {"fps": 1}, 10, [0, 33, 66, 100], 2.0),
        (300, 30, {"fps": 1, "min_frames": 5, "max_frames": 9}, 8, [0, 43, 85, 128], 2.5),
        (300, 30, {"fps": 1, "start": 2, "end": 7}, 4, [60, 110, 160, 210], 2.51667),
        (3600, 30, {"max_frames": 32}, 32, [0, 116, 232, 348], 7.5),
    ],
)
def test_frames_are_counted_as_measured(
    total: int, fps: float, asked: dict[str, Any], count: int, head: list[int], seconds: float
) -> None:
    indices, each = official_indices(official(**asked), total, fps)
    assert (len(indices), indices.tolist()[: len(head)]) == (count, head)
    assert 2 * each == pytest.approx(seconds, abs=1e-5)


@pytest.mark.parametrize(
    ("size", "frames", "asked", "tokens"),
    [
        ((128, 128), 8, {}, 576),
        ((128, 128), 8, {"min_pixels_per_frame": 1024}, 64),
        ((640, 360), 16, {}, 1760),
        ((1280, 720), 16, {}, 5760),
    ],
)
def test_a_clip_takes_as_many_tokens_of_qwen3_vl_as_the_page_has(
    size: tuple[int, int], frames: int, asked: dict[str, Any], tokens: int
) -> None:
    """qwen-vl-utils 0.0.14 gives 576, 1,760 and 5,760, the stock processor 64, 1,760 and 7,040."""
    width, height = official_size(size, frames, VideoParameters(sampling="official", **asked).resolved(NEW))
    assert frames // 2 * (width // 32) * (height // 32) == tokens
    page = (Path(__file__).parents[2] / "docs/guides/media.md").read_text()
    assert f"{tokens:,}" in page[page.index("### Qwen3-VL's small and large clips") :]


@pytest.mark.parametrize(
    ("height", "width", "frames", "asked", "old", "new"),
    [
        (360, 640, 8, {}, (364, 644), (352, 640)),
        (1080, 1920, 120, {}, (560, 1008), (640, 1152)),
        (1080, 1920, 768, {}, (336, 644), (384, 736)),
        (120, 160, 8, {}, (280, 392), (320, 448)),
        (1080, 1920, 8, {"max_pixels_per_frame": 200704}, (336, 588), (320, 576)),
        (1080, 1920, 120, {"max_pixels_per_clip": 16056320}, (364, 672), (384, 672)),
        (1080, 1920, 8, {"min_pixels_per_frame": 3136, "max_pixels_per_frame": 12544}, (84, 140), (64, 128)),
        (1080, 1920, 8, {"max_pixels_per_frame": 12544}, (84, 140), (64, 128)),
    ],
)
def test_sizes_are_as_measured(
    height: int, width: int, frames: int, asked: dict[str, Any], old: tuple[int, int], new: tuple[int, int]
) -> None:
    for rule, (high, wide) in ((OLD, old), (NEW, new)):
        assert official_size((width, height), frames, VideoParameters(**asked).resolved(rule)) == (wide, high)


def test_a_file_with_too_few_frames_is_refused_with_the_way_out() -> None:
    few = encode_clip(numbered(6), 8.0)
    with pytest.raises(MediaError, match=r"x: .*8 frames are asked for and it has 6.*sampling: middle"):
        decode_video(few, official(frames=8), "x")
    with pytest.raises(MediaError, match="no pair to take"):
        decode_video(encode_clip(numbered(1), 8.0), official(), "x")


@pytest.mark.parametrize("form", ["mp4", "matroska", "mpegts", "h264"])
def test_frames_are_taken_by_their_numbers(form: str) -> None:
    clip = decode_video(encode_clip(numbered(), 8.0, format=form), official(frames=4, max_pixels_per_frame=6400), "x")
    assert clip.indices.tolist() == numbers(clip.frames) == [0, 8, 15, 23]


TOOLS = ("qwen_vl_utils.vision_process", "qwen_omni_utils.v2_5.vision_process")


@pytest.mark.parametrize("tool", TOOLS)
@settings(max_examples=40, deadline=None)
@given(
    total=st.integers(2, 3000),
    fps=st.sampled_from([8.0, 23.976, 25.0, 30.0, 60.0]),
    asked=st.one_of(
        st.fixed_dictionaries({"fps": st.floats(0.1, 9.0)}),
        st.fixed_dictionaries({"fps": st.just(2.0), "min_frames": st.integers(1, 9), "max_frames": st.integers(9, 40)}),
        st.integers(2, 40).map(lambda count: {"nframes": count}),
    ),
    window=st.one_of(st.none(), st.tuples(st.floats(0, 20), st.floats(0.5, 60))),
)
def test_numbers_of_frames_are_those_of_the_installed_tool(
    tool: str, total: int, fps: float, asked: dict[str, Any], window: tuple[float, float] | None
) -> None:
    module = pytest.importorskip(tool)
    trim = {} if window is None else {"video_start": window[0], "video_end": window[0] + window[1]}
    ours = {"frames" if key == "nframes" else key: value for key, value in asked.items()}
    ours |= {key.removeprefix("video_"): value for key, value in trim.items()}
    try:
        first, last, held = module.calculate_video_frame_range(trim, total, fps)
        count = module.smart_nframes(asked, total_frames=held, video_fps=fps)
    except ValueError:
        with pytest.raises(ValueError, match=r"sampling: middle"):
            official_indices(official(**ours), total, fps)
        return
    indices, seconds = official_indices(official(**ours), total, fps)
    assert indices.tolist() == torch.linspace(first, last, count).round().long().tolist()
    assert 1 / seconds == pytest.approx(count / held * fps)


@pytest.mark.parametrize("tool", TOOLS)
@settings(max_examples=40, deadline=None)
@given(
    size=st.tuples(st.integers(20, 2000), st.integers(20, 2000)),
    frames=st.integers(1, 384).map(lambda pairs: 2 * pairs),
    least=st.one_of(st.none(), st.integers(784, 200_000)),
    more=st.one_of(st.none(), st.integers(0, 1_000_000)),
    clip=st.one_of(st.none(), st.integers(100_000, 100_000_000)),
    patch=st.sampled_from([14, 16]),
)
def test_sizes_are_those_of_the_installed_tool(
    tool: str, size: tuple[int, int], frames: int, least: int | None, more: int | None, clip: int | None, patch: int
) -> None:
    module = pytest.importorskip(tool)
    rule = OLD if patch == 14 else NEW
    most = None if more is None else (rule.min_pixels if least is None else least) + more
    theirs = {"min_pixels": least, "max_pixels": most, "total_pixels": clip}
    blank = torch.zeros(1, 1, 1, 1).expand(frames, 3, size[1], size[0])
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(module.VIDEO_READER_BACKENDS, module.get_video_reader_backend(), lambda _: (blank, {}, 2.0))
        patched.setattr(module.transforms.functional, "resize", lambda _, asked, **__: torch.zeros(asked))
        given = {key: value for key, value in theirs.items() if value is not None}
        found = module.fetch_video({"video": "a", **given}, image_patch_size=patch)
    asked = VideoParameters(min_pixels_per_frame=least, max_pixels_per_frame=most, max_pixels_per_clip=clip)
    height, width = (max(side, rule.multiple) for side in found.shape)  # it may leave a sliver without any pixels
    assert official_size(size, frames, asked.resolved(rule)) == (width, height)


def test_frames_are_those_of_the_installed_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reader is not installed everywhere, so it is given the frames; which of them and how large is its own doing."""
    tool = pytest.importorskip("qwen_vl_utils.vision_process")
    rng = np.random.default_rng(0)
    shown = rng.integers(0, 255, (20, 9, 16, 3), dtype=np.uint8).repeat(20, axis=1).repeat(20, axis=2)
    data = encode_clip(shown, 10.0, quality=0)
    every = decode_video(data, middle(frames=20), "x").frames

    def read(asked: dict[str, Any]) -> Any:
        count = tool.smart_nframes(asked, total_frames=20, video_fps=10.0)
        indices = torch.linspace(0, 19, count).round().long()
        return torch.tensor(every)[indices].permute(0, 3, 1, 2), {"frames_indices": indices}, count / 20 * 10.0

    monkeypatch.setitem(tool.VIDEO_READER_BACKENDS, "torchvision", read)
    for rule, patch in ((OLD, 14), (NEW, 16)):
        frames, rate = tool.fetch_video({"video": "a"}, image_patch_size=patch, return_video_sample_fps=True)
        ours = decode_video(data, VideoParameters().resolved(rule), "x")
        assert 1 / ours.seconds_per_frame == pytest.approx(rate)
        assert ours.frames.shape == tuple(frames.permute(0, 2, 3, 1).shape)
        apart = np.abs(ours.frames - frames.permute(0, 2, 3, 1).numpy())
        # Between the two passes of a resize Pillow cuts what is beyond white and black, torch on some machines does not.
        assert (apart.max() <= 16, apart.mean() < 0.2) == (True, True)


def left_as_it_is(*given: Any, **options: Any) -> Any:
    """A decorator, called or bare, that does nothing."""
    return given[0] if given and callable(given[0]) else lambda function: function


def test_sounds_are_those_of_the_installed_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 16 kHz sample for sample; at other rates by another resampler, near enough for the ear of the model."""
    numba = pytest.importorskip("numba")  # librosa, which the tool reads sounds with, needs it
    for name in ("jit", "stencil", "guvectorize", "vectorize"):  # 20 s of compiling what no sound is read with
        monkeypatch.setattr(numba, name, left_as_it_is)
    tool = pytest.importorskip("qwen_omni_utils.v2_5.audio_process")
    for rate, bound in ((16000, 0.0), (44100, 0.001)):
        heard = np.stack([tone(1.0, 440.0, rate), 0.5 * tone(1.0, 7000.0, rate)], axis=1)
        path = tmp_path / f"{rate}.wav"
        path.write_bytes(encode_wav(heard, rate))
        content = [{"type": "audio", "audio": str(path)}]
        (theirs,) = tool.process_audio_info([{"role": "user", "content": content}], use_audio_in_video=False)
        ours = decode_audio(path, AudioParameters(), "x").samples
        assert math.isclose(len(ours), len(theirs), abs_tol=1)
        inner = slice(200, min(len(ours), len(theirs)) - 200)
        assert np.abs(ours[inner] - theirs[inner]).max() <= bound + 1e-7


def test_two_frames_a_second_from_the_first_to_the_last() -> None:
    assert numbers(decode_video(CLIP, official(max_pixels_per_frame=6400), "x").frames) == [0, 5, 9, 14, 18, 23]


def test_uneven_rates_and_a_long_last_frame_are_no_damage() -> None:
    uneven = encode_clip(numbered(6), 8.0, times_s=[0, 0.1, 0.2, 3.0, 3.1, 3.2])
    assert numbers(decode_video(uneven, official(frames=4, max_pixels_per_frame=6400), "x").frames) == [0, 2, 3, 5]
    pictures = [Image.fromarray(frame) for frame in numbered(8)]
    moving = io.BytesIO()
    pictures[0].save(moving, "GIF", save_all=True, append_images=pictures[1:], duration=[100] * 7 + [2000])
    shown = decode_video(moving.getvalue(), official(frames=4, max_pixels_per_frame=6400), "x")
    assert numbers(shown.frames) == [0, 2, 5, 7]


@pytest.mark.parametrize(
    ("total", "count", "head", "last"),
    [(1800, 32, [0, 56, 112], 1736), (300, 32, [0, 9, 18], 279), (300, 8, [0, 37, 74], 259), (1800, 8, [0, 225], 1575)],
)
def test_nemo_rl_takes_frames_and_counts_seconds_as_measured(total: int, count: int, head: list[int], last: int) -> None:
    indices, seconds = nemo_rl_indices(VideoParameters(sampling="nemo_rl", frames=count), total, 30.0)
    assert (indices.tolist()[: len(head)], indices.tolist()[-1], len(indices)) == (head, last, count)
    assert indices.tolist() == np.arange(0, total, total / count, dtype=int).tolist()  # as transformers writes it
    assert 2 * seconds == 1.0


def test_nemo_rl_decodes_by_its_rule_and_refuses_more_frames_than_there_are() -> None:
    asked = VideoParameters(sampling="nemo_rl", frames=5, max_pixels_per_frame=6400)
    clip = decode_video(CLIP, asked, "x")
    assert (numbers(clip.frames), clip.seconds_per_frame) == ([0, 4, 8, 12, 16], 0.5)
    with pytest.raises(MediaError, match="25 frames are asked for and it has 24"):
        decode_video(CLIP, VideoParameters(sampling="nemo_rl", frames=25), "x")

"""Positions are those that the published weights were trained with: vectors measured on the libraries named beside them."""

from typing import Any

import pytest
import torch

from sensorium.data.media_store import MediaStore
from sensorium.models.load_chat import load_chat_processor
from sensorium.models.prepared_media import Extent
from sensorium.recipe.registry import resolve

from .published import meta_config, published_processor

Grid = tuple[int, int, int]
FRAME = {"picture": 0.0, "video": 0.5}


def media_format(name: str, family: str) -> Any:
    return resolve("family", family).media_format(meta_config(name), published_processor(name))


@pytest.fixture(scope="module")
def vl() -> Any:
    return media_format("Qwen2.5-VL-7B", "qwen2_5_vl")


@pytest.fixture(scope="module")
def omni() -> Any:
    return media_format("Qwen2.5-Omni-7B", "qwen2_5_omni")


@pytest.fixture(scope="module")
def qwen3() -> Any:
    return media_format("Qwen3-VL-4B", "qwen3_vl")


def video(grid: Grid, seconds: float) -> Extent:
    """A video whose temporal steps stand for so many seconds."""
    return Extent("video", grid, seconds_per_frame=seconds / 2)


def picture(*grid: int) -> Extent:
    return Extent("picture", (grid[0], grid[1], grid[2]))


def sound(frames: int) -> Extent:
    return Extent("sound", (frames, 1, 1))


def told(form: Any, *parts: int | Extent, marks: bool = True) -> list[Any]:
    """Text tokens by number and media between marks, as text (first, last) and media {axis: positions}."""
    ids: list[int] = []
    extents = [part for part in parts if isinstance(part, Extent)]
    for part in parts:
        if isinstance(part, int):
            ids += [1] * part
        else:
            edge = [2] if marks else []
            ids += [*edge, *form.expand(part).ids, *edge]
    ids_T = torch.tensor(ids)
    places = torch.isin(ids_T, torch.tensor(list(form.placeholders.values()))).tolist()
    positions_3T = form.positions(ids_T, extents)
    found: list[Any] = []
    start = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or places[i] != places[start]:
            axes = [sorted(set(row)) for row in positions_3T[:, start:i].tolist()]
            if not places[start]:
                assert axes[0] == axes[1] == axes[2] == list(range(axes[0][0], axes[0][-1] + 1))
                found.append((axes[0][0], axes[0][-1]))
            else:
                found.append((axes[0], (axes[1][0], axes[1][-1]), (axes[2][0], axes[2][-1])))
            start = i
    return found


def square(times: list[int]) -> tuple[list[int], tuple[int, int], tuple[int, int]]:
    """A block of 2 x 2 tokens a step that begins with its first time."""
    return times, (times[0], times[0] + 1), (times[0], times[0] + 1)


@pytest.mark.parametrize(
    ("grid", "seconds", "times", "text"),
    [
        ((4, 4, 4), 1.0, [4, 6, 8, 10], (11, 13)),
        ((4, 4, 4), 0.5, [4, 5, 6, 7], (8, 10)),
        ((4, 4, 4), 1.5, [4, 7, 10, 13], (14, 16)),
        ((6, 4, 4), 0.75, [4, 5, 7, 8, 10, 11], (12, 14)),
        ((4, 4, 4), 2.5, [4, 9, 14, 19], (20, 22)),
        ((4, 4, 4), 1 / 12, [4], (6, 8)),
        ((4, 4, 4), 1.4999999999999998, [4, 7, 10, 13], (14, 16)),  # 4 of 75 frames at 25 fps: whole in float32
    ],
)
def test_qwen2_5_vl_video(vl: Any, grid: Grid, seconds: float, times: list[int], text: tuple[int, int]) -> None:
    """By the authors' code, transformers 4.49 and vLLM."""
    assert told(vl, 3, video(grid, seconds), 2) == [(0, 3), square(times), text]


def test_qwen2_5_vl_conversations(vl: Any) -> None:
    """By the authors' code, transformers 4.49 and vLLM."""
    assert told(vl, 3, picture(1, 4, 6), 2) == [(0, 3), ([4], (4, 5), (4, 6)), (7, 9)]
    assert told(vl, 3, video((1, 8, 12), 1.0), 2) == [(0, 3), ([4], (4, 7), (4, 9)), (10, 12)]
    assert told(vl, 15, video((60, 20, 28), 1.0), 8) == [
        (0, 15), (list(range(16, 135, 2)), (16, 25), (16, 29)), (135, 143),
    ]  # fmt: skip
    assert told(vl, 3, video((4, 4, 4), 1.0), 4, video((3, 4, 8), 2.0), 2) == [
        (0, 3), square([4, 6, 8, 10]), (11, 16), ([17, 21, 25], (17, 18), (17, 20)), (26, 28),
    ]  # fmt: skip
    mixed = (2, picture(1, 4, 4), 1, video((4, 4, 4), 1.0), 1, picture(1, 8, 4), 2)
    assert told(vl, *mixed) == [
        (0, 2), square([3]), (5, 7), square([8, 10, 12, 14]), (15, 17), ([18], (18, 21), (18, 19)), (22, 24),
    ]  # fmt: skip
    assert told(vl, 20, picture(1, 4, 6), 30, video((4, 4, 4), 0.5), 6) == [
        (0, 20), ([21], (21, 22), (21, 23)), (24, 55), square([56, 57, 58, 59]), (60, 66),
    ]  # fmt: skip


def test_qwen2_5_omni(omni: Any) -> None:
    """By transformers 4.57 and 5.17. vLLM takes 0.7 s into float64, so that its third step stands at 38."""
    assert told(omni, 3, sound(200), 2) == [(0, 3), (list(range(4, 54)), (4, 53), (4, 53)), (54, 56)]
    assert told(omni, 3, video((4, 4, 4), 1.0), 2) == [(0, 3), square([4, 29, 54, 79]), (80, 82)]
    assert told(omni, 3, video((4, 4, 4), 0.7), 2) == [(0, 3), square([4, 21, 39, 56]), (57, 59)]
    assert told(omni, 3, picture(1, 4, 6), 2) == [(0, 3), ([4], (4, 5), (4, 6)), (7, 9)]
    heard = list(range(82, 182)), (82, 181), (82, 181)
    assert told(omni, 3, video((4, 4, 4), 1.0), sound(400), 2) == [
        (0, 3), square([4, 29, 54, 79]), (80, 81), heard, (182, 184),
    ]  # fmt: skip
    heard = list(range(4, 104)), (4, 103), (4, 103)
    assert told(omni, 3, sound(400), video((4, 4, 4), 1.0), 2) == [
        (0, 3), heard, (104, 105), square([106, 131, 156, 181]), (182, 184),
    ]  # fmt: skip


def test_qwen3_omni() -> None:
    """By vLLM; transformers keeps fractions (0.7 s: 4, 13.1, 22.2, 31.3) and agrees where there are none."""
    omni = load_chat_processor("tiny:qwen3_omni_moe", store=MediaStore()).media_format
    assert told(omni, 3, video((4, 4, 4), 1.0), 2) == [(0, 3), square([4, 17, 30, 43]), (44, 46)]
    assert told(omni, 3, video((4, 4, 4), 2.0), 2) == [(0, 3), square([4, 30, 56, 82]), (83, 85)]
    assert told(omni, 3, video((4, 4, 4), 0.7), 2) == [(0, 3), square([4, 13, 22, 31]), (32, 34)]
    assert told(omni, 3, sound(200), 2) == [(0, 3), (list(range(4, 30)), (4, 29), (4, 29)), (30, 32)]
    counts = {1: 1, 50: 7, 100: 13, 101: 14, 150: 20, 200: 26, 290: 38, 400: 52, 3000: 390}
    assert {frames: omni.expand(sound(frames)).count for frames in counts} == counts


def test_qwen3_vl(qwen3: Any) -> None:
    """Each temporal step is a block behind its own text, whatever the seconds (all libraries agree)."""
    two = Extent("video", (2, 4, 8), (0.0, 1.0, 2.0, 3.0), 1.0)
    before = len("<0.5 seconds>") + 1
    first, second = 3 + before, 3 + before + 4 + 1 + before
    assert told(qwen3, 3, two, 2, marks=False) == [
        (0, first - 1), ([first], (first, first + 1), (first, first + 3)),
        (first + 4, second - 1), ([second], (second, second + 1), (second, second + 3)), (second + 4, second + 6),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("indices", "fps", "written"),
    [
        ([0, 17, 34, 51, 68, 85, 102, 119], 30.0, "0.3 1.4 2.5 3.7"),
        ([0, 34, 68, 102, 137, 171, 205, 239], 30.0, "0.6 2.8 5.1 7.4"),
        ([0, 43, 85, 128, 171, 214, 256, 299], 30.0, "0.7 3.5 6.4 9.2"),
        ([0, 16, 32, 48, 64, 80, 96, 113, 129, 145, 161, 177, 193, 209], 29.97, "0.3 1.3 2.4 3.5 4.6 5.6 6.7"),
        ([60, 110, 160, 210], 30.0, "2.8 6.2"),
        ([0, 60, 119], 30.0, "1.0 4.0"),
        ([0, 9], 30.0, "0.1"),
        ([0, 3], 30.0, "0.1"),
        ([15, 45, 75, 105, 135, 165, 195, 225], 30.0, "1.0 3.0 5.0 7.0"),
        ([0, 30, 60, 90, 120], 30.0, "0.5 2.5 4.0"),
        ([0], 30.0, "0.0"),
        ([0, 15], 30.0, "0.2"),
        ([107577, 107717, 107858, 107999], 30.0, "3588.2 3597.6"),
        ([0, 1, 2, 3, 4, 5, 6, 7], 2.0, "0.2 1.2 2.2 3.2"),
    ],
)
def test_qwen3_vl_tells_times_as_its_processor_does(qwen3: Any, indices: list[int], fps: float, written: str) -> None:
    """Measured on transformers 4.57 and 5.17: the mean of a step's frame numbers over the file's average rate."""
    extent = Extent("video", (-(-len(indices) // 2), 4, 4), tuple(index / fps for index in indices), 1.0)
    text = qwen3.processor.tokenizer.decode(qwen3.expand(extent).ids)
    pads = "<|vision_start|>" + "<|video_pad|>" * 4 + "<|vision_end|>"
    assert text == "".join(f"<{time} seconds>{pads}" for time in written.split())

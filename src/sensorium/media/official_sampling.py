"""The sampling of the Qwen models' own tools (qwen-vl-utils, qwen-omni-utils): which frames of a file, and how large.

Worked example: 300 frames at 30 a second, 2 asked for a second: 20 frames, an even number of at least four, from the first
to the last: 0, 16, 31, 47 … 283, 299. At 1080 x 1920 and 28 pixels a token each becomes 560 x 1008: 768 tokens at most.

NeMo-RL samples by a rule of its own, to which its published numbers belong: 8 of 300 frames are 0, 37, 74 … 222, 259,
because the step is cut to a whole number; and two frames count as one second, however long the clip is.
"""

from math import ceil, floor, sqrt

import numpy as np

from sensorium.vocabulary.decoding import VideoParameters

LEAST_FRAMES = 2
NEMO_RL_SECONDS_PER_FRAME = 0.5
LARGEST_RATIO = 200


def official_range(parameters: VideoParameters, total: int, fps: float) -> tuple[int, int]:
    """The first and last frame of the part asked for, of ``total`` frames."""
    length = total / fps
    first = ceil(min(parameters.start, length) * fps)
    last = total - 1 if parameters.end is None else min(floor(min(parameters.end, length) * fps), total - 1)
    if parameters.start > 0 or parameters.end is not None:
        _need(first < last, f"the part asked for holds no two frames of the video's {total}")
    return first, last


def official_count(parameters: VideoParameters, total: int, fps: float) -> int:
    """How many of ``total`` frames are taken: always an even number. A ValueError says why it cannot be."""
    if parameters.frames is not None:
        count = round(parameters.frames / 2) * 2
        _need(count <= total, f"{count} frames are asked for and it has {total}")
    else:
        assert parameters.fps is not None
        assert parameters.min_frames is not None
        least, most = ceil(parameters.min_frames / 2) * 2, floor(parameters.max_frames / 2) * 2
        count = floor(min(max(total / fps * parameters.fps, least), most, total) / 2) * 2
    _need(count >= LEAST_FRAMES, f"of {total} frames there is no pair to take")
    return count


def official_indices(parameters: VideoParameters, total: int, fps: float) -> tuple[np.ndarray, float]:
    """The numbers of the frames to take, ends included, and the seconds that each of them stands for."""
    first, last = official_range(parameters, total, fps)
    count = official_count(parameters, last - first + 1, fps)
    return np.linspace(first, last, count).round().astype(np.int64), 1 / (count / (last - first + 1) * fps)


def nemo_rl_indices(parameters: VideoParameters, total: int, fps: float) -> tuple[np.ndarray, float]:
    """The same by NeMo-RL's rule: multiples of a whole number of frames, of which the last may lie well before the end."""
    first, last = official_range(parameters, total, fps)
    held, asked = last - first + 1, parameters.frames
    if asked is None:
        assert parameters.fps is not None
        asked = min(max(int(held / fps * parameters.fps), 1), parameters.max_frames)
    _need(asked <= held, f"{asked} frames are asked for and it has {held}")
    return first + np.arange(asked, dtype=np.int64) * (held // asked), NEMO_RL_SECONDS_PER_FRAME


def official_size(size: tuple[int, int], frames: int, parameters: VideoParameters) -> tuple[int, int]:
    """The (width, height) of each frame within the budgets. A clip's budget counts two frames as one temporal step."""
    least, most = parameters.min_pixels_per_frame, parameters.max_pixels_per_frame
    clip, multiple = parameters.max_pixels_per_clip, parameters.multiple
    assert least is not None
    assert most is not None
    assert clip is not None
    assert multiple is not None
    return smart_size(size, multiple, least, min(most, max(clip / frames * 2, int(least * 1.05))))


def smart_size(size: tuple[int, int], multiple: int, least: float, most: float) -> tuple[int, int]:
    """The (width, height) near ``size`` whose sides are multiples, with at least and at most so many pixels."""
    width, height = size
    _need(max(size) <= LARGEST_RATIO * min(size), f"frames of {width} x {height} are too long and thin")
    near = [max(multiple, round(side / multiple) * multiple) for side in size]
    if near[0] * near[1] > most:
        scale = sqrt(width * height / most)
        near = [max(multiple, floor(side / scale / multiple) * multiple) for side in size]
    elif near[0] * near[1] < least:
        scale = sqrt(least / (width * height))
        near = [ceil(side * scale / multiple) * multiple for side in size]
    return near[0], near[1]


def _need(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(f"{problem}. Ask for other frames, or for another rule (sampling: middle)")

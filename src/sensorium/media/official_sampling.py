"""The sampling of the Qwen models' own tools (qwen-vl-utils, qwen-omni-utils): which frames of a file, and how large.

Worked example: 300 frames at 30 a second, 2 asked for a second: 20 frames, an even number of at least four, from the first
to the last: 0, 16, 31, 47 … 283, 299. At 1080 x 1920 and 28 pixels a token each becomes 560 x 1008: 768 tokens at most.
"""

from math import ceil, floor, sqrt

import numpy as np

from sensorium.vocabulary.decoding import VideoParameters

LEAST_FRAMES = 2
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


def official_size(size: tuple[int, int], frames: int, parameters: VideoParameters) -> tuple[int, int]:
    """The (width, height) of each frame within the budgets. A clip's budget counts two frames as one temporal step."""
    budget = parameters.budget
    least, given = parameters.min_pixels_per_frame, parameters.max_pixels_per_frame
    if least is None:
        least = budget.min_pixels
        if given is not None and given < least:  # who asks for smaller frames gets them
            least = min(given, 4 * budget.multiple**2)
    clip = parameters.max_pixels_per_clip or budget.clip_pixels
    most = max(min(budget.max_pixels, clip / frames * 2), int(least * 1.05))
    return smart_size(size, budget.multiple, least, most if given is None else min(given, most))


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

"""The sizes of video frames, which are decided here.

A picture keeps its size until the checkpoint's image processor resizes it (``models/preprocessors.py``). Frames get
their final size when they are decoded, within limits from the task's parameters and the model's ``FrameRule``
(``VideoParameters.resolved``)::

    1080 x 1920, at most 768 tokens of 28 x 28 pixels    official    560 x 1008, sides are multiples of 28
                                                         middle      581 x 1034, the aspect is kept
"""

from math import ceil, floor, sqrt
from typing import Any

from sensorium.vocabulary.decoding import FrameRule, VideoParameters, resolved_value

LARGEST_RATIO = 200  # of the longer to the shorter side, by the official rule


def frame_rule(processor: Any, vision: Any, most: int, *, whole_clip: bool = False) -> FrameRule:
    """The official rule for a checkpoint: 128 to 768 tokens a frame, or the checkpoint's limits if below ``most`` pixels.

    ``whole_clip``: its video processor limits the pixels of a clip, not of a frame.
    """
    multiple = vision.patch_size * vision.spatial_merge_size
    area, size = multiple**2, processor.video_processor.size
    usual = FrameRule("official", multiple, 128 * area, 768 * area, 115200 * area)
    if size["longest_edge"] >= most:
        return usual
    least, limit = size["shortest_edge"], size["longest_edge"]
    clip = limit if whole_clip else usual.clip_pixels
    return FrameRule("official", multiple, min(least, usual.min_pixels), min(limit, usual.max_pixels), clip)


def frame_size(size: tuple[int, int], frames: int, parameters: VideoParameters) -> tuple[int, int]:
    """The (width, height) to which each of so many frames of a clip is resized."""
    return (budgeted if parameters.sampling == "middle" else official_size)(size, frames, parameters)


def official_size(size: tuple[int, int], frames: int, parameters: VideoParameters) -> tuple[int, int]:
    """The size within the budgets whose sides are multiples. A clip's budget counts two frames as one temporal step."""
    least = resolved_value(parameters.min_pixels_per_frame)
    share = max(resolved_value(parameters.max_pixels_per_clip) / frames * 2, int(least * 1.05))
    most = min(resolved_value(parameters.max_pixels_per_frame), share)
    multiple = resolved_value(parameters.multiple)
    width, height = size
    if max(size) > LARGEST_RATIO * min(size):
        raise ValueError(
            f"frames of {width} x {height} are too long and thin. Ask for other frames, or for another rule "
            "(sampling: middle)"
        )
    near = [max(multiple, round(side / multiple) * multiple) for side in size]
    if near[0] * near[1] > most:
        scale = sqrt(width * height / most)
        near = [max(multiple, floor(side / scale / multiple) * multiple) for side in size]
    elif near[0] * near[1] < least:
        scale = sqrt(least / (width * height))
        near = [ceil(side * scale / multiple) * multiple for side in size]
    return near[0], near[1]


def budgeted(size: tuple[int, int], frames: int, parameters: VideoParameters) -> tuple[int, int]:
    """The size that fits the budgets and keeps the aspect; the size itself if it fits."""
    width, height = size
    clip = resolved_value(parameters.max_pixels_per_clip) // frames
    most = max(1, min(resolved_value(parameters.max_pixels_per_frame), clip))
    wanted = min(max(width * height, resolved_value(parameters.min_pixels_per_frame)), most)
    if wanted == width * height:
        return size
    scale = sqrt(wanted / (width * height))
    width, height = max(1, floor(width * scale)), max(1, floor(height * scale))
    # A very thin frame ends with a side of one pixel, and only the other can still shrink.
    return min(width, max(1, most // height)), min(height, max(1, most // width))

"""A tower's input as pictures again: what is left of a medium after the checkpoint's processor has resized and cut it.

Patches of Qwen's layout are put back in their places, tiles are given one by one, and normalised numbers become colours:

    a picture of 640 x 480 at 28 pixels a token    one picture of 644 x 476
    the same by InternVL                           its tiles of 448 x 448, the whole view last
"""

from math import prod
from typing import Any

import numpy as np
from PIL import Image

from sensorium.models.chat_processor import ChatProcessor
from sensorium.models.prepared_media import TowerInput
from sensorium.vocabulary.content import Media

CHANNELS = 3


def seen_frames(chat: ChatProcessor, media: Media) -> list[Image.Image]:
    """The frames or tiles that the tower takes of a picture or video; none where their layout is not known."""
    (prepared,) = chat.prepared.get([media])
    part = "image_processor" if media.kind == "picture" else "video_processor"
    processor = getattr(chat.processor, part, None)
    pixels_NCHW = _pixels(prepared, processor) if processor is not None else None
    if pixels_NCHW is None:
        return []
    mean, deviation = (_by_channel(processor, name, usual) for name, usual in (("image_mean", 0.0), ("image_std", 1.0)))
    if not getattr(processor, "do_normalize", True):
        mean, deviation = np.zeros_like(mean), np.ones_like(deviation)
    scale = 255.0 if getattr(processor, "do_rescale", True) else 1.0
    colours_NHWC = ((pixels_NCHW * deviation + mean) * scale).round().clip(0, 255).astype(np.uint8).transpose(0, 2, 3, 1)
    return [Image.fromarray(frame) for frame in colours_NHWC]


def _pixels(prepared: TowerInput, processor: Any) -> np.ndarray | None:
    """Normalised pixels [N, C, H, W]."""
    patches = getattr(prepared, "patches_PC", None)
    if patches is None or patches.ndim != 2:
        return None
    values_PC = patches.float().numpy()
    side, merge = getattr(processor, "patch_size", None), getattr(processor, "merge_size", None)
    grid = prepared.extent.grid
    if isinstance(side, int) and isinstance(merge, int) and len(values_PC) == prod(grid):
        time, height, width = grid
        frames = values_PC.shape[1] // (CHANNELS * side * side)
        shape = (time, height // merge, width // merge, merge, merge, CHANNELS, frames, side, side)
        if values_PC.size == prod(shape):
            together = values_PC.reshape(shape).transpose(0, 6, 5, 1, 3, 7, 2, 4, 8)
            whole: np.ndarray = together.reshape(time * frames, CHANNELS, height * side, width * side)
            # A picture is repeated to fill a temporal patch.
            return whole[:1] if prepared.extent.kind == "picture" else whole
    size = round((values_PC.shape[1] / CHANNELS) ** 0.5)
    if merge is None and size * size * CHANNELS == values_PC.shape[1]:
        return values_PC.reshape(len(values_PC), CHANNELS, size, size)
    return None


def _by_channel(processor: Any, name: str, usual: float) -> np.ndarray:
    given = getattr(processor, name, None)
    values = np.broadcast_to(np.asarray(usual if given is None else given, np.float32), (CHANNELS,))
    return values.reshape(1, CHANNELS, 1, 1)

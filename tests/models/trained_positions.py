"""Positions of Qwen2.5-VL as its weights were trained, token by token in plain Python; the library has other ones.

The rule of transformers 4.49 and the authors' code: fractions of a second count, and what follows a video comes after the
largest position in it. The stock model is given these, so that the rest of it can serve as the oracle.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def with_trained_positions(config: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a stock model, with positions where a video would get others from the library.

    That is a video of Qwen2.5-VL, and of Qwen3-Omni, whose fractions of positions the library keeps and we cut.
    """
    if inputs.get("use_audio_in_video"):  # compared with the library only where no fractions occur
        return inputs
    if config.model_type not in ("qwen2_5_vl", "qwen3_omni_moe_thinker") or inputs.get("video_grid_thw") is None:
        return inputs
    return inputs | {"position_ids": trained_positions(config, inputs)}


def trained_positions(config: Any, inputs: dict[str, Any]) -> Tensor:
    """Positions [3, 1, T] of one row of pictures and videos; tokens of sounds stand one after another, as text."""
    ids = inputs["input_ids"][0].tolist()
    grids: dict[int, list[list[int]]] = {}
    for token, key in ((config.image_token_id, "image_grid_thw"), (config.video_token_id, "video_grid_thw")):
        grids[token] = inputs[key].tolist() if inputs.get(key) is not None else []
    seconds = [float(value) for value in inputs.get("second_per_grid_ts", inputs.get("video_second_per_grid", []))]
    merge = config.vision_config.spatial_merge_size
    a_second = getattr(config, "position_id_per_seconds", None) or config.vision_config.tokens_per_second
    rows: list[tuple[int, int, int]] = []
    while len(rows) < len(ids):
        start = 1 + max((max(row) for row in rows), default=-1)
        token = ids[len(rows)]
        if token not in grids:
            rows.append((start,) * 3)
            continue
        time, height, width = grids[token].pop(0)
        step = seconds.pop(0) if token == config.video_token_id else 0.0
        for k in range(time):
            late = int(np.float32(k) * np.float32(step) * np.float32(a_second))
            rows += [(start + late, start + y, start + x) for y in range(height // merge) for x in range(width // merge)]
    return torch.tensor(rows).T[:, None]

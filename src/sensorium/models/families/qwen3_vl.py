"""Qwen3-VL, dense or with experts.

Its tower also speaks to the first layers of the language model (deepstack). A video is told temporal patch by temporal
patch, each after the time it was taken at; so positions need no seconds.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.video_utils import VideoMetadata
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from sensorium.models.families.qwen2_5_vl import MakeTables, Qwen25VL, Qwen25VLMedia, merged_sides
from sensorium.models.families.rope_positions import grid_offsets
from sensorium.models.family import MediaFormat
from sensorium.models.prepared_media import Extent
from sensorium.models.preprocessing import frame_rule
from sensorium.models.segment_layout import Expansion, expansion_of


class Qwen3VLMedia(Qwen25VLMedia):
    """Pictures and videos of Qwen3-VL as tokens and positions."""

    def __init__(self, config: Any, processor: Any) -> None:
        super().__init__(config, processor)
        self.frame_rule = frame_rule(processor, self.vision, 768 * 32 * 32, whole_clip=True)
        self.own_marks = {"video": (config.vision_start_token_id, config.vision_end_token_id)}
        self._told = lru_cache(maxsize=4096)(self._tell)

    def expand(self, extent: Extent) -> Expansion:
        """A video is its temporal patches' times and merged patches in turn, as the checkpoint's processor writes it."""
        return self._told(extent) if extent.kind == "video" else super().expand(extent)

    def blocks(self, extent: Extent) -> list[Tensor]:
        """Each temporal patch is a separate block after the text of its timestamp; positions do not use seconds."""
        step_3N = grid_offsets(torch.zeros(1, dtype=torch.long), *merged_sides(extent, self.vision))
        return [step_3N] * extent.grid[0]

    def _tell(self, extent: Extent) -> Expansion:
        # The processor divides frame numbers by a rate: at a rate of 1 they are the seconds themselves.
        seconds: list[Any] = list(extent.times_s)
        metadata = VideoMetadata(total_num_frames=len(seconds), fps=1.0, frames_indices=seconds)
        inputs = {"video_grid_thw": torch.tensor([extent.grid]), "video_metadata": [metadata]}
        text, pad = self.processor.replace_video_token(inputs, 0), self.placeholders["video"]
        return expansion_of(self.processor.tokenizer(text, add_special_tokens=False)["input_ids"], pad)


class Qwen3VL(Qwen25VL):
    """The adapter of ``Qwen3VLForConditionalGeneration`` and ``Qwen3VLMoeForConditionalGeneration``."""

    media_format: ClassVar[type[MediaFormat]] = Qwen3VLMedia
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **Qwen25VL.groups,
        "projector": ("model.visual.merger.", "model.visual.deepstack_merger_list."),
    }

    def tables(self) -> MakeTables:
        """The index tables of a tower with learned, interpolated positions."""
        return interpolation_tables(self.core.visual)


def interpolation_tables(visual: Any) -> MakeTables:
    """The index tables of a tower with learned positions, which are interpolated to each grid."""
    merge = visual.spatial_merge_size

    def make(grids_M3: Tensor) -> dict[str, Tensor]:
        indices, weights = get_vision_interpolation_indices_and_weights(
            grids_M3,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=merge,
        )
        return {
            "interp_indices": indices,
            "interp_weights": weights,
            "position_ids": get_vision_position_ids(grids_M3, merge),
            "cu_seqlens": get_vision_cu_seqlens(grids_M3),
        }

    return make

"""Qwen3-VL: as Qwen2.5-VL, and its tower also speaks to the first layers of the language model (deepstack)."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from sensorium.models.features import Prepared
from sensorium.models.layout import Features
from sensorium.models.qwen2_5_vl import Qwen25VL


class Qwen3VL(Qwen25VL):
    """The adapter of ``Qwen3VLForConditionalGeneration``."""

    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **Qwen25VL.groups,
        "projector": ("model.visual.merger.", "model.visual.deepstack_merger_list."),
    }

    def tower(self, prepared: Sequence[Prepared]) -> list[Features]:
        """Embeddings and deepstack levels; the levels come whole and are split like the embeddings."""
        seen = self._look(prepared)
        sizes = [embeds_NH.shape[0] for embeds_NH in seen.pooler_output]
        levels = [torch.split(level, sizes) for level in seen.deepstack_features]
        return [Features(embeds_NH, tuple(level[i] for level in levels)) for i, embeds_NH in enumerate(seen.pooler_output)]

    def tables(self, grids_M3: Tensor) -> dict[str, Tensor]:
        """The index tables that the tower would work out for these grids."""
        visual = self.core.visual
        indices, weights = get_vision_interpolation_indices_and_weights(
            grids_M3,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=self.vision.spatial_merge_size,
        )
        return {
            "interp_indices": indices,
            "interp_weights": weights,
            "position_ids": get_vision_position_ids(grids_M3, self.vision.spatial_merge_size),
            "cu_seqlens": get_vision_cu_seqlens(grids_M3),
        }

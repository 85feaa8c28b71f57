"""Qwen2.5-VL: a tower with window attention, three-axis rotary positions."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from sensorium.models.attention import IMPLEMENTATION
from sensorium.models.features import Grid, PicturePreprocessor, Prepared
from sensorium.models.layout import Features
from sensorium.models.tower import Tables, quicken
from sensorium.vocabulary.content import MediaKind


class Qwen25VL:
    """The adapter of ``Qwen2_5_VLForConditionalGeneration``."""

    attention: ClassVar[Any] = {"text_config": IMPLEMENTATION}
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "vision": ("model.visual.",),
        "projector": ("model.visual.merger.",),
        "language": ("model.language_model.",),
        "head": ("lm_head.",),
    }

    def __init__(self, model: Any, processor: Any) -> None:
        self.core = model.model
        self.language_model = model.model.language_model
        self.head = model.lm_head
        self.placeholders: dict[MediaKind, int] = {"picture": model.config.image_token_id}
        self.preprocess = PicturePreprocessor(processor.image_processor)
        self.vision = model.config.vision_config
        quicken(self.core.visual)
        self._tables = Tables(self.tables)

    def count(self, grid: Grid) -> int:
        """One token per merged patch."""
        time, height, width = grid
        merge = self.vision.spatial_merge_size
        return time * (height // merge) * (width // merge)

    def positions(self, ids_T: Tensor, grids: Sequence[Grid]) -> Tensor:
        """By ``get_rope_index``, on the CPU: it reads every grid with ``item()``."""
        kinds_T = (ids_T == self.placeholders["picture"]).int()
        positions_31T, _ = self.core.get_rope_index(ids_T[None], kinds_T[None], image_grid_thw=torch.tensor(grids))
        return positions_31T[:, 0]

    def rotary(self, hidden_BTH: Tensor, positions_3BT: Tensor) -> tuple[Tensor, Tensor]:
        """All three axes."""
        return self.language_model.rotary_emb(hidden_BTH, positions_3BT)

    def tower(self, prepared: Sequence[Prepared]) -> list[Features]:
        """Embeddings only."""
        return [Features(embeds_NH) for embeds_NH in self._look(prepared).pooler_output]

    def tables(self, grids_M3: Tensor) -> dict[str, Tensor]:
        """The index tables that the tower would work out for these grids."""
        window_index, cu_window_seqlens = get_vision_window_index(
            grids_M3, self.vision.spatial_merge_size, self.vision.window_size, self.vision.patch_size
        )
        return {
            "position_ids": get_vision_position_ids(grids_M3, self.vision.spatial_merge_size),
            "cu_seqlens": get_vision_cu_seqlens(grids_M3),
            "window_index": window_index,
            "cu_window_seqlens": cu_window_seqlens,
        }

    def _look(self, prepared: Sequence[Prepared]) -> Any:
        device = self.core.visual.patch_embed.proj.weight.device
        patches = torch.cat([item.patches_PC for item in prepared]).to(device)
        grids = [item.grid for item in prepared]
        return self.core.get_image_features(patches, torch.tensor(grids, device=device), **self._tables(grids, device))

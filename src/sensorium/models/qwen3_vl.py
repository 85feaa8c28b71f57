"""Qwen3-VL: as Qwen2.5-VL, and its tower also speaks to the first layers of the language model (deepstack)."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

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

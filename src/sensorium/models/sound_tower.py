"""Qwen2.5-Omni's audio tower: sounds of any length in one pass, each attending within its own stretches of two seconds."""

from collections.abc import Sequence
from typing import Any

import torch

from sensorium.models.prepared_media import TowerInput
from sensorium.models.preprocessing import sound_tokens
from sensorium.models.segment_layout import Features
from sensorium.models.tower import SEGMENTS


class SoundTower:
    """The stock audio tower, its stretches of one length attending as one batch."""

    def __init__(self, audio_tower: Any) -> None:
        audio_tower.config._attn_implementation = SEGMENTS
        self.module = audio_tower

    def __call__(self, prepared: Sequence[TowerInput]) -> list[Features]:
        """Embeddings of each sound, 25 a second."""
        weight = self.module.conv1.weight
        lengths = [len(item.patches_PC) for item in prepared]
        frames_PC = torch.cat([item.patches_PC for item in prepared]).to(weight.device, weight.dtype)
        lengths_M = torch.tensor(lengths, device=weight.device)
        heard_NH = self.module(frames_PC.T, feature_lens=lengths_M).last_hidden_state
        return [Features(embeds_NH) for embeds_NH in torch.split(heard_NH, [sound_tokens(length) for length in lengths])]

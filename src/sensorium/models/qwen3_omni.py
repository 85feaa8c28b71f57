"""Qwen3-Omni's thinker: experts, a tower that speaks to the first layers, sounds of 13 tokens a second.

Media are blocks as in Qwen2.5-Omni, on a clock of 13 positions a second (the checkpoint's config says it).
"""

from collections.abc import Mapping
from math import inf
from typing import Any, ClassVar

import torch
from torch import Tensor

from sensorium.models.attention import IMPLEMENTATION
from sensorium.models.family import MediaFormat, Tower
from sensorium.models.prepared_media import Extent
from sensorium.models.preprocessing import frame_rule
from sensorium.models.qwen2_5_omni import Qwen25Omni, Qwen25OmniMedia
from sensorium.models.qwen2_5_vl import WRITTEN_TOKENS, merged_patches, repeated, seconds_per_step
from sensorium.models.qwen3_omni_sound import StretchedSoundTower, UnpaddedSounds, stretched_sound_tokens
from sensorium.models.qwen3_vl import interpolation_tables
from sensorium.models.rope_positions import MarkedBlock, interleaved_block, line_offsets
from sensorium.models.segment_layout import Expansion
from sensorium.models.tower import VisionTower
from sensorium.vocabulary.content import MediaKind


class Qwen3OmniMedia(Qwen25OmniMedia):
    """Pictures, videos and sounds of Qwen3-Omni as tokens and positions."""

    def __init__(self, config: Any, processor: Any) -> None:
        super().__init__(config, processor)
        self.written_tokens = WRITTEN_TOKENS
        self.frame_rule = frame_rule(processor, self.vision, 768 * 32 * 32)
        self.preprocessors["sound"] = UnpaddedSounds(processor.feature_extractor)

    @property
    def longest_step_s(self) -> float:
        """Frames and sound are merged token by token, so that steps may be of any length."""
        return inf

    def expand(self, extent: Extent) -> Expansion:
        """One token per merged patch of what is seen, 13 for a second of what is heard."""
        if extent.kind != "sound":
            return super().expand(extent)
        return repeated(self.placeholders["sound"], stretched_sound_tokens(extent.grid[0]))

    def order(self, video: Extent, sound: Extent) -> Tensor:
        """Token by token: each of the video before the first of the sound that is not earlier."""
        steps = torch.arange(video.grid[0], dtype=torch.float64)
        times = steps * seconds_per_step(video, self.vision) * self.positions_a_second
        seen_N = times.repeat_interleave(merged_patches(video, self.vision) // video.grid[0])
        heard_M = torch.arange(stretched_sound_tokens(sound.grid[0]))
        return torch.argsort(torch.cat([seen_N, heard_M]), stable=True)

    def heard_block(self, video: Extent, sound: Extent) -> MarkedBlock:
        """The positions of a video with its sound, all marks one after another."""
        seen_3N, heard_3M = self._block(video), self._block(sound)
        return interleaved_block(seen_3N, heard_3M, self.order(video, sound), shared_marks=False)

    def _block(self, extent: Extent) -> Tensor:
        if extent.kind == "sound":
            return line_offsets(stretched_sound_tokens(extent.grid[0]))
        return super()._block(extent)


class Qwen3Omni(Qwen25Omni):
    """The adapter of ``Qwen3OmniMoeThinkerForConditionalGeneration``."""

    media_format: ClassVar[type[MediaFormat]] = Qwen3OmniMedia
    attention: ClassVar[Any] = {"text_config": IMPLEMENTATION}
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **Qwen25Omni.groups,
        "projector": ("visual.merger.", "visual.merger_list.", "audio_tower.ln_post.", "audio_tower.proj"),
    }

    def __init__(self, model: Any) -> None:
        self.language_model = model.model
        self.head = model.lm_head
        sight = VisionTower(model.visual, interpolation_tables(model.visual))
        self.towers: dict[MediaKind, Tower] = {
            "picture": sight,
            "video": sight,
            "sound": StretchedSoundTower(model.audio_tower),
        }

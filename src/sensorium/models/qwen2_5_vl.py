"""Qwen2.5-VL: a tower with window attention, three-axis rotary positions, videos whose frames stand at their seconds."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from sensorium.models.attention import IMPLEMENTATION
from sensorium.models.family import MediaFormat, Tower
from sensorium.models.prepared_media import Extent, Preprocessor
from sensorium.models.preprocessing import PicturePreprocessor, VideoPreprocessor, video_settings
from sensorium.models.segment_layout import Expansion
from sensorium.models.tower import VisionTower
from sensorium.vocabulary.content import MediaKind

MakeTables = Callable[[Tensor], dict[str, Tensor]]


class Qwen25VLMedia:
    """Pictures and videos of Qwen2.5-VL as tokens and positions."""

    def __init__(self, skeleton: Any, processor: Any) -> None:
        config = skeleton.config
        self.skeleton, self.processor, self.vision = skeleton, processor, config.vision_config
        self.placeholders: dict[MediaKind, int] = {"picture": config.image_token_id, "video": config.video_token_id}
        self.preprocessors: dict[MediaKind, Preprocessor] = {
            "picture": PicturePreprocessor(processor.image_processor),
            "video": VideoPreprocessor(processor.video_processor, video_settings(processor.video_processor)),
        }

    def expand(self, extent: Extent) -> Expansion:
        """One token per merged patch."""
        return repeated(self.placeholders[extent.kind], merged_patches(extent, self.vision))

    def positions(self, ids_T: Tensor, extents: Sequence[Extent]) -> Tensor:
        """By ``get_rope_index``, on the CPU: it reads every grid with ``item()``. (Qwen3-VL's ignores the seconds.)"""
        kinds_T = (ids_T == self.placeholders["picture"]).int() + 2 * (ids_T == self.placeholders["video"]).int()
        positions_31T, _ = self.skeleton.model.model.get_rope_index(
            ids_T[None],
            kinds_T[None],
            image_grid_thw=grids_of("picture", extents),
            video_grid_thw=grids_of("video", extents),
            second_per_grid_ts=seconds_per_grid(extents, self.vision),
        )
        return positions_31T[:, 0]


class Qwen25VL:
    """The adapter of ``Qwen2_5_VLForConditionalGeneration``."""

    media_format: ClassVar[type[MediaFormat]] = Qwen25VLMedia
    attention: ClassVar[Any] = {"text_config": IMPLEMENTATION}
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "vision": ("model.visual.",),
        "projector": ("model.visual.merger.",),
        "language": ("model.language_model.",),
        "head": ("lm_head.",),
    }

    def __init__(self, model: Any) -> None:
        self.core = model.model
        self.language_model = model.model.language_model
        self.head = model.lm_head
        self.vision = model.config.vision_config
        tower = VisionTower(self.core.visual, self.tables())
        self.towers: dict[MediaKind, Tower] = {"picture": tower, "video": tower}

    def tables(self) -> MakeTables:
        """The function from grids to the tower's index tables."""
        return window_tables(self.vision)

    def rotary(self, hidden_BTH: Tensor, positions_3BT: Tensor) -> tuple[Tensor, Tensor]:
        """All three axes."""
        return self.language_model.rotary_emb(hidden_BTH, positions_3BT)


def repeated(token: int, count: int) -> Expansion:
    """A placeholder that becomes so many of itself, each of which takes a feature."""
    return Expansion((token,) * count, ((0, count),))


def merged_patches(extent: Extent, vision: Any) -> int:
    """How many features a vision tower makes of a medium."""
    time, height, width = extent.grid
    return time * (height // vision.spatial_merge_size) * (width // vision.spatial_merge_size)


def grids_of(kind: MediaKind, extents: Sequence[Extent]) -> Tensor | None:
    """The grids [M, 3] of the media of a kind, in order; None if there are none."""
    grids = [extent.grid for extent in extents if extent.kind == kind]
    return torch.tensor(grids) if grids else None


def seconds_per_grid(extents: Sequence[Extent], vision: Any) -> Tensor | None:
    """How many seconds each video's temporal patches stand for; None if there is no video."""
    videos = [extent for extent in extents if extent.kind == "video"]
    # Rounded, because the library cuts off fractions: 0.9999999999 s must not become 0.
    seconds = [round(vision.temporal_patch_size * extent.seconds_per_frame, 9) for extent in videos]
    return torch.tensor(seconds, dtype=torch.float64) if seconds else None


def window_tables(vision: Any) -> MakeTables:
    """The index tables of a tower with window attention."""

    def make(grids_M3: Tensor) -> dict[str, Tensor]:
        window_index, cu_window_seqlens = get_vision_window_index(
            grids_M3, vision.spatial_merge_size, vision.window_size, vision.patch_size
        )
        return {
            "position_ids": get_vision_position_ids(grids_M3, vision.spatial_merge_size),
            "cu_seqlens": get_vision_cu_seqlens(grids_M3),
            "window_index": window_index,
            "cu_window_seqlens": cu_window_seqlens,
        }

    return make

"""Qwen2.5-VL: a tower with window attention, three-axis rotary positions, videos whose frames stand at their seconds."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from sensorium.models.attention import IMPLEMENTATION
from sensorium.models.families.rope_positions import grid_offsets, three_axis_positions, timed_steps
from sensorium.models.family import MediaFormat, Tower
from sensorium.models.prepared_media import Extent, Preprocessor
from sensorium.models.preprocessing import PicturePreprocessor, VideoPreprocessor, frame_rule, video_settings
from sensorium.models.segment_layout import Expansion
from sensorium.models.tower import VisionTower
from sensorium.vocabulary.content import MediaKind

MakeTables = Callable[[Tensor], dict[str, Tensor]]
WRITTEN_TOKENS = tuple(f"<|{name}_{end}|>" for name in ("object_ref", "box", "quad") for end in ("start", "end"))
"""Special tokens of the published tokenizers that the models write in answers: names of things, boxes and corners."""


class Qwen25VLMedia:
    """Pictures and videos of Qwen2.5-VL as tokens and positions."""

    written_tokens: ClassVar[tuple[str, ...]] = WRITTEN_TOKENS

    def __init__(self, config: Any, processor: Any) -> None:
        self.processor, self.vision = processor, config.vision_config
        self.placeholders: dict[MediaKind, int] = {"picture": config.image_token_id, "video": config.video_token_id}
        self.frame_rule = frame_rule(processor, self.vision, 768 * 28 * 28)
        self.own_marks: dict[MediaKind, tuple[int, int]] = {}
        self.stand_ins: dict[str, int] = {}
        self.joined: dict[MediaKind, tuple[str, str]] = {}
        self.preprocessors: dict[MediaKind, Preprocessor] = {
            "picture": PicturePreprocessor(processor.image_processor),
            "video": VideoPreprocessor(processor.video_processor, video_settings(processor.video_processor)),
        }

    def expand(self, extent: Extent) -> Expansion:
        """One token per merged patch."""
        return repeated(self.placeholders[extent.kind], merged_patches(extent, self.vision))

    def positions(self, ids_T: Tensor, extents: Sequence[Extent]) -> Tensor:
        """Each medium is a block, whose temporal steps stand at their seconds."""
        blocks = [block for extent in extents for block in self.blocks(extent)]
        return three_axis_positions(ids_T, self.placeholders.values(), blocks)

    def blocks(self, extent: Extent) -> list[Tensor]:
        """The offsets [3, N] of a medium's runs of tokens."""
        times_K = timed_steps(extent.grid[0], seconds_per_step(extent, self.vision), self.vision.tokens_per_second)
        return [grid_offsets(times_K, *merged_sides(extent, self.vision))]


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
    height, width = merged_sides(extent, vision)
    return extent.grid[0] * height * width


def merged_sides(extent: Extent, vision: Any) -> tuple[int, int]:
    """The rows and columns of a medium's features."""
    _, height, width = extent.grid
    return height // vision.spatial_merge_size, width // vision.spatial_merge_size


def seconds_per_step(extent: Extent, vision: Any) -> float:
    """How many seconds a temporal patch of a video stands for; 0 for a picture."""
    return float(vision.temporal_patch_size * extent.seconds_per_frame)


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

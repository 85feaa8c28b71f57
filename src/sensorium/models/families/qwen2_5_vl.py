"""Qwen2.5-VL: a tower with window attention, three-axis rotary positions that place video frames at their seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sensorium.data.frame_sizes import frame_rule
from sensorium.models.families.rope_positions import grid_offsets, three_axis_positions, timed_steps
from sensorium.models.family import DefaultMedia, DefaultModel, MediaFormat, Tower, repeated
from sensorium.models.prepared_media import Extent, Preprocessor
from sensorium.models.preprocessors import CAP, PicturePreprocessor, VideoPreprocessor, video_settings
from sensorium.models.segment_layout import Expansion
from sensorium.recipe.family_facts import (
    TEXT,
    DeferredModule,
    FamilyFacts,
    Shapes,
    Sizes,
    affine,
    affine_layers,
    chat_template,
)
from sensorium.vocabulary.content import MediaKind

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import vision_utils

    from sensorium.models import tower

    MakeTables = Callable[[Tensor], dict[str, Tensor]]
else:
    tower, vision_utils = DeferredModule("sensorium.models.tower"), DeferredModule("transformers.vision_utils")
    torch = DeferredModule("torch")

# Special tokens of the published tokenizers that the models write in answers: names of things, boxes and corners.
WRITTEN_TOKENS = tuple(f"<|{name}_{end}|>" for name in ("object_ref", "box", "quad") for end in ("start", "end"))
SHOWN = {"image": "<|vision_start|><|image_pad|><|vision_end|>", "video": "<|vision_start|><|video_pad|><|vision_end|>"}
TOKEN_KEYS = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}  # fmt: skip
VISION: Sizes = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "initializer_range": 0.05}
WINDOWED = VISION | {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1]}
ROPE: Sizes = {"rope_type": "default", "rope_theta": 1e4}
THREE_AXES = TEXT | {"rope_parameters": ROPE | {"mrope_section": [4, 6, 6]}}
PARTS = (("visual.merger", "projector"), ("visual.", "vision"))
# The least and the most pixels of a picture, and the most of a frame, of a tiny model.
MIN_PIXELS, MAX_PIXELS, MAX_FRAME_PIXELS = 28 * 28, 1024 * 28 * 28, 256 * 28 * 28


def sight_processors(
    library: Any, config: Any, videos: str = "Qwen2VLVideoProcessor", frames: int = 1, **look: Any
) -> dict[str, Any]:
    """The image and video processor of a tiny model: pictures and frames of any size, in patches.

    The video processor counts the pixels of ``frames`` frames together.
    """
    look["patch_size"], video_class = config.vision_config.patch_size, getattr(library, videos)
    picture = {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
    clip = {"shortest_edge": MIN_PIXELS, "longest_edge": frames * MAX_FRAME_PIXELS}
    return {
        "image_processor": library.Qwen2VLImageProcessor(size=picture, **look),
        "video_processor": video_class(size=clip, **look, **({CAP: False} if hasattr(video_class, CAP) else {})),
    }


def tiny_processor(library: Any, given: dict[str, Any], config: Any) -> Any:
    """The processor of a tiny Qwen2.5-VL."""
    return library.Qwen2_5_VLProcessor(**given, **sight_processors(library, config))


def windowed_tower(vision: dict[str, Any], *, fused: bool = True) -> Shapes:
    """The tensors of the tower: gated MLPs; ``fused``: queries, keys and values are one layer (not in Qwen2.5-Omni)."""
    hidden, wide = vision["hidden_size"], vision["intermediate_size"]
    yield "visual.patch_embed.proj.weight", [hidden, *patch_shape(vision)]
    heads = {"attn.qkv": [3 * hidden, hidden]} if fused else {f"attn.{name}": [hidden, hidden] for name in "qkv"}
    yield from affine_layers("visual.blocks", vision["depth"], heads | {
        "attn.proj": [hidden, hidden], "mlp.gate_proj": [wide, hidden], "mlp.up_proj": [wide, hidden],
        "mlp.down_proj": [hidden, wide],
    })  # fmt: skip
    for i in range(vision["depth"]):
        yield f"visual.blocks.{i}.norm1.weight", [hidden]
        yield f"visual.blocks.{i}.norm2.weight", [hidden]
    merged = hidden * vision.get("spatial_merge_size", 2) ** 2
    yield "visual.merger.ln_q.weight", [hidden]
    yield from affine("visual.merger.mlp.0", [merged, merged])
    yield from affine("visual.merger.mlp.2", [vision["out_hidden_size"], merged])


def patch_shape(vision: dict[str, Any]) -> list[int]:
    """Channels, frames, rows and columns of a patch."""
    side = vision["patch_size"]
    return [vision.get("in_channels", 3), vision.get("temporal_patch_size", 2), side, side]


class Qwen25VLMedia(DefaultMedia):
    """Pictures and videos of Qwen2.5-VL as tokens and positions."""

    written_tokens: ClassVar[tuple[str, ...]] = WRITTEN_TOKENS

    def __init__(self, config: Any, processor: Any) -> None:
        self.processor, self.vision = processor, config.vision_config
        self.placeholders: dict[MediaKind, int] = {"picture": config.image_token_id, "video": config.video_token_id}
        self.frame_rule = frame_rule(processor, self.vision, 768 * 28 * 28)
        self.preprocessors: dict[MediaKind, Preprocessor] = {
            "picture": PicturePreprocessor(processor.image_processor),
            "video": VideoPreprocessor(processor.video_processor, video_settings(processor.video_processor)),
        }

    def expand(self, extent: Extent) -> Expansion:
        """One token per merged patch."""
        return repeated(self.placeholders[extent.kind], merged_patches(extent, self.vision))

    def positions(self, ids_T: Tensor, extents: Sequence[Extent]) -> Tensor:
        """Each medium is a block, whose temporal steps are placed at their seconds."""
        blocks = [block for extent in extents for block in self.blocks(extent)]
        return three_axis_positions(ids_T, self.placeholders.values(), blocks)

    def blocks(self, extent: Extent) -> list[Tensor]:
        """The offsets [3, N] of a medium's runs of tokens."""
        times_K = timed_steps(extent.grid[0], seconds_per_step(extent, self.vision), self.vision.tokens_per_second)
        return [grid_offsets(times_K, *merged_sides(extent, self.vision))]


class Qwen25VL(DefaultModel):
    """The adapter of ``Qwen2_5_VLForConditionalGeneration``."""

    media_format: ClassVar[type[MediaFormat]] = Qwen25VLMedia
    facts: ClassVar[FamilyFacts] = FamilyFacts(
        "Qwen2_5_VL",
        THREE_AXES,
        chat_template(SHOWN, system=True),
        WINDOWED,
        token_keys=TOKEN_KEYS,
        processor=tiny_processor,
        published_pixels=((3136, 12845056), (3136, 12845056)),
        tensors=lambda config: windowed_tower(config["vision_config"]),
        parts=PARTS,
        names=("2.5-vl",),
        query_bias=True,
        light_tower=True,
        vllm=True,
    )
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "vision": ("model.visual.",),
        "projector": ("model.visual.merger.",),
        "language": ("model.language_model.",),
        "head": ("lm_head.",),
    }

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        sight = tower.VisionTower(self.core.visual, self.tables())
        self.towers: dict[MediaKind, Tower] = {"picture": sight, "video": sight}

    def tables(self) -> MakeTables:
        """The function from grids to the tower's index tables."""
        return window_tables(self.core.config.vision_config)

    def rotary(self, hidden_BTH: Tensor, positions_3BT: Tensor) -> tuple[Tensor, Tensor]:
        """All three axes."""
        return three_axes(self.language_model, hidden_BTH, positions_3BT)


def three_axes(model: Any, hidden_BTH: Tensor, positions_3BT: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines by all three axes.

    Before transformers 5.17 the layers took a part of each from every axis. They get what this makes of it three times.
    """
    cos, sin = model.rotary_emb(hidden_BTH, positions_3BT)
    if cos.ndim == hidden_BTH.ndim:
        return cos, sin
    sections = model.config.rope_parameters["mrope_section"] * 2

    def merged(part_3BTD: Tensor) -> Tensor:
        chunks = enumerate(part_3BTD.split(sections, -1))
        return torch.cat([chunk[i % 3] for i, chunk in chunks], -1).expand_as(part_3BTD)

    return merged(cos), merged(sin)


def merged_patches(extent: Extent, vision: Any) -> int:
    """How many features a vision tower makes of a medium."""
    height, width = merged_sides(extent, vision)
    return extent.grid[0] * height * width


def merged_sides(extent: Extent, vision: Any) -> tuple[int, int]:
    """The rows and columns of a medium's features."""
    _, height, width = extent.grid
    return height // vision.spatial_merge_size, width // vision.spatial_merge_size


def seconds_per_step(extent: Extent, vision: Any) -> float:
    """The seconds that a temporal patch of a video covers; 0 for a picture."""
    return float(vision.temporal_patch_size * extent.seconds_per_frame)


def window_tables(vision: Any) -> MakeTables:
    """The index tables of a tower with window attention."""

    def make(grids_M3: Tensor) -> dict[str, Tensor]:
        window_index, cu_window_seqlens = vision_utils.get_vision_window_index(
            grids_M3, vision.spatial_merge_size, vision.window_size, vision.patch_size
        )
        return {
            "position_ids": vision_utils.get_vision_position_ids(grids_M3, vision.spatial_merge_size),
            "cu_seqlens": vision_utils.get_vision_cu_seqlens(grids_M3),
            "window_index": window_index,
            "cu_window_seqlens": cu_window_seqlens,
        }

    return make

"""Qwen3-VL, dense or with experts.

Features of its tower are also added in the first layers of the language model (deepstack). A video is written temporal
patch by temporal patch, each after its timestamp, so positions need no seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from sensorium.data.frame_sizes import frame_rule
from sensorium.models.families.qwen2_5_vl import (
    PARTS,
    ROPE,
    SHOWN,
    TOKEN_KEYS,
    VISION,
    Qwen25VL,
    Qwen25VLMedia,
    merged_sides,
    patch_shape,
    sight_processors,
)
from sensorium.models.families.rope_positions import grid_offsets
from sensorium.models.family import MediaFormat
from sensorium.models.prepared_media import Extent
from sensorium.models.segment_layout import Expansion, expansion_of
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

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import video_utils, vision_utils

    from sensorium.models.families.qwen2_5_vl import MakeTables
else:
    torch = DeferredModule("torch")
    video_utils, vision_utils = DeferredModule("transformers.video_utils"), DeferredModule("transformers.vision_utils")

DEEPSTACKED = VISION | {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
INTERLEAVED = TEXT | {
    "head_dim": 32,
    "rope_parameters": ROPE | {"mrope_section": [6, 5, 5], "mrope_interleaved": True},
}
EXPERTS: Sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
EVEN: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def tiny_processor(library: Any, given: dict[str, Any], config: Any) -> Any:
    """The processor of a tiny Qwen3-VL; its video processor counts the pixels of the whole clip."""
    seen = sight_processors(library, config, "Qwen3VLVideoProcessor", 16, **EVEN)
    return library.Qwen3VLProcessor(**given, **seen)


def deepstack_tower(vision: dict[str, Any], *, named: bool = True) -> Shapes:
    """The tensors of the tower: plain MLPs, learned positions, a merger for each layer of deepstack.

    ``named``: layers of mergers have names, not numbers (not in Qwen3-Omni).
    """
    hidden, wide = vision["hidden_size"], vision["intermediate_size"]
    yield from affine("visual.patch_embed.proj", [hidden, *patch_shape(vision)])
    yield "visual.pos_embed.weight", [vision["num_position_embeddings"], hidden]
    yield from affine_layers("visual.blocks", vision["depth"], {
        "norm1": [hidden], "norm2": [hidden], "attn.qkv": [3 * hidden, hidden], "attn.proj": [hidden, hidden],
        "mlp.linear_fc1": [wide, hidden], "mlp.linear_fc2": [hidden, wide],
    })  # fmt: skip
    merged = hidden * vision.get("spatial_merge_size", 2) ** 2
    norm, first, second = ("norm", "linear_fc1", "linear_fc2") if named else ("ln_q", "mlp.0", "mlp.2")
    several = "deepstack_merger_list" if named else "merger_list"
    deep = [(f"{several}.{i}", merged) for i in range(len(vision.get("deepstack_visual_indexes", ())))]
    for merger, size in [("merger", hidden), *deep]:
        yield from affine(f"visual.{merger}.{norm}", [size])
        yield from affine(f"visual.{merger}.{first}", [merged, merged])
        yield from affine(f"visual.{merger}.{second}", [vision["out_hidden_size"], merged])


class Qwen3VLMedia(Qwen25VLMedia):
    """Pictures and videos of Qwen3-VL as tokens and positions."""

    def __init__(self, config: Any, processor: Any) -> None:
        super().__init__(config, processor)
        self.frame_rule = frame_rule(processor, self.vision, 768 * 32 * 32, whole_clip=True)
        self.own_marks = {"video": (config.vision_start_token_id, config.vision_end_token_id)}
        self.step_token = config.video_token_id  # takes the features of a video's steps
        self._expand_video = lru_cache(maxsize=4096)(self._write_video)

    def expand(self, extent: Extent) -> Expansion:
        """A video is its temporal patches' times and merged patches in turn, as the checkpoint's processor writes it."""
        return self._expand_video(extent) if extent.kind == "video" else super().expand(extent)

    def blocks(self, extent: Extent) -> list[Tensor]:
        """Each temporal patch is a separate block after the text of its timestamp; positions do not use seconds."""
        step_3N = grid_offsets(torch.zeros(1, dtype=torch.long), *merged_sides(extent, self.vision))
        return [step_3N] * extent.grid[0]

    def _write_video(self, extent: Extent) -> Expansion:
        # The processor divides frame numbers by a rate: at a rate of 1 they are the seconds themselves.
        seconds: list[Any] = list(extent.times_s)
        metadata = video_utils.VideoMetadata(total_num_frames=len(seconds), fps=1.0, frames_indices=seconds)
        inputs = {"video_grid_thw": torch.tensor([extent.grid]), "video_metadata": [metadata]}
        text = self.processor.replace_video_token(inputs, 0)
        return expansion_of(self.processor.tokenizer(text, add_special_tokens=False)["input_ids"], self.step_token)


class Qwen3VL(Qwen25VL):
    """The adapter of ``Qwen3VLForConditionalGeneration``."""

    facts: ClassVar[FamilyFacts] = FamilyFacts(
        "Qwen3VL",
        INTERLEAVED,
        chat_template(SHOWN),
        DEEPSTACKED,
        token_keys=TOKEN_KEYS,
        words="seconds",
        processor=tiny_processor,
        published_pixels=((65536, 16777216), (4096, 25165824)),
        tensors=lambda config: deepstack_tower(config["vision_config"]),
        parts=(("visual.deepstack_merger_list", "projector"), *PARTS),
        tables=("pos_embed",),
        names=("3-vl",),
        query_norm=True,
        stands_in=True,
        vllm=True,
    )
    media_format: ClassVar[type[MediaFormat]] = Qwen3VLMedia
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **Qwen25VL.groups,
        "projector": ("model.visual.merger.", "model.visual.deepstack_merger_list."),
    }

    def tables(self) -> MakeTables:
        """The index tables of a tower with learned, interpolated positions."""
        return interpolation_tables(self.core.visual)


class Qwen3VLMoe(Qwen3VL):
    """The adapter of ``Qwen3VLMoeForConditionalGeneration``."""

    facts: ClassVar[FamilyFacts] = replace(
        Qwen3VL.facts, prefix="Qwen3VLMoe", text=INTERLEAVED | EXPERTS, names=(), stands_in=False, turned_experts=True
    )


def interpolation_tables(visual: Any) -> MakeTables:
    """The index tables of a tower with learned positions, which are interpolated to each grid."""
    merge = visual.spatial_merge_size

    def make(grids_M3: Tensor) -> dict[str, Tensor]:
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grids_M3,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=merge,
        )
        return {
            "interp_indices": indices,
            "interp_weights": weights,
            "position_ids": vision_utils.get_vision_position_ids(grids_M3, merge),
            "cu_seqlens": vision_utils.get_vision_cu_seqlens(grids_M3),
        }

    return make

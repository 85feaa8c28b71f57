"""GLM-4.1V and its dense successors: norms before and after attention and MLP, rotation of neighbouring numbers in pairs.

A video is written frame by frame, each pair of frames as a picture between its marks, followed by its whole second. Frames
take their features where pictures do, at ``<|image|>``. A turn ends where the next begins: ``<|user|>`` ends an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from sensorium.models.families.qwen2_5_vl import (
    MAX_FRAME_PIXELS,
    MAX_PIXELS,
    MIN_PIXELS,
    ROPE,
    VISION,
    Qwen25VL,
    Qwen25VLMedia,
    patch_shape,
)
from sensorium.models.families.qwen3_vl import Qwen3VLMedia
from sensorium.models.families.rope_positions import three_axis_positions
from sensorium.models.family import MediaFormat
from sensorium.recipe.family_facts import TEXT, DeferredModule, FamilyFacts, Shapes, affine
from sensorium.vocabulary.decoding import FrameRule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import vision_utils

    from sensorium.models.families.qwen2_5_vl import MakeTables
    from sensorium.models.prepared_media import Extent
else:
    vision_utils = DeferredModule("transformers.vision_utils")

MARKS = {f"{kind}_{end}_token_id": f"<|{word}_of_{kind}|>"
         for kind in ("image", "video") for end, word in (("start", "begin"), ("end", "end"))}  # fmt: skip
TURNS = (
    "[gMASK]<sop>{% for message in messages %}<|{{ message.role }}|>\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for block in message.content %}"
    "{% if block.type == 'text' %}{{ block.text }}{% else %}"
    "<|begin_of_{{ block.type }}|><|{{ block.type }}|><|end_of_{{ block.type }}|>{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def tiny_processor(library: Any, given: dict[str, Any], config: Any) -> Any:
    """The processor of a tiny GLM-4V. Both limits count all frames together, of a picture two."""
    patch = config.vision_config.patch_size
    picture = {"shortest_edge": 2 * MIN_PIXELS, "longest_edge": 2 * MAX_PIXELS}
    clip = {"shortest_edge": 2 * MIN_PIXELS, "longest_edge": 16 * MAX_FRAME_PIXELS}
    return library.Glm4vProcessor(
        library.Glm4vImageProcessor(size=picture, patch_size=patch),
        video_processor=library.Glm4vVideoProcessor(size=clip, patch_size=patch),
        **given,
    )


def downsampling_tower(vision: dict[str, Any]) -> Shapes:
    """The tensors of the tower: gated MLPs without biases, a table of positions, a convolution before the merger."""
    hidden, out, wide = vision["hidden_size"], vision["out_hidden_size"], vision["intermediate_size"]
    merge = vision.get("spatial_merge_size", 2)
    yield from affine("visual.patch_embed.proj", [hidden, *patch_shape(vision)])
    yield "visual.embeddings.position_embedding.weight", [(vision["image_size"] // vision["patch_size"]) ** 2, hidden]
    for i in range(vision["depth"]):
        yield f"visual.blocks.{i}.norm1.weight", [hidden]
        yield f"visual.blocks.{i}.norm2.weight", [hidden]
        yield f"visual.blocks.{i}.attn.qkv.weight", [3 * hidden, hidden]
        yield f"visual.blocks.{i}.attn.proj.weight", [hidden, hidden]
        yield from gated(f"visual.blocks.{i}.mlp", hidden, out)
    yield "visual.post_conv_layernorm.weight", [hidden]
    yield "visual.post_layernorm.weight", [hidden]
    yield from affine("visual.downsample", [out, hidden, merge, merge])
    yield "visual.merger.proj.weight", [out, out]
    yield from affine("visual.merger.post_projection_norm", [out])
    yield from gated("visual.merger", out, wide)


def gated(at: str, size: int, wide: int) -> Shapes:
    """The weights of a gated MLP."""
    for name in ("gate_proj", "up_proj"):
        yield f"{at}.{name}.weight", [wide, size]
    yield f"{at}.down_proj.weight", [size, wide]


class Glm4vMedia(Qwen3VLMedia):
    """Pictures and videos of GLM-4V as tokens and positions."""

    written_tokens: ClassVar[tuple[str, ...]] = ("<|begin_of_box|>", "<|end_of_box|>", "<answer>", "</answer>")

    def __init__(self, config: Any, processor: Any) -> None:
        Qwen25VLMedia.__init__(self, config, processor)
        self.step_token = config.image_token_id
        self._expand_video = lru_cache(maxsize=4096)(self._write_video)
        multiple = self.vision.patch_size * self.vision.spatial_merge_size
        most = processor.video_processor.size["longest_edge"] // 2  # it counts frames, and the rule pairs of them
        self.frame_rule = FrameRule("official", multiple, multiple**2, most, most)

    def positions(self, ids_T: Tensor, extents: Sequence[Extent]) -> Tensor:
        """Each picture and each pair of frames is a block."""
        return three_axis_positions(
            ids_T, [self.step_token], [block for extent in extents for block in self.blocks(extent)]
        )


class Glm4v(Qwen25VL):
    """The adapter of ``Glm4vForConditionalGeneration``."""

    facts: ClassVar[FamilyFacts] = FamilyFacts(
        "Glm4v",
        TEXT | {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}},
        TURNS,
        VISION | {"patch_size": 14, "image_size": 56},
        rows=512,
        tokens={"image_token": "<|image|>", "video_token": "<|video|>"},
        more_tokens=("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", *MARKS.values(),
                     "<|begin_of_box|>", "<|end_of_box|>"),
        closing="<|user|>",
        token_keys=MARKS | {"image_token_id": "<|image|>", "video_token_id": "<|video|>"},
        processor=tiny_processor,
        published_pixels=((12544, 9633792), (12544, 47040000)),
        tensors=lambda config: downsampling_tower(config["vision_config"]),
        parts=(("visual.merger", "projector"), ("visual.downsample", "projector"), ("visual.", "vision")),
        tables=("position_embedding",),
        names=("glm-4.1v",),
        query_bias=True,
        sandwich=True,
    )  # fmt: skip
    media_format: ClassVar[type[MediaFormat]] = Glm4vMedia
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **Qwen25VL.groups,
        "projector": ("model.visual.merger.", "model.visual.downsample."),
    }

    def tables(self) -> MakeTables:
        """The tables of a tower that takes each pair of frames as a picture."""
        return frame_tables(self.core.config.vision_config.spatial_merge_size)


def frame_tables(merge: int) -> MakeTables:
    """The index tables of grids, and one grid for each of their steps."""

    def make(grids_M3: Tensor) -> dict[str, Tensor]:
        steps_K3 = grids_M3.repeat_interleave(grids_M3[:, 0], dim=0)
        steps_K3[:, 0] = 1
        return {
            "grid_thw": steps_K3,
            "position_ids": vision_utils.get_vision_position_ids(steps_K3, merge),
            "cu_seqlens": vision_utils.get_vision_cu_seqlens(steps_K3),
        }

    return make

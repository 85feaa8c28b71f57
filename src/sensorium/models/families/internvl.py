"""InternVL3 as transformers has it: pictures cut into tiles, frames of one tile each, ordinary positions.

A picture of the aspect ratio 2:1 becomes two tiles and a thumbnail, each of 256 tokens; a video is written frame by frame::

    <img><IMG_CONTEXT> x 768</img>
    Frame1: <img><IMG_CONTEXT> x 256</img>\nFrame2: <img>…

The language model is the checkpoint's own: any that transformers builds with the layers of Qwen2, Qwen3 or Llama.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from sensorium.models.families.text import QWEN2
from sensorium.models.families.tiles import TiledPictures, TiledVideos, TileTower
from sensorium.models.family import DefaultMedia, DefaultModel, MediaFormat, Tower
from sensorium.models.prepared_media import Extent, Preprocessor
from sensorium.models.preprocessors import usual_settings
from sensorium.models.segment_layout import Expansion, expansion_of
from sensorium.recipe.family_facts import PLAIN_VISION, Config, DeferredModule, FamilyFacts, Shapes, affine, chat_template
from sensorium.vocabulary.content import MediaKind
from sensorium.vocabulary.decoding import FrameRule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = DeferredModule("torch")

TOKENS = {
    "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}  # fmt: skip
MAX_TILES = 6  # of a tiny model's picture
# Special tokens of the published tokenizers that the models write in answers: names of things, boxes and corners.
WRITTEN_TOKENS = tuple(f"<{end}{name}>" for name in ("ref", "box", "quad") for end in ("", "/"))


def tiny_processor(library: Any, given: dict[str, Any], config: Any) -> Any:
    """The processor of a tiny InternVL: pictures of several tiles, frames of one."""
    side = config.vision_config.image_size[0]
    size = {"height": side, "width": side}
    return library.InternVLProcessor(
        image_processor=library.GotOcr2ImageProcessor(size=size, max_patches=MAX_TILES),
        video_processor=library.InternVLVideoProcessor(size=size),
        image_seq_length=features_a_side(config) ** 2,
        **given,
    )


def tower_tensors(config: Config) -> Shapes:
    """The tensors of the tower and the projector."""
    vision, at, size = config["vision_config"], "vision_tower", config["text_config"]["hidden_size"]
    hidden, wide = vision["hidden_size"], vision["intermediate_size"]
    side, patch = (given if isinstance(given, int) else given[0] for given in (vision["image_size"], vision["patch_size"]))
    yield f"{at}.embeddings.cls_token", [1, 1, hidden]
    yield f"{at}.embeddings.position_embeddings", [1, (side // patch) ** 2 + 1, hidden]
    yield from affine(f"{at}.embeddings.patch_embeddings.projection", [hidden, 3, patch, patch])
    for i in range(vision["num_hidden_layers"]):
        layer = f"{at}.encoder.layer.{i}"
        for name in ("q_proj", "k_proj", "v_proj"):
            yield f"{layer}.attention.{name}.weight", [hidden, hidden]
            if vision.get("attention_bias"):
                yield f"{layer}.attention.{name}.bias", [hidden]
        yield from affine(f"{layer}.attention.projection_layer", [hidden, hidden])
        for name in ("q_norm", "k_norm") if vision.get("use_qk_norm") else ():
            yield f"{layer}.attention.{name}.weight", [hidden]
        for name in ("lambda_1", "lambda_2"):
            yield f"{layer}.{name}", [hidden]
        for name in ("layernorm_before", "layernorm_after"):
            yield f"{layer}.{name}.weight", [hidden]
            if vision.get("norm_type") != "rms_norm":
                yield f"{layer}.{name}.bias", [hidden]
        yield from affine(f"{layer}.mlp.fc1", [wide, hidden])
        yield from affine(f"{layer}.mlp.fc2", [hidden, wide])
    if not vision.get("use_mean_pooling", True):
        yield from affine(f"{at}.layernorm", [hidden])
    shuffled = round(hidden / config.get("downsample_ratio", 0.5) ** 2)
    yield from affine("multi_modal_projector.layer_norm", [shuffled])
    yield from affine("multi_modal_projector.linear_1", [size, shuffled])
    yield from affine("multi_modal_projector.linear_2", [size, size])


class InternVLMedia(DefaultMedia):
    """Pictures and videos of InternVL as tokens and positions."""

    written_tokens: ClassVar[tuple[str, ...]] = WRITTEN_TOKENS
    frame_rule = FrameRule("middle")

    def __init__(self, config: Any, processor: Any) -> None:
        self.processor, self._token = processor, config.image_token_id
        video_token: int = processor.tokenizer.convert_tokens_to_ids(processor.video_token)
        self.placeholders: dict[MediaKind, int] = {"picture": config.image_token_id, "video": video_token}
        side = features_a_side(config)
        settings = usual_settings(processor, "images_kwargs")
        self.preprocessors: dict[MediaKind, Preprocessor] = {
            "picture": TiledPictures(processor.image_processor, side, settings),
            "video": TiledVideos(processor.video_processor, side),
        }
        self._video_text = lru_cache(maxsize=256)(self._write_video)

    def expand(self, extent: Extent) -> Expansion:
        """As the checkpoint's processor writes it: tiles of a picture in a row, frames of a video with their numbers."""
        tiles, height, width = extent.grid
        if extent.kind == "video":
            return self._video_text(tiles)
        start, end = self.processor.start_image_token_id, self.processor.end_image_token_id
        count = tiles * height * width
        return Expansion((start, *(self._token,) * count, end), ((1, count),))

    def _write_video(self, frames: int) -> Expansion:
        text = self.processor.replace_video_token({"pixel_values_videos": [torch.empty(frames, 0)]}, 0)
        return expansion_of(self.processor.tokenizer(text, add_special_tokens=False)["input_ids"], self._token)


class InternVL(DefaultModel):
    """The adapter of ``InternVLForConditionalGeneration``."""

    media_format: ClassVar[type[MediaFormat]] = InternVLMedia
    facts: ClassVar[FamilyFacts] = FamilyFacts(
        "InternVL",
        QWEN2,
        chat_template({"image": "<IMG_CONTEXT>{{ '\n' }}", "video": "<video>{{ '\n' }}"}),
        PLAIN_VISION,
        tokens=TOKENS,
        token_keys={"image_token_id": "<IMG_CONTEXT>"},
        words="Frame",
        processor=tiny_processor,
        tensors=tower_tensors,
        parts=(("multi_modal_projector.", "projector"), ("vision_tower.", "vision")),
    )
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "vision": ("model.vision_tower.",),
        "projector": ("model.multi_modal_projector.",),
        "language": ("model.language_model.",),
        "head": ("lm_head.",),
    }

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        core = self.core

        def look(tiles_N3SS: Tensor) -> Tensor:
            found: Tensor = core.get_image_features(pixel_values=tiles_N3SS).pooler_output
            return found

        tower = TileTower([core.vision_tower, core.multi_modal_projector], look)
        self.towers: dict[MediaKind, Tower] = {"picture": tower, "video": tower}


def features_a_side(config: Any) -> int:
    """How many features a tile has on each side."""
    vision = config.vision_config
    return int(vision.image_size[0] // vision.patch_size[0] * config.downsample_ratio)

"""LLaVA-OneVision: pictures as a base view and a grid of tiles, with a learned mark after each row; ordinary positions.

A picture is resized into the best of the checkpoint's grids and cut into tiles. Features of the filled-up margins are left
out again, so the number of tokens depends on the picture's own size. A frame of a video has a quarter of a tile's tokens,
with one mark behind the last frame. With tiny tiles of 4 x 4 patches::

    picture 100 x 60, seen in a grid of 2 x 2 tiles:  16 of the base view + 8 rows x (4 + 1 mark) = 56
    video of 3 frames:                                3 x 4 + 1 mark = 13

Every picture is seen as the only one of its conversation is; the library shows several in one prompt with a base view each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, isqrt
from typing import TYPE_CHECKING, Any, ClassVar

from sensorium.models.families.text import QWEN2
from sensorium.models.families.tiles import SIGLIP_HEAD, TiledVideos, TileTower, siglip_tensors, tiled
from sensorium.models.family import DefaultMedia, DefaultModel, MediaFormat, Tower, repeated
from sensorium.models.prepared_media import Extent, Preprocessor, TowerInput
from sensorium.models.preprocessors import naming_items
from sensorium.models.segment_layout import Expansion
from sensorium.recipe.family_facts import PLAIN_VISION, Config, DeferredModule, FamilyFacts, Shapes, affine, chat_template
from sensorium.vocabulary.content import Media, MediaKind
from sensorium.vocabulary.decoding import FrameRule

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from torch import Tensor, nn
else:
    torch = DeferredModule("torch")

# The config of this tower has no scale of its first weights.
SIGLIP = {key: size for key, size in PLAIN_VISION.items() if key != "initializer_range"} | {
    "model_type": "siglip_vision_model", "vision_use_head": False,
}  # fmt: skip
GRIDS = [[56, 56], [56, 112], [112, 56], [112, 112]]


def tiny_processor(library: Any, given: dict[str, Any], config: Any) -> Any:
    """The processor of a tiny LLaVA-OneVision: grids of up to four tiles."""
    side, patch = config.vision_config.image_size, config.vision_config.patch_size
    size, grids = {"height": side, "width": side}, config.image_grid_pinpoints
    return library.LlavaOnevisionProcessor(
        image_processor=library.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=grids),
        video_processor=library.LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=(side // patch) ** 2,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        **given,
    )


def tower_tensors(config: Config) -> Shapes:
    """The tensors of the tower, the projector and the mark after each row."""
    vision, size = config["vision_config"], config["text_config"]["hidden_size"]
    yield from siglip_tensors("vision_tower", vision)
    layers = config.get("vision_feature_layer", -1)
    seen = vision["hidden_size"] * (1 if isinstance(layers, int) else len(layers))
    yield "image_newline", [size]
    yield from affine("multi_modal_projector.linear_1", [size, seen])
    yield from affine("multi_modal_projector.linear_2", [size, size])


class LlavaOnevisionMedia(DefaultMedia):
    """Pictures and videos of LLaVA-OneVision as tokens and positions.

    The grid of a picture is (tiles, its own height, its own width); of a video (frames, side, side of a frame's features).
    """

    frame_rule = FrameRule("middle")

    def __init__(self, config: Any, processor: Any) -> None:
        self.processor, self._tile = processor, config.vision_config.image_size
        self.placeholders: dict[MediaKind, int] = {"picture": config.image_token_id, "video": config.video_token_id}
        side = ceil(isqrt(processor.num_image_tokens) / 2)
        self.preprocessors: dict[MediaKind, Preprocessor] = {
            "picture": GridsOfTiles(processor.image_processor),
            "video": TiledVideos(processor.video_processor, side),
        }

    def expand(self, extent: Extent) -> Expansion:
        """As many tokens as the checkpoint's processor counts."""
        tiles, height, width = extent.grid
        if extent.kind == "video":
            return repeated(self.placeholders["video"], tiles * height * width + 1)
        count = self.processor._get_number_of_features(height, width, self._tile, self._tile)
        if self.processor.vision_feature_select_strategy == "default":
            count -= 1
        return repeated(self.placeholders["picture"], count)


class GridsOfTiles:
    """The checkpoint's image processor over pictures, each by itself."""

    def __init__(self, image_processor: Any) -> None:
        self._image_processor = image_processor

    def __call__(self, items: Sequence[tuple[Media, Image.Image]]) -> list[TowerInput]:
        prepared = []
        for media, picture in items:
            with naming_items([(media, picture)], "image"):
                made = self._image_processor(images=[picture], return_tensors="pt")
            tiles = made["pixel_values"][0]
            prepared.append(tiled(tiles, Extent("picture", (len(tiles), picture.height, picture.width))))
        return prepared


class LlavaOnevision(DefaultModel):
    """The adapter of ``LlavaOnevisionForConditionalGeneration``."""

    media_format: ClassVar[type[MediaFormat]] = LlavaOnevisionMedia
    facts: ClassVar[FamilyFacts] = FamilyFacts(
        "LlavaOnevision",
        QWEN2,
        chat_template({"image": "<image>{{ '\n' }}", "video": "<video>{{ '\n' }}"}),
        SIGLIP,
        more={"image_grid_pinpoints": GRIDS},
        tokens={"image_token": "<image>", "video_token": "<video>"},
        token_keys={"image_token_index": "<image>", "video_token_index": "<video>"},
        processor=tiny_processor,
        tensors=tower_tensors,
        parts=(("multi_modal_projector.", "projector"), ("image_newline", "projector"), ("vision_tower.", "vision")),
        tables=("position_embedding",),
        unloaded=(SIGLIP_HEAD,),
    )
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "vision": ("model.vision_tower.",),
        "projector": ("model.multi_modal_projector.", "model.image_newline"),
        "language": ("model.language_model.",),
        "head": ("lm_head.",),
    }

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        tower = TileTower([self.core.vision_tower, self.core.multi_modal_projector], self._look, self._finish)
        tower.module.register_parameter("image_newline", self.core.image_newline)
        self.towers: dict[MediaKind, Tower] = {"picture": tower, "video": tower}

    def _look(self, tiles_N3SS: Tensor) -> Tensor:
        """Features of tiles, of the layers that the config names."""
        config = self.core.config
        states = self.core.vision_tower(tiles_N3SS, output_hidden_states=True, return_dict=True).hidden_states
        layer = config.vision_feature_layer
        chosen = states[layer] if isinstance(layer, int) else torch.cat([states[i] for i in layer], dim=-1)
        found: Tensor = self.core.multi_modal_projector(
            chosen[:, 1:] if config.vision_feature_select_strategy == "default" else chosen
        )
        return found

    def _finish(self, seen_NKH: Tensor, extent: Extent) -> Tensor:
        """Tiles of a picture put together, without margins, or frames of a video made smaller; marks between them."""
        newline: nn.Parameter = self.core.image_newline
        if extent.kind == "video":
            pooled_NKH: Tensor = self.core.apply_pooling(seen_NKH)
            return torch.cat([pooled_NKH.flatten(0, 1), newline[None].to(pooled_NKH)])
        packed, _ = self.core.pack_image_features(
            [seen_NKH],
            torch.tensor([extent.grid[1:]]),
            image_newline=newline,
            vision_aspect_ratio=self.core.config.vision_aspect_ratio,
        )
        found: Tensor = packed[0]
        return found

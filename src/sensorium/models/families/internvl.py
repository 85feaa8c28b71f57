"""InternVL3 as transformers has it: pictures cut into tiles, frames of one tile each, ordinary positions.

A picture of the aspect ratio 2:1 becomes two tiles and a thumbnail, each of 256 tokens; a video is told frame by frame::

    <img><IMG_CONTEXT> x 768</img>
    Frame1: <img><IMG_CONTEXT> x 256</img>\nFrame2: <img>…

The language model is the checkpoint's own: any that transformers builds with the layers of Qwen2, Qwen3 or Llama.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from sensorium.models.attention import IMPLEMENTATION
from sensorium.models.families.rope_positions import one_axis_positions
from sensorium.models.families.tiles import TiledPictures, TiledVideos, TileTower
from sensorium.models.family import MediaFormat, Tower
from sensorium.models.prepared_media import Extent, Preprocessor
from sensorium.models.segment_layout import Expansion, expansion_of
from sensorium.vocabulary.content import MediaKind
from sensorium.vocabulary.decoding import FrameRule

WRITTEN_TOKENS = tuple(f"<{end}{name}>" for name in ("ref", "box", "quad") for end in ("", "/"))
"""Special tokens of the published tokenizers that the models write in answers: names of things, boxes and corners."""


class InternVLMedia:
    """Pictures and videos of InternVL as tokens and positions."""

    written_tokens: ClassVar[tuple[str, ...]] = WRITTEN_TOKENS

    def __init__(self, config: Any, processor: Any) -> None:
        self.processor, self._token = processor, config.image_token_id
        self.frame_rule = FrameRule("middle")
        video_token: int = processor.tokenizer.convert_tokens_to_ids(processor.video_token)
        self.placeholders: dict[MediaKind, int] = {"picture": config.image_token_id, "video": video_token}
        self.own_marks: dict[MediaKind, tuple[int, int]] = {}
        self.stand_ins: dict[str, int] = {}
        self.joined: dict[MediaKind, tuple[str, str]] = {}
        side = features_a_side(config)
        settings = processor.valid_processor_kwargs._defaults["images_kwargs"]
        self.preprocessors: dict[MediaKind, Preprocessor] = {
            "picture": TiledPictures(processor.image_processor, side, settings),
            "video": TiledVideos(processor.video_processor, side),
        }
        self._frames = lru_cache(maxsize=256)(self._tell)

    def expand(self, extent: Extent) -> Expansion:
        """As the checkpoint's processor writes it: tiles of a picture in a row, frames of a video with their numbers."""
        tiles, height, width = extent.grid
        if extent.kind == "video":
            return self._frames(tiles)
        start, end = self.processor.start_image_token_id, self.processor.end_image_token_id
        count = tiles * height * width
        return Expansion((start, *(self._token,) * count, end), ((1, count),))

    def positions(self, ids_T: Tensor, extents: Sequence[Extent]) -> Tensor:
        """One after another, as text."""
        return one_axis_positions(ids_T)

    def _tell(self, frames: int) -> Expansion:
        text = self.processor.replace_video_token({"pixel_values_videos": [torch.empty(frames, 0)]}, 0)
        return expansion_of(self.processor.tokenizer(text, add_special_tokens=False)["input_ids"], self._token)


class InternVL:
    """The adapter of ``InternVLForConditionalGeneration``."""

    media_format: ClassVar[type[MediaFormat]] = InternVLMedia
    attention: ClassVar[Any] = {"text_config": IMPLEMENTATION}
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "vision": ("model.vision_tower.",),
        "projector": ("model.multi_modal_projector.",),
        "language": ("model.language_model.",),
        "head": ("lm_head.",),
    }

    def __init__(self, model: Any) -> None:
        core = model.model
        self.language_model = core.language_model
        self.head = model.lm_head

        def look(tiles_N3SS: Tensor) -> Tensor:
            found: Tensor = core.get_image_features(pixel_values=tiles_N3SS).pooler_output
            return found

        tower = TileTower([core.vision_tower, core.multi_modal_projector], look)
        self.towers: dict[MediaKind, Tower] = {"picture": tower, "video": tower}

    def rotary(self, hidden_BTH: Tensor, positions_3BT: Tensor) -> tuple[Tensor, Tensor]:
        """One axis: the three are equal."""
        return self.language_model.rotary_emb(hidden_BTH, positions_3BT[0])


def features_a_side(config: Any) -> int:
    """How many features a tile has on each side."""
    vision = config.vision_config
    return int(vision.image_size[0] // vision.patch_size[0] * config.downsample_ratio)

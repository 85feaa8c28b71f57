"""SmolVLM2: pictures as rows of tiles and a whole view, videos described in English, ordinary positions.

A picture of two rows of tiles and three columns, and a video of two frames, as the checkpoint's processor writes them::

    <fake_token_around_image><row_1_col_1><image> x 81<fake_token_around_image><row_1_col_2>…\n…<global-img><image> x 81…
    You are provided the following series of two frames from a 0:00:04 [H:MM:SS] video.\n\nFrame from 00:00:…

The tokenizer has no token for a video, so ``<global-img>``, which no template writes, is its placeholder in segments.
The text of a video joins its neighbours: the space before it and the empty line after it are tokenized with them, as the
processor does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar

from sensorium.models.families.tiles import SIGLIP_HEAD, TiledVideos, TileTower, siglip_tensors, tiled
from sensorium.models.family import DefaultMedia, DefaultModel, MediaFormat, Tower
from sensorium.models.prepared_media import Extent, Preprocessor, TowerInput
from sensorium.models.preprocessors import naming_items
from sensorium.models.segment_layout import Expansion, expansion_of
from sensorium.recipe.family_facts import PLAIN_VISION, TEXT, Config, DeferredModule, FamilyFacts, Shapes
from sensorium.vocabulary.content import Media, MediaKind
from sensorium.vocabulary.decoding import FrameRule

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from torch import Tensor
    from transformers import processing_utils, video_utils
else:
    torch = DeferredModule("torch")
    processing_utils, video_utils = (DeferredModule(f"transformers.{name}_utils") for name in ("processing", "video"))

TOKENS = {
    "end_of_utterance_token": "<end_of_utterance>", "fake_image_token": "<fake_token_around_image>",
    "image_token": "<image>", "global_image_token": "<global-img>",
}  # fmt: skip
TURN = (
    "{{ message.role | capitalize }}{% if message.content[0].type == 'image' %}:{% else %}{{ ': ' }}{% endif %}"
    "{% for block in message.content %}{% if block.type == 'text' %}{{ block.text }}{% elif block.type == 'image' %}<image>"
    "{% elif block.type == 'video' %}<video>{% endif %}{% endfor %}<end_of_utterance>\n"
)
TEMPLATE = (
    "<|im_start|>{% for message in messages %}" + TURN + "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def tiny_processor(library: Any, given: dict[str, Any], config: Any) -> Any:
    """The processor of a tiny SmolVLM2: two tiles on the longer side."""
    vision = config.vision_config
    sizes = {"size": {"longest_edge": 2 * vision.image_size}, "max_image_size": {"longest_edge": vision.image_size}}
    return library.SmolVLMProcessor(
        image_processor=library.SmolVLMImageProcessor(**sizes),
        video_processor=library.SmolVLMVideoProcessor(**sizes),
        image_seq_len=(vision.image_size // vision.patch_size // config.scale_factor) ** 2,
        **given,
    )


def tower_tensors(config: Config) -> Shapes:
    """The tensors of the tower and the connector."""
    vision = config["vision_config"]
    yield from siglip_tensors("vision_model", vision)
    shuffled = vision["hidden_size"] * config.get("scale_factor", 2) ** 2
    yield "connector.modality_projection.proj.weight", [config["text_config"]["hidden_size"], shuffled]


OUTRO = "\n\n"


class SmolVLMMedia(DefaultMedia):
    """Pictures and videos of SmolVLM2 as tokens and positions. The grid of a picture is (rows, columns, side of a tile)."""

    frame_rule = FrameRule("middle")

    def __init__(self, config: Any, processor: Any) -> None:
        self.processor, self._token = processor, config.image_token_id
        # Its own method passes on settings of videos to be sampled, and is warned for that at every call.
        processor.apply_chat_template = MethodType(processing_utils.ProcessorMixin.apply_chat_template, processor)
        stand_in: int = processor.tokenizer.convert_tokens_to_ids(processor.global_image_token)
        self.placeholders: dict[MediaKind, int] = {"picture": config.image_token_id, "video": stand_in}
        self.stand_ins = {processor.video_token: stand_in}
        self.joined = {"video": (" ", "", OUTRO)}
        side = config.vision_config.image_size // config.vision_config.patch_size // config.scale_factor
        self.preprocessors: dict[MediaKind, Preprocessor] = {
            "picture": RowsOfTiles(processor.image_processor, side),
            "video": TiledVideos(processor.video_processor, side, "pixel_values"),
        }
        self._cached = lru_cache(maxsize=4096)(self._write)

    def expand(self, extent: Extent) -> Expansion:
        """As the checkpoint's processor writes it."""
        return self._cached(extent)

    def _write(self, extent: Extent) -> Expansion:
        rows, columns, _ = extent.grid
        if extent.kind == "picture":
            text = self.processor.replace_image_token({"rows": [[rows]], "cols": [[columns]]}, 0)
        else:
            text = " " + self._video(extent).removesuffix(OUTRO)
        return expansion_of(self.processor.tokenizer(text, add_special_tokens=False)["input_ids"], self._token)

    def _video(self, extent: Extent) -> str:
        # The processor divides frame numbers by a rate: at a rate of 1 they are the seconds themselves.
        seconds: list[Any] = list(extent.times_s)
        duration = round(extent.seconds_per_frame * len(seconds), 3)
        metadata = video_utils.VideoMetadata(
            total_num_frames=len(seconds), fps=1.0, frames_indices=seconds, duration=duration
        )
        inputs = {"pixel_values": torch.empty(1, extent.grid[0]), "video_metadata": [metadata]}
        text: str = self.processor.replace_video_token(inputs, 0)
        return text


class RowsOfTiles:
    """The checkpoint's image processor over pictures; it fills up rows of tiles and adds a whole view of one tile."""

    def __init__(self, image_processor: Any, side: int) -> None:
        self._image_processor, self._side = image_processor, side

    def __call__(self, items: Sequence[tuple[Media, Image.Image]]) -> list[TowerInput]:
        prepared = []
        for media, picture in items:
            with naming_items([(media, picture)], "image"):
                made = self._image_processor(images=[picture], return_row_col_info=True, return_tensors="pt")
            rows, columns = made["rows"][0][0], made["cols"][0][0]
            prepared.append(tiled(made["pixel_values"][0], Extent("picture", (int(rows), int(columns), self._side))))
        return prepared


def patch_places(known: int, side: int) -> Tensor:
    """Which of the ``known`` x ``known`` learned positions each patch of a tile of ``side`` x ``side`` patches has.

    As transformers 4.50 had it, with which the weights came: fractions of a side in float32, so that a tile of the usual
    size counts through them. transformers 4.57 puts all but the first row and column one too early (``0 0 1 2``), and 4.57
    and 5 round the fractions to the model's dtype: in bfloat16 the last of 27 are ``… 22 22 24 24 26``.
    """
    boundaries = torch.arange(1 / known, 1.0, 1 / known)
    fractions = torch.arange(0, 1 - 1e-6, float(1 / torch.tensor(side)))  # the step in float32, as it was
    row = torch.bucketize(fractions, boundaries, right=True)
    return (row[:, None] * known + row).flatten()


class SmolVLM(DefaultModel):
    """The adapter of ``SmolVLMForConditionalGeneration``."""

    media_format: ClassVar[type[MediaFormat]] = SmolVLMMedia
    facts: ClassVar[FamilyFacts] = FamilyFacts(
        "SmolVLM",
        TEXT | {"model_type": "llama"},
        TEMPLATE,
        PLAIN_VISION,
        more={"scale_factor": 2, "pad_token_id": 0},
        rows=512,
        tokens=TOKENS,
        more_tokens=tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
        closing="<end_of_utterance>",
        token_keys={"image_token_id": "<image>"},
        words="User Assistant You provided following series frames from video Frame",
        processor=tiny_processor,
        tensors=tower_tensors,
        parts=(("connector.", "projector"), ("vision_model.", "vision")),
        tables=("position_embedding",),
        unloaded=(SIGLIP_HEAD,),
        requires=(
            "num2words",
            "its processor writes how many frames a video has in words. Install it: pip install 'sensorium[smolvlm]'.",
        ),
    )
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "vision": ("model.vision_model.",),
        "projector": ("model.connector.",),
        "language": ("model.text_model.",),
        "head": ("lm_head.",),
    }

    def __init__(self, model: Any) -> None:
        self.core, self.language_model, self.head = model.model, model.model.text_model, model.lm_head
        core, seeing = self.core, self.core.vision_model

        def look(tiles_N3SS: Tensor) -> Tensor:
            # Not through the model's own functions: one leaves out tiles of zeros, one rounds places to bfloat16.
            parts = seeing.embeddings
            patches_NHYX: Tensor = parts.patch_embedding(tiles_N3SS)
            places_P = patch_places(parts.num_patches_per_side, patches_NHYX.shape[-1]).to(tiles_N3SS.device)
            embeds_NPH = patches_NHYX.flatten(2).transpose(1, 2) + parts.position_embedding(places_P)
            seen_NPH = seeing.encoder(inputs_embeds=embeds_NPH, attention_mask=None).last_hidden_state
            found: Tensor = core.connector(seeing.post_layernorm(seen_NPH))
            return found

        tower = TileTower([core.vision_model, core.connector], look)
        self.towers: dict[MediaKind, Tower] = {"picture": tower, "video": tower}

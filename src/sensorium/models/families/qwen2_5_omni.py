"""Qwen2.5-Omni's thinker: the tower of Qwen2.5-VL, an audio tower over sounds of any length, three-axis positions.

A sound attends within stretches of two seconds; all sounds go through the tower in one pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar

from sensorium.data.frame_sizes import frame_rule
from sensorium.models.families.qwen2_5_vl import (
    PARTS,
    THREE_AXES,
    WINDOWED,
    merged_patches,
    merged_sides,
    seconds_per_step,
    sight_processors,
    three_axes,
    window_tables,
    windowed_tower,
)
from sensorium.models.families.rope_positions import (
    MarkedBlock,
    chunk_order,
    grid_offsets,
    interleaved_block,
    line_offsets,
    three_axis_positions,
    timed_steps,
)
from sensorium.models.family import DefaultMedia, DefaultModel, MediaFormat, Tower, repeated
from sensorium.models.prepared_media import Extent, Preprocessor, TowerInput
from sensorium.models.preprocessors import (
    PicturePreprocessor,
    SoundPreprocessor,
    VideoPreprocessor,
    sound_tokens,
    usual_settings,
    video_settings,
)
from sensorium.models.segment_layout import Expansion, Features, Runs
from sensorium.recipe.family_facts import (
    AUDIO,
    Config,
    DeferredModule,
    FamilyFacts,
    Shapes,
    affine,
    affine_layers,
    chat_template,
)
from sensorium.vocabulary.content import MediaKind

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from sensorium.models import tower
else:
    torch, tower = DeferredModule("torch"), DeferredModule("sensorium.models.tower")

TOKENS = {
    "vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>", "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>",
    "audio_token": "<|AUDIO|>",
}  # fmt: skip
TOKEN_KEYS = {
    "image_token_index": "<|IMAGE|>", "video_token_index": "<|VIDEO|>", "audio_token_index": "<|AUDIO|>",
    "vision_start_token_id": "<|vision_bos|>", "vision_end_token_id": "<|vision_eos|>",
    "audio_start_token_id": "<|audio_bos|>", "audio_end_token_id": "<|audio_eos|>",
}  # fmt: skip
SHOWN = {
    "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
    "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
    "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
}
WORDS = "video sound hear see tone high low loud soft"
SOUND_PARTS = (("audio_tower.proj", "projector"), ("audio_tower.ln_post.", "projector"), ("audio_tower.", "audio"))
# The parts of a published checkpoint that generate speech: only the thinker is trained.
SPEAKING = r"^(talker|token2wav|code2wav)\."


def tiny_processor(library: Any, given: dict[str, Any], config: Any) -> Any:
    return library.Qwen2_5OmniProcessor(**given, **sight_processors(library, config), **sound_extractor(library, config))


def sound_extractor(library: Any, config: Any) -> dict[str, Any]:
    """Whisper's mel spectrogram."""
    mels = config.audio_config.num_mel_bins
    return {"feature_extractor": library.WhisperFeatureExtractor(feature_size=mels, return_attention_mask=True)}


def tower_tensors(config: Config) -> Shapes:
    """The tensors of both towers."""
    yield from windowed_tower(config["vision_config"], fused=False)
    audio, at = config["audio_config"], "audio_tower"
    hidden, out = audio["d_model"], audio["output_dim"]
    yield from affine(f"{at}.conv1", [hidden, audio["num_mel_bins"], 3])
    yield from affine(f"{at}.conv2", [hidden, hidden, 3])
    yield f"{at}.audio_bos_eos_token.weight", [2, out]
    yield from whisper_layers(at, audio)
    yield from affine(f"{at}.ln_post", [hidden])
    yield from affine(f"{at}.proj", [out, hidden])


def whisper_layers(at: str, audio: dict[str, Any], *, key_bias: bool = False) -> Shapes:
    """The layers of an audio tower, whose keys have no bias as a rule."""
    hidden, wide = audio["d_model"], audio["encoder_ffn_dim"]
    attention = {f"self_attn.{name}_proj": [hidden, hidden] for name in ("k", "v", "q", "out")}
    layers = affine_layers(f"{at}.layers", audio["encoder_layers"], attention | {
        "self_attn_layer_norm": [hidden], "fc1": [wide, hidden], "fc2": [hidden, wide], "final_layer_norm": [hidden],
    })  # fmt: skip
    yield from (tensor for tensor in layers if key_bias or not tensor[0].endswith("k_proj.bias"))


class SoundTower:
    """The stock audio tower, its stretches of one length attending as one batch."""

    def __init__(self, audio_tower: Any) -> None:
        audio_tower.config._attn_implementation = tower.SEGMENTS
        self.module = audio_tower

    def __call__(self, prepared: Sequence[TowerInput]) -> list[Features]:
        """Embeddings of each sound, 25 a second."""
        weight = self.module.conv1.weight
        lengths = [len(item.patches_PC) for item in prepared]
        frames_PC = torch.cat([item.patches_PC for item in prepared]).to(weight.device, weight.dtype)
        lengths_M = torch.tensor(lengths, device=weight.device)
        heard_NH = self.module(frames_PC.T, feature_lens=lengths_M).last_hidden_state
        return [Features(embeds_NH) for embeds_NH in torch.split(heard_NH, [sound_tokens(length) for length in lengths])]


class Qwen25OmniMedia(DefaultMedia):
    """Pictures, videos and sounds of Qwen2.5-Omni as tokens and positions.

    Each sound and video is a block. With ``use_audio_in_video`` a video and its sound are one block, interleaved by chunks
    of two seconds; with ``shared_marks`` the two marks before it share a position, and so do those after it.
    """

    shared_marks: ClassVar[bool] = True
    count_sound = staticmethod(sound_tokens)

    def __init__(self, config: Any, processor: Any) -> None:
        self.vision, self.positions_a_second = config.vision_config, config.position_id_per_seconds
        marks = (processor.audio_bos_token, processor.audio_eos_token)
        self.sound_marks: tuple[int, ...] = tuple(processor.tokenizer.convert_tokens_to_ids(list(marks)))
        self.chunk_s = float(getattr(config, "seconds_per_chunk", 2.0))
        self.placeholders: dict[MediaKind, int] = {
            "picture": config.image_token_id,
            "video": config.video_token_id,
            "sound": config.audio_token_id,
        }
        self.frame_rule = frame_rule(processor, self.vision, 768 * 28 * 28)
        settings = video_settings(processor.video_processor) | {"size": frame_size(processor)}
        self.preprocessors: dict[MediaKind, Preprocessor] = {
            "picture": PicturePreprocessor(processor.image_processor),
            "video": VideoPreprocessor(processor.video_processor, settings, self.longest_step_s),
            "sound": SoundPreprocessor(processor.feature_extractor),
        }

    @property
    def longest_step_s(self) -> float:
        """The longest time in seconds that two frames of a video with its sound may cover."""
        return self.chunk_s

    def expand(self, extent: Extent) -> Expansion:
        """One token per merged patch of a picture or video; a sound has 25 a second (Qwen3-Omni: 13)."""
        count = self.count_sound(extent.grid[0]) if extent.kind == "sound" else merged_patches(extent, self.vision)
        return repeated(self.placeholders[extent.kind], count)

    def interleave(self, video: Extent, sound: Extent) -> tuple[tuple[int, ...], Runs, Runs]:
        """A video and its sound in turn, chunk by chunk, between the marks of a sound."""
        is_sound = (self.order(video, sound) >= merged_patches(video, self.vision)).tolist()
        first, last = self.sound_marks
        tokens = [self.placeholders["sound" if audible else "video"] for audible in is_sound]
        return (first, *tokens, last), _runs(is_sound, False), _runs(is_sound, True)

    def positions(self, ids_T: Tensor, extents: Sequence[Extent]) -> Tensor:
        """Each medium is a block: pictures and videos at their seconds, sounds one token after another."""
        blocks: list[Tensor | MarkedBlock] = []
        for i, extent in enumerate(extents):
            if extent.has_sound:
                continue
            if i and extents[i - 1].has_sound:
                video, order = extents[i - 1], self.order(extents[i - 1], extent)
                pair = self._block(video), self._block(extent)
                blocks.append(interleaved_block(*pair, order, shared_marks=self.shared_marks))
            else:
                blocks.append(self._block(extent))
        return three_axis_positions(ids_T, self.placeholders.values(), blocks)

    def order(self, video: Extent, sound: Extent) -> Tensor:
        """The order in which the tokens of a video and of its sound are written."""
        return chunk_order(self._block(video), self._block(sound), int(self.chunk_s * self.positions_a_second))

    def _block(self, extent: Extent) -> Tensor:
        if extent.kind == "sound":
            return line_offsets(self.count_sound(extent.grid[0]))
        times_K = timed_steps(extent.grid[0], seconds_per_step(extent, self.vision), self.positions_a_second)
        return grid_offsets(times_K, *merged_sides(extent, self.vision))


def nested(*prefixes: str) -> tuple[str, ...]:
    """Prefixes of the thinker's parts by their names before transformers 5.21, and since."""
    return (*prefixes, *(f"model.{prefix}" for prefix in prefixes))


class Qwen25Omni(DefaultModel):
    """The adapter of ``Qwen2_5OmniThinkerForConditionalGeneration``."""

    media_format: ClassVar[type[MediaFormat]] = Qwen25OmniMedia
    facts: ClassVar[FamilyFacts] = FamilyFacts(
        "Qwen2_5OmniThinker",
        THREE_AXES,
        chat_template(SHOWN, system=True),
        WINDOWED,
        AUDIO,
        rows=512,
        tokens=TOKENS,
        token_keys=TOKEN_KEYS,
        words=WORDS,
        processor=tiny_processor,
        published_pixels=((3136, 12845056), (100352, 602112)),
        published_sound_s=300,
        tensors=tower_tensors,
        parts=(*PARTS, *SOUND_PARTS),
        tables=("audio_bos_eos_token",),
        unloaded=(SPEAKING,),
        names=("2.5-omni",),
        query_bias=True,
        vllm=True,
    )
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "vision": nested("visual."),
        "audio": nested("audio_tower."),
        "projector": nested("visual.merger.", "audio_tower.ln_post.", "audio_tower.proj."),
        "language": ("model.",),
        "head": ("lm_head.",),
    }

    def __init__(self, model: Any) -> None:
        inner = model.model  # the whole thinker but its head; before transformers 5.21 only its language model
        self.core = inner if hasattr(inner, "visual") else model
        self.language_model = inner if self.core is model else inner.language_model
        self.head = model.lm_head
        sight, sound = self.make_towers()
        self.towers: dict[MediaKind, Tower] = {"picture": sight, "video": sight, "sound": sound}

    def make_towers(self) -> tuple[Tower, Tower]:
        """The towers of pictures and videos, and of sounds."""
        sight = tower.VisionTower(self.core.visual, window_tables(self.core.config.vision_config))
        return sight, SoundTower(self.core.audio_tower)

    def rotary(self, hidden_BTH: Tensor, positions_3BT: Tensor) -> tuple[Tensor, Tensor]:
        """All three axes."""
        return three_axes(self.language_model, hidden_BTH, positions_3BT)


def _runs(is_sound: Sequence[bool], wanted: bool) -> Runs:
    """The runs of the sound's tokens, or the video's, after the first mark."""
    runs, start = [], 1
    for kind, several in groupby(is_sound):
        count = len(list(several))
        if kind == wanted:
            runs.append((start, count))
        start += count
    return tuple(runs)


def frame_size(processor: Any) -> dict[str, int]:
    """The least and most pixels of a frame.

    The library's processor has sizes of its own (128 to 768 tokens a frame) that outdo those of a checkpoint's video
    processor, and the published model is used with them. A checkpoint that allows less than that is taken at its word.
    """
    usual: dict[str, int] = usual_settings(processor, "videos_kwargs")["size"]
    stated = processor.video_processor.size
    tighter = stated["longest_edge"] < usual["longest_edge"]
    chosen = stated if tighter else usual
    return {"shortest_edge": chosen["shortest_edge"], "longest_edge": chosen["longest_edge"]}

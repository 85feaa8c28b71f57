"""Qwen2.5-Omni's audio tower: sounds of any length in one pass, each attending within its own stretches of two seconds."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import Tensor

from sensorium.models.attention import IMPLEMENTATION
from sensorium.models.families.qwen2_5_vl import merged_patches, merged_sides, repeated, seconds_per_step, window_tables
from sensorium.models.families.rope_positions import (
    MarkedBlock,
    chunk_order,
    grid_offsets,
    interleaved_block,
    line_offsets,
    three_axis_positions,
    timed_steps,
)
from sensorium.models.family import MediaFormat, Tower
from sensorium.models.prepared_media import Extent, Preprocessor, TowerInput
from sensorium.models.preprocessing import (
    PicturePreprocessor,
    SoundPreprocessor,
    VideoPreprocessor,
    frame_rule,
    sound_tokens,
    video_settings,
)
from sensorium.models.segment_layout import Expansion, Features, Runs
from sensorium.models.tower import SEGMENTS, VisionTower
from sensorium.vocabulary.content import MediaKind


class SoundTower:
    """The stock audio tower, its stretches of one length attending as one batch."""

    def __init__(self, audio_tower: Any) -> None:
        audio_tower.config._attn_implementation = SEGMENTS
        self.module = audio_tower

    def __call__(self, prepared: Sequence[TowerInput]) -> list[Features]:
        """Embeddings of each sound, 25 a second."""
        weight = self.module.conv1.weight
        lengths = [len(item.patches_PC) for item in prepared]
        frames_PC = torch.cat([item.patches_PC for item in prepared]).to(weight.device, weight.dtype)
        lengths_M = torch.tensor(lengths, device=weight.device)
        heard_NH = self.module(frames_PC.T, feature_lens=lengths_M).last_hidden_state
        return [Features(embeds_NH) for embeds_NH in torch.split(heard_NH, [sound_tokens(length) for length in lengths])]


# Sound and video are blocks of their own. With ``use_audio_in_video`` a video and its sound are one block, interleaved
# by chunks of two seconds.


class Qwen25OmniMedia:
    """Pictures, videos and sounds of Qwen2.5-Omni as tokens and positions."""

    def __init__(self, config: Any, processor: Any) -> None:
        self.vision, self.positions_a_second = config.vision_config, config.position_id_per_seconds
        marks = (processor.audio_bos_token, processor.audio_eos_token)
        self.sound_marks: tuple[int, ...] = tuple(processor.tokenizer.convert_tokens_to_ids(list(marks)))
        self.chunk_s = float(getattr(config, "seconds_per_chunk", 2.0))
        self.written_tokens: tuple[str, ...] = ()
        self.placeholders: dict[MediaKind, int] = {
            "picture": config.image_token_id,
            "video": config.video_token_id,
            "sound": config.audio_token_id,
        }
        self.frame_rule = frame_rule(processor, self.vision, 768 * 28 * 28)
        self.own_marks: dict[MediaKind, tuple[int, int]] = {}
        self.stand_ins: dict[str, int] = {}
        self.joined: dict[MediaKind, tuple[str, str]] = {}
        settings = video_settings(processor.video_processor) | {"size": frame_size(processor)}
        self.preprocessors: dict[MediaKind, Preprocessor] = {
            "picture": PicturePreprocessor(processor.image_processor),
            "video": VideoPreprocessor(processor.video_processor, settings, self.longest_step_s),
            "sound": SoundPreprocessor(processor.feature_extractor),
        }

    @property
    def longest_step_s(self) -> float:
        """How many seconds two frames of a video that is heard may stand for."""
        return self.chunk_s

    def expand(self, extent: Extent) -> Expansion:
        """One token per merged patch of what is seen, one for 40 ms of what is heard."""
        count = sound_tokens(extent.grid[0]) if extent.kind == "sound" else merged_patches(extent, self.vision)
        return repeated(self.placeholders[extent.kind], count)

    def interleave(self, video: Extent, sound: Extent) -> tuple[tuple[int, ...], Runs, Runs]:
        """A video and its sound in turn, chunk by chunk, between the marks of a sound."""
        is_sound = (self.order(video, sound) >= merged_patches(video, self.vision)).tolist()
        first, last = self.sound_marks
        tokens = [self.placeholders["sound" if heard else "video"] for heard in is_sound]
        return (first, *tokens, last), _runs(is_sound, heard=False), _runs(is_sound, heard=True)

    def positions(self, ids_T: Tensor, extents: Sequence[Extent]) -> Tensor:
        """Each medium is a block: what is seen at its seconds, what is heard one token after another."""
        blocks: list[Tensor | MarkedBlock] = []
        for i, extent in enumerate(extents):
            if extent.has_sound:
                continue
            if i and extents[i - 1].has_sound:
                blocks.append(self.heard_block(extents[i - 1], extent))
            else:
                blocks.append(self._block(extent))
        return three_axis_positions(ids_T, self.placeholders.values(), blocks)

    def order(self, video: Extent, sound: Extent) -> Tensor:
        """The order in which the tokens of a video and of its sound are written."""
        return chunk_order(self._block(video), self._block(sound), int(self.chunk_s * self.positions_a_second))

    def heard_block(self, video: Extent, sound: Extent) -> MarkedBlock:
        """The positions of a video with its sound."""
        seen_3N, heard_3M = self._block(video), self._block(sound)
        return interleaved_block(seen_3N, heard_3M, self.order(video, sound), shared_marks=True)

    def _block(self, extent: Extent) -> Tensor:
        if extent.kind == "sound":
            return line_offsets(sound_tokens(extent.grid[0]))
        times_K = timed_steps(extent.grid[0], seconds_per_step(extent, self.vision), self.positions_a_second)
        return grid_offsets(times_K, *merged_sides(extent, self.vision))


class Qwen25Omni:
    """The adapter of ``Qwen2_5OmniThinkerForConditionalGeneration``."""

    media_format: ClassVar[type[MediaFormat]] = Qwen25OmniMedia
    attention: ClassVar[Any] = {"text_config": IMPLEMENTATION}
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "vision": ("visual.",),
        "audio": ("audio_tower.",),
        "projector": ("visual.merger.", "audio_tower.ln_post.", "audio_tower.proj."),
        "language": ("model.",),
        "head": ("lm_head.",),
    }

    def __init__(self, model: Any) -> None:
        self.language_model = model.model
        self.head = model.lm_head
        sight = VisionTower(model.visual, window_tables(model.config.vision_config))
        self.towers: dict[MediaKind, Tower] = {
            "picture": sight,
            "video": sight,
            "sound": SoundTower(model.audio_tower),
        }

    def rotary(self, hidden_BTH: Tensor, positions_3BT: Tensor) -> tuple[Tensor, Tensor]:
        """All three axes."""
        return self.language_model.rotary_emb(hidden_BTH, positions_3BT)


def _runs(is_sound: Sequence[bool], *, heard: bool) -> Runs:
    """The runs of a kind's tokens, behind the mark that comes first."""
    runs, start = [], 1
    for kind, several in groupby(is_sound):
        count = len(list(several))
        if kind == heard:
            runs.append((start, count))
        start += count
    return tuple(runs)


def frame_size(processor: Any) -> dict[str, int]:
    """The least and most pixels of a frame.

    The library's processor has sizes of its own (128 to 768 tokens a frame) that outdo those of a checkpoint's video
    processor, and the published model is used with them. A checkpoint that allows less than that is taken at its word.
    """
    usual: dict[str, int] = processor.valid_processor_kwargs._defaults["videos_kwargs"]["size"]
    stated = processor.video_processor.size
    tighter = stated["longest_edge"] < usual["longest_edge"]
    chosen = stated if tighter else usual
    return {"shortest_edge": chosen["shortest_edge"], "longest_edge": chosen["longest_edge"]}

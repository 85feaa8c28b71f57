"""Qwen3-Omni's thinker: the tower of Qwen3-VL, experts, and sounds in stretches of a second, each of which is 13 tokens.

The library pads the last stretch of a sound to the longest of the batch, and a sound to the longest sound, so that the
numbers of a sound depend on its batch. Here every stretch is padded to a whole second and every sound is computed by
itself: the library's numbers for a single sound of a second or more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar

from sensorium.data.frame_sizes import frame_rule
from sensorium.models.families import qwen2_5_vl
from sensorium.models.families.qwen2_5_omni import (
    SOUND_PARTS,
    WORDS,
    Qwen25Omni,
    Qwen25OmniMedia,
    nested,
    sound_extractor,
    whisper_layers,
)
from sensorium.models.families.qwen2_5_vl import (
    PARTS,
    WRITTEN_TOKENS,
    merged_patches,
    seconds_per_step,
    sight_processors,
)
from sensorium.models.families.qwen3_vl import (
    DEEPSTACKED,
    EVEN,
    EXPERTS,
    INTERLEAVED,
    deepstack_tower,
    interpolation_tables,
)
from sensorium.models.family import MediaFormat, Tower
from sensorium.models.prepared_media import Extent, TowerInput
from sensorium.models.preprocessors import refuse_other_rate
from sensorium.models.segment_layout import Features
from sensorium.recipe.family_facts import AUDIO, Config, DeferredModule, FamilyFacts, Shapes, affine, chat_template
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.errors import MediaError, ModelError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from sensorium.data.sound import DecodedAudio
    from sensorium.models import tower
else:
    torch, tower = DeferredModule("torch"), DeferredModule("sensorium.models.tower")

OWN_TOKENS = {
    "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>", "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>", "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>",
    "audio_token": "<|audio_pad|>",
}  # fmt: skip
TOKEN_KEYS = qwen2_5_vl.TOKEN_KEYS | {
    "audio_token_id": "<|audio_pad|>", "audio_start_token_id": "<|audio_start|>", "audio_end_token_id": "<|audio_end|>",
}  # fmt: skip
SHOWN = qwen2_5_vl.SHOWN | {"audio": "<|audio_start|><|audio_pad|><|audio_end|>"}


def tiny_processor(library: Any, given: dict[str, Any], config: Any) -> Any:
    given = given | sight_processors(library, config, **EVEN) | sound_extractor(library, config)
    return library.Qwen3OmniMoeProcessor(**given)


def tower_tensors(config: Config) -> Shapes:
    """The tensors of both towers; the convolutions of sound are over time and pitch."""
    yield from deepstack_tower(config["vision_config"], named=False)
    audio, at = config["audio_config"], "audio_tower"
    hidden, channels, bins = audio["d_model"], audio["downsample_hidden_size"], audio["num_mel_bins"]
    for number, inputs in ((1, 1), (2, channels), (3, channels)):
        yield from affine(f"{at}.conv2d{number}", [channels, inputs, 3, 3])
        bins = (bins + 1) // 2
    yield f"{at}.conv_out.weight", [hidden, channels * bins]
    yield from whisper_layers(at, audio, key_bias=True)
    yield from affine(f"{at}.ln_post", [hidden])
    yield from affine(f"{at}.proj1", [hidden, hidden])
    yield from affine(f"{at}.proj2", [audio["output_dim"], hidden])


STRETCH, TOKENS = 100, 13  # mel frames of a stretch, and its tokens: three strides of two


def stretched_sound_tokens(frames: int) -> int:
    """The number of features of ``frames`` mel frames: 100 → 13, 101 → 14, 250 → 33."""
    rest = frames % STRETCH
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return rest + frames // STRETCH * TOKENS


class UnpaddedSounds:
    """The checkpoint's mel spectrogram of sounds, each by itself and as long as it is."""

    def __init__(self, extractor: Any) -> None:
        self._extractor = extractor

    def __call__(self, items: Sequence[tuple[Media, DecodedAudio]]) -> list[TowerInput]:
        """Mel frames of each sound."""
        return [self._spectrogram(media, sound) for media, sound in items]

    def _spectrogram(self, media: Media, sound: DecodedAudio) -> TowerInput:
        extractor, length = self._extractor, len(sound.samples)
        rate = extractor.sampling_rate
        refuse_other_rate(media, sound, rate)
        if length <= extractor.n_fft // 2:
            raise MediaError(f"{media.name}: {length / rate * 1000:.0f} ms are too short to be heard; give 13 ms at least.")
        made = extractor([sound.samples], sampling_rate=rate, padding=True, truncation=False, return_tensors="pt")
        frames_FC = made["input_features"][0].T.contiguous()
        return TowerInput(frames_FC, Extent("sound", (len(frames_FC), 1, 1)))


class StretchedSoundTower:
    """The stock audio tower, with its index tables made here: a sound has the same ones in any batch."""

    def __init__(self, audio_tower: Any) -> None:
        if audio_tower.config.n_window * 2 != STRETCH:
            raise ModelError(
                f"the audio tower cuts sounds into stretches of {audio_tower.config.n_window * 2} mel frames; "
                f"only {STRETCH} (n_window 50, as published) give 13 tokens a stretch."
            )
        audio_tower.config._attn_implementation = tower.SEGMENTS
        self.module = audio_tower
        self._window = audio_tower.config.n_window_infer // STRETCH * TOKENS

    def __call__(self, prepared: Sequence[TowerInput]) -> list[Features]:
        """Embeddings of each sound, 13 a second."""
        weight = self.module.conv2d1.weight
        stretches = [stretch for item in prepared for stretch in item.patches_PC.split(STRETCH)]
        lengths = [len(stretch) for stretch in stretches]
        padded = [torch.nn.functional.pad(stretch_FC, (0, 0, 0, STRETCH - len(stretch_FC))) for stretch_FC in stretches]
        counts = [stretched_sound_tokens(len(item.patches_PC)) for item in prepared]
        heard_NH = self.module(
            feature_lens=torch.tensor([len(item.patches_PC) for item in prepared], device=weight.device),
            padded_feature=torch.stack(padded).transpose(1, 2).to(weight.device, weight.dtype),
            chunk_lengths=torch.tensor(lengths, device=weight.device),
            valid_indices=_written(lengths).to(weight.device),
            cu_seqlens=_windows(counts, self._window).to(weight.device),
        ).last_hidden_state
        return [Features(embeds_NH) for embeds_NH in torch.split(heard_NH, counts)]


def _written(lengths: Sequence[int]) -> Tensor:
    """The places of tokens among 13 of each stretch."""
    counts_S = torch.tensor([stretched_sound_tokens(length) for length in lengths])
    return (torch.arange(TOKENS) < counts_S[:, None]).flatten().nonzero()[:, 0]


def _windows(counts: Sequence[int], window: int) -> Tensor:
    """The ends of the stretches of tokens that attend to each other."""
    sizes = [min(window, count - start) for count in counts for start in range(0, count, window)]
    return torch.tensor([0, *sizes]).cumsum(0, dtype=torch.int32)


class Qwen3OmniMedia(Qwen25OmniMedia):
    """Media as those of Qwen2.5-Omni, with 13 positions a second (by the checkpoint's config), each mark at its own."""

    written_tokens: ClassVar[tuple[str, ...]] = WRITTEN_TOKENS
    shared_marks: ClassVar[bool] = False
    count_sound = staticmethod(stretched_sound_tokens)

    def __init__(self, config: Any, processor: Any) -> None:
        super().__init__(config, processor)
        self.frame_rule = frame_rule(processor, self.vision, 768 * 32 * 32)
        self.preprocessors["sound"] = UnpaddedSounds(processor.feature_extractor)

    @property
    def longest_step_s(self) -> float:
        """Frames and sound are merged token by token, so that steps may be of any length."""
        return inf

    def order(self, video: Extent, sound: Extent) -> Tensor:
        """Token by token: each of the video before the first of the sound that is not earlier."""
        steps = torch.arange(video.grid[0], dtype=torch.float64)
        times = steps * seconds_per_step(video, self.vision) * self.positions_a_second
        seen_N = times.repeat_interleave(merged_patches(video, self.vision) // video.grid[0])
        heard_M = torch.arange(stretched_sound_tokens(sound.grid[0]))
        return torch.argsort(torch.cat([seen_N, heard_M]), stable=True)


class Qwen3Omni(Qwen25Omni):
    """The adapter of ``Qwen3OmniMoeThinkerForConditionalGeneration``."""

    media_format: ClassVar[type[MediaFormat]] = Qwen3OmniMedia
    facts: ClassVar[FamilyFacts] = FamilyFacts(
        "Qwen3OmniMoeThinker",
        INTERLEAVED | EXPERTS,
        chat_template(SHOWN),
        DEEPSTACKED,
        AUDIO | {"downsample_hidden_size": 16},  # most weights are those of the convolutions
        more={"position_id_per_seconds": 13},
        rows=512,
        tokens=OWN_TOKENS,
        token_keys=TOKEN_KEYS,
        words=WORDS,
        processor=tiny_processor,
        published_pixels=((3136, 12845056), (100352, 786432)),
        tensors=tower_tensors,
        parts=(*PARTS, *SOUND_PARTS),
        tables=("pos_embed",),
        names=("3-omni",),
        query_norm=True,
        vllm=True,
    )
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **Qwen25Omni.groups,
        "projector": nested("visual.merger.", "visual.merger_list.", "audio_tower.ln_post.", "audio_tower.proj"),
    }

    def make_towers(self) -> tuple[Tower, Tower]:
        """The towers of pictures and videos, and of sounds."""
        visual = self.core.visual
        return tower.VisionTower(visual, interpolation_tables(visual)), StretchedSoundTower(self.core.audio_tower)

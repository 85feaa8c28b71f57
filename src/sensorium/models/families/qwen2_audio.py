"""Qwen2-Audio: sounds in, text out. A Whisper encoder whose states are averaged in pairs, a projector, and Qwen2.

A sound of F mel frames (100 a second) becomes (F + 1) // 2 states and half as many tokens, 25 a second::

    1.3 s:  130 mel frames  →  65 states  →  32 tokens

The library pads every sound to the encoder's 30 seconds and masks the padding in attention. Here each sound is encoded by
itself at its own length, with the few mel frames of padding that the convolutions see behind its end: the same numbers,
whatever else is in the batch. The published template numbers the sounds of a conversation ("Audio 1: …"); a turn that is
rendered by itself counts its own from 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sensorium.models.families.qwen2_5_omni import sound_extractor, whisper_layers
from sensorium.models.families.text import QWEN2
from sensorium.models.family import DefaultMedia, DefaultModel, MediaFormat, Tower, repeated
from sensorium.models.prepared_media import Extent, Preprocessor, TowerInput
from sensorium.models.preprocessors import SoundPreprocessor, sound_tokens
from sensorium.models.segment_layout import Expansion, Features
from sensorium.recipe.family_facts import AUDIO, Config, DeferredModule, FamilyFacts, Shapes, affine, chat_template
from sensorium.vocabulary.content import Media, MediaKind

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import conversion_mapping

    from sensorium.data.sound import DecodedAudio
else:
    torch, conversion_mapping = DeferredModule("torch"), DeferredModule("transformers.conversion_mapping")

TOKENS = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
NUMBERED = (
    "{% set sounds.count = sounds.count + 1 %}Audio {{ sounds.count }}: <|audio_bos|><|AUDIO|><|audio_eos|>{{ '\n' }}"
)
TEMPLATE = "{% set sounds = namespace(count=0) %}" + chat_template({"audio": NUMBERED}, system=True)
MARGIN = 2  # mel frames after the end of a sound that its last state depends on: one for each convolution


def tiny_processor(library: Any, given: dict[str, Any], config: Any) -> Any:
    return library.Qwen2AudioProcessor(**given, **sound_extractor(library, config))


def save_as_published(model: Any) -> None:
    """Let a stock model be saved with "language_model.model." in its names, as published.

    transformers 5.17 reverts the renamings of two classes, and would write "language_model.model.model.".
    """
    renamings = getattr(model, "_weight_conversions", None)
    if renamings is None:  # built, not loaded
        renamings = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
    model._weight_conversions = [one for one in renamings if one.target_patterns != ["language_model"]]


def tower_tensors(config: Config) -> Shapes:
    """The tensors of the encoder and the projector."""
    audio, at = config["audio_config"], "audio_tower"
    hidden = audio["d_model"]
    yield from affine(f"{at}.conv1", [hidden, audio["num_mel_bins"], 3])
    yield from affine(f"{at}.conv2", [hidden, hidden, 3])
    yield f"{at}.embed_positions.weight", [audio["max_source_positions"], hidden]
    yield from whisper_layers(at, audio)
    yield from affine(f"{at}.layer_norm", [hidden])
    yield from affine("multi_modal_projector.linear", [config["text_config"]["hidden_size"], hidden])


class PaddedSounds(SoundPreprocessor):
    """Mel frames of each sound, and up to ``MARGIN`` frames of the silence that the library pads it with."""

    def _spectrogram(self, media: Media, sound: DecodedAudio) -> TowerInput:
        extent = super()._spectrogram(media, sound).extent  # refuses what is too long, too short or at another rate
        rate = self._extractor.sampling_rate
        made = self._extractor([sound.samples], sampling_rate=rate, padding="max_length", return_tensors="pt")
        return TowerInput(made["input_features"][0, :, : extent.grid[0] + MARGIN].T.contiguous(), extent)


class Qwen2AudioMedia(DefaultMedia):
    """Sounds of Qwen2-Audio as tokens and positions. ``frames``: to so many its stock encoder pads a sound."""

    margin = MARGIN

    def __init__(self, config: Any, processor: Any) -> None:
        self.frames = 2 * config.audio_config.max_source_positions
        self.placeholders: dict[MediaKind, int] = {"sound": config.audio_token_id}
        self.preprocessors: dict[MediaKind, Preprocessor] = {"sound": PaddedSounds(processor.feature_extractor)}

    def expand(self, extent: Extent) -> Expansion:
        """One token for 40 ms."""
        return repeated(self.placeholders["sound"], sound_tokens(extent.grid[0]))


class WhisperTower:
    """The stock encoder and projector over sounds, one by one, without the padding to 30 seconds."""

    def __init__(self, encoder: Any, projector: Any) -> None:
        self.module: nn.Module = torch.nn.ModuleList([encoder, projector])
        self._encoder, self._projector = encoder, projector

    def __call__(self, prepared: Sequence[TowerInput]) -> list[Features]:
        """Embeddings of each sound, 25 a second."""
        return [Features(self._encode(item)) for item in prepared]

    def _encode(self, item: TowerInput) -> Tensor:
        encoder, gelu = self._encoder, torch.nn.functional.gelu
        weight, states = encoder.conv1.weight, (item.extent.grid[0] + 1) // 2
        frames_1CF = item.patches_PC.T[None].to(weight.device, weight.dtype)
        states_1HL = gelu(encoder.conv2(gelu(encoder.conv1(frames_1CF))))[..., :states]
        hidden_1LH = states_1HL.transpose(1, 2) + encoder.embed_positions.weight[:states]
        for layer in encoder.layers:
            hidden_1LH = layer(hidden_1LH, None)
        pooled_1NH = encoder.avg_pooler(hidden_1LH.transpose(1, 2)).transpose(1, 2)
        embeds_1NH: Tensor = self._projector(encoder.layer_norm(pooled_1NH))
        return embeds_1NH[0]


class Qwen2Audio(DefaultModel):
    """The adapter of ``Qwen2AudioForConditionalGeneration``."""

    media_format: ClassVar[type[MediaFormat]] = Qwen2AudioMedia
    facts: ClassVar[FamilyFacts] = FamilyFacts(
        "Qwen2Audio",
        QWEN2,
        TEMPLATE,
        audio=AUDIO | {"model_type": "qwen2_audio_encoder", "max_source_positions": 1500},
        more={"tie_word_embeddings": False},  # transformers never ties its head
        rows=512,
        tokens=TOKENS,
        token_keys={"audio_token_index": "<|AUDIO|>"},
        words="Audio sound hear tone high low loud soft",
        processor=tiny_processor,
        before_saving=save_as_published,
        tensors=tower_tensors,
        parts=(("multi_modal_projector.", "projector"), ("audio_tower.", "audio")),
        tables=("embed_positions",),
        names=("2-audio",),
        vllm=True,
        vllm_adapters=False,
        renamed=True,
    )
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "audio": ("model.audio_tower.",),
        "projector": ("model.multi_modal_projector.",),
        "language": ("model.language_model.",),
        "head": ("lm_head.",),
    }

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        encoder, projector = self.core.audio_tower, self.core.multi_modal_projector
        # The table of sines is never trained: a buffer of the same name is saved alike and belongs to no optimizer.
        table = encoder.embed_positions
        if "weight" in table._parameters:
            table.register_buffer("weight", table._parameters.pop("weight").detach())
        self.towers: dict[MediaKind, Tower] = {"sound": WhisperTower(encoder, projector)}
        save_as_published(model)

"""The sizes of the tiny models that ``tiny:FAMILY`` makes on the spot, known without making one."""

from dataclasses import dataclass, field
from typing import Any

from sensorium.vocabulary.errors import RecipeError

Sizes = dict[str, Any]

# head_dim 32 is the smallest that vLLM's attention takes.
TEXT: Sizes = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "initializer_range": 0.05,
}  # fmt: skip
VISION: Sizes = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "initializer_range": 0.05}
WINDOWED = VISION | {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1]}
DEEPSTACKED = VISION | {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
AUDIO: Sizes = {
    "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 128, "num_mel_bins": 64,
    "initializer_range": 0.05,
}  # fmt: skip
# Qwen3-Omni's convolutions take most of it.
STRETCHED = AUDIO | {"downsample_hidden_size": 16}
# A tower as transformers' own, four patches on each side of a tile.
PLAIN: Sizes = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "image_size": 56,
    "patch_size": 14, "initializer_range": 0.05,
}  # fmt: skip
# The config of this tower has no scale of its first weights.
SIGLIP = {key: size for key, size in PLAIN.items() if key != "initializer_range"} | {
    "model_type": "siglip_vision_model", "vision_use_head": False,
}  # fmt: skip
ROPE: Sizes = {"rope_type": "default", "rope_theta": 1e4}
THREE_AXES = TEXT | {"rope_parameters": ROPE | {"mrope_section": [4, 6, 6]}}
INTERLEAVED = TEXT | {
    "head_dim": 32,
    "rope_parameters": ROPE | {"mrope_section": [6, 5, 5], "mrope_interleaved": True},
}
EXPERTS: Sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@dataclass(frozen=True)
class Kind:
    """How a tiny model of a family is built: transformers' class prefix, and the sizes of its parts.

    ``text_type`` names the language model where the family takes several, ``more`` what its config says besides.
    """

    prefix: str
    text: Sizes
    vision: Sizes = field(default_factory=dict)
    audio: Sizes = field(default_factory=dict)
    text_type: str = ""
    more: Sizes = field(default_factory=dict)


KINDS = {
    "qwen2_5_vl": Kind("Qwen2_5_VL", THREE_AXES, WINDOWED),
    "qwen3_vl": Kind("Qwen3VL", INTERLEAVED, DEEPSTACKED),
    "qwen3_vl_moe": Kind("Qwen3VLMoe", INTERLEAVED | EXPERTS, DEEPSTACKED),
    "qwen2_5_omni": Kind("Qwen2_5OmniThinker", THREE_AXES, WINDOWED, AUDIO),
    "qwen3_omni_moe": Kind(
        "Qwen3OmniMoeThinker", INTERLEAVED | EXPERTS, DEEPSTACKED, STRETCHED, more={"position_id_per_seconds": 13}
    ),
    "internvl": Kind("InternVL", TEXT, PLAIN, text_type="qwen2"),
    "llava_onevision": Kind(
        "LlavaOnevision",
        TEXT,
        SIGLIP,
        text_type="qwen2",
        more={"image_grid_pinpoints": [[56, 56], [56, 112], [112, 56], [112, 112]]},
    ),
    "smolvlm": Kind("SmolVLM", TEXT, PLAIN, text_type="llama", more={"scale_factor": 2, "pad_token_id": 0}),
    "qwen2": Kind("Qwen2", TEXT),
    "qwen3": Kind("Qwen3", TEXT | {"head_dim": 32}),
}

VOCABULARY = {
    "qwen2_5_omni": 512,
    "qwen3_omni_moe": 512,
    "smolvlm": 512,
}  # rows of the embedding; the others' tokenizers have fewer special tokens
USUAL_VOCABULARY = 448
MOST_LAYERS = 64


def family_and_layers(name: str) -> tuple[str, int]:
    """What a name such as ``qwen3`` or ``qwen3:4`` asks for: the family, and how many layers its language model has."""
    family, colon, layers = name.partition(":")
    if colon and not (layers.isdecimal() and 1 <= int(layers) <= MOST_LAYERS):
        raise RecipeError(
            f"'tiny:{name}': after the family comes a number of layers, 1 to {MOST_LAYERS}, as in tiny:qwen3:4."
        )
    return family, int(layers) if colon else TEXT["num_hidden_layers"]


def tiny_config(family: str, layers: int = TEXT["num_hidden_layers"]) -> Sizes:
    """What the config.json of a tiny model says about its sizes."""
    kind = KINDS[family]
    text = kind.text | {"vocab_size": VOCABULARY.get(family, USUAL_VOCABULARY), "num_hidden_layers": layers}
    name = {"model_type": family, "tie_word_embeddings": True, **kind.more}
    if not kind.vision:
        return name | text
    if kind.text_type:
        return name | {"text_config": text | {"model_type": kind.text_type}, "vision_config": kind.vision}
    config = name | {"text_config": text, "vision_config": kind.vision | {"out_hidden_size": text["hidden_size"]}}
    if kind.audio:
        config["audio_config"] = kind.audio | {"output_dim": text["hidden_size"]}
    return config

"""The linear layers of a model, which low-rank adapters can sit on, told without torch from its files or its config."""

import json
import os
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sensorium.recipe.names import PARAMETER_GROUPS
from sensorium.recipe.schema import LoraSection
from sensorium.vocabulary.errors import RecipeError

# Two-dimensional weights that are no linear layers: tables, and the routers and experts of a mixture.
NOT_LINEAR = ("embed_tokens", "pos_embed", "position_embedding", "audio_bos_eos_token", "mlp.gate")


@dataclass(frozen=True)
class Linear:
    """A linear layer: its name (in the files, which may differ from the model's before the layer), group and sizes."""

    name: str
    group: str
    inputs: int
    outputs: int


def ends_in(name: str, modules: Sequence[str]) -> bool:
    """Whether a layer's name ends in one of these, by whole words; any name does, where none are given."""
    return not modules or any(f".{name}".endswith(f".{module}") for module in modules)


def linears_in(shapes: Mapping[str, Sequence[int]], group_of: Callable[[str], str]) -> tuple[Linear, ...]:
    """Those among a checkpoint's tensors; ``group_of`` sorts tensors by name."""
    found = []
    for tensor, shape in shapes.items():
        name = tensor.removesuffix(".weight")
        if len(shape) == 2 and name != tensor and not name.endswith(NOT_LINEAR) and ".experts." not in name:
            found.append(Linear(name, group_of(tensor), shape[1], shape[0]))
    return tuple(found)


def linears_of(config: dict[str, Any]) -> tuple[Linear, ...]:
    """Those of a config alone, for the families we know, but for towers that are transformers' own (tower_tensors)."""
    config = config.get("thinker_config", config)
    text = config.get("text_config", config)
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    found = list(_language_linears(text))
    if not tied:
        found.append(Linear("lm_head", "head", text["hidden_size"], text["vocab_size"]))
    if (vision := config.get("vision_config")) and "out_hidden_size" in vision:
        new, hears = config["model_type"].startswith("qwen3"), "audio_config" in config
        found += _tower(vision, plain=new, fused=new or not hears, named=new and not hears)
    if audio := config.get("audio_config"):
        found += _audio_tower(audio)
    return tuple(found)


def _language_linears(text: dict[str, Any]) -> Iterator[Linear]:
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    head_dim = text.get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, text.get("num_key_value_heads", heads) * head_dim
    for i in range(text["num_hidden_layers"]):
        at = f"language_model.layers.{i}"
        yield Linear(f"{at}.self_attn.q_proj", "language", hidden, queries)
        yield Linear(f"{at}.self_attn.k_proj", "language", hidden, keys)
        yield Linear(f"{at}.self_attn.v_proj", "language", hidden, keys)
        yield Linear(f"{at}.self_attn.o_proj", "language", queries, hidden)
        if not text.get("num_experts_per_tok", 0):
            yield from _gated(at, "language", hidden, text["intermediate_size"])


def _tower(vision: dict[str, Any], *, plain: bool, fused: bool, named: bool) -> Iterator[Linear]:
    """A vision tower: blocks with a plain MLP and deepstack mergers (Qwen3-VL), or a gated one (Qwen2.5-VL).

    ``fused``: queries, keys and values are one layer (not in Qwen2.5-Omni). ``named``: layers of mergers have names, not
    numbers (in Qwen3-VL).
    """
    hidden, wide, out = vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"]
    merged = hidden * vision.get("spatial_merge_size", 2) ** 2
    for i in range(vision["depth"]):
        at = f"visual.blocks.{i}"
        for name, parts in (("qkv", 3),) if fused else (("q", 1), ("k", 1), ("v", 1)):
            yield Linear(f"{at}.attn.{name}", "vision", hidden, parts * hidden)
        yield Linear(f"{at}.attn.proj", "vision", hidden, hidden)
        if plain:
            yield Linear(f"{at}.mlp.linear_fc1", "vision", hidden, wide)
            yield Linear(f"{at}.mlp.linear_fc2", "vision", wide, hidden)
        else:
            yield from _gated(at, "vision", hidden, wide)
    several = "deepstack_merger_list" if named else "merger_list"
    deep = [f"{several}.{i}" for i in range(len(vision.get("deepstack_visual_indexes", ())))] if plain else []
    first, second = ("linear_fc1", "linear_fc2") if named else ("mlp.0", "mlp.2")
    for merger in ["merger", *deep]:
        yield Linear(f"visual.{merger}.{first}", "projector", merged, merged)
        yield Linear(f"visual.{merger}.{second}", "projector", merged, out)


def _audio_tower(audio: dict[str, Any]) -> Iterator[Linear]:
    hidden, wide = audio["d_model"], audio["encoder_ffn_dim"]
    for i in range(audio["encoder_layers"]):
        at = f"audio_tower.layers.{i}"
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            yield Linear(f"{at}.self_attn.{name}", "audio", hidden, hidden)
        yield Linear(f"{at}.fc1", "audio", hidden, wide)
        yield Linear(f"{at}.fc2", "audio", wide, hidden)
    if channels := audio.get("downsample_hidden_size"):  # Qwen3-Omni's
        yield Linear("audio_tower.conv_out", "audio", channels * halved(audio["num_mel_bins"]), hidden)
        yield Linear("audio_tower.proj1", "projector", hidden, hidden)
        yield Linear("audio_tower.proj2", "projector", hidden, audio["output_dim"])
    else:
        yield Linear("audio_tower.proj", "projector", hidden, audio["output_dim"])


def halved(bins: int) -> int:
    """What three convolutions of stride 2 leave of so many mel bins."""
    for _ in range(3):
        bins = (bins + 1) // 2
    return bins


def _gated(at: str, group: str, hidden: int, wide: int) -> Iterator[Linear]:
    yield Linear(f"{at}.mlp.gate_proj", group, hidden, wide)
    yield Linear(f"{at}.mlp.up_proj", group, hidden, wide)
    yield Linear(f"{at}.mlp.down_proj", group, wide, hidden)


Shapes = Iterator[tuple[str, list[int]]]


def tower_tensors(config: dict[str, Any]) -> dict[str, list[int]] | None:
    """The tensors of a tower and its projector; None for a family whose towers are counted otherwise."""
    tell = FAMILIES.get(config.get("model_type", ""))
    return None if tell is None else dict(tell(config, config["vision_config"], config["text_config"]))


def _internvl(config: dict[str, Any], vision: dict[str, Any], text: dict[str, Any]) -> Shapes:
    hidden, at, size, patch = (
        vision["hidden_size"],
        "vision_tower",
        _first(vision["image_size"]),
        _first(vision["patch_size"]),
    )
    yield f"{at}.embeddings.cls_token", [1, 1, hidden]
    yield f"{at}.embeddings.position_embeddings", [1, (size // patch) ** 2 + 1, hidden]
    yield from _affine(f"{at}.embeddings.patch_embeddings.projection", [hidden, 3, patch, patch])
    for i in range(vision["num_hidden_layers"]):
        layer = f"{at}.encoder.layer.{i}"
        for name in ("q_proj", "k_proj", "v_proj"):
            yield f"{layer}.attention.{name}.weight", [hidden, hidden]
            if vision.get("attention_bias"):
                yield f"{layer}.attention.{name}.bias", [hidden]
        yield from _affine(f"{layer}.attention.projection_layer", [hidden, hidden])
        for name in ("q_norm", "k_norm") if vision.get("use_qk_norm") else ():
            yield f"{layer}.attention.{name}.weight", [hidden]
        for name in ("lambda_1", "lambda_2"):
            yield f"{layer}.{name}", [hidden]
        for name in ("layernorm_before", "layernorm_after"):
            yield f"{layer}.{name}.weight", [hidden]
            if vision.get("norm_type") != "rms_norm":
                yield f"{layer}.{name}.bias", [hidden]
        yield from _affine(f"{layer}.mlp.fc1", [vision["intermediate_size"], hidden])
        yield from _affine(f"{layer}.mlp.fc2", [hidden, vision["intermediate_size"]])
    if not vision.get("use_mean_pooling", True):
        yield from _affine(f"{at}.layernorm", [hidden])
    shuffled = round(hidden / config.get("downsample_ratio", 0.5) ** 2)
    yield from _affine("multi_modal_projector.layer_norm", [shuffled])
    yield from _affine("multi_modal_projector.linear_1", [text["hidden_size"], shuffled])
    yield from _affine("multi_modal_projector.linear_2", [text["hidden_size"]] * 2)


def _smolvlm(config: dict[str, Any], vision: dict[str, Any], text: dict[str, Any]) -> Shapes:
    yield from _siglip("vision_model", vision)
    shuffled = vision["hidden_size"] * config.get("scale_factor", 2) ** 2
    yield "connector.modality_projection.proj.weight", [text["hidden_size"], shuffled]


def _llava_onevision(config: dict[str, Any], vision: dict[str, Any], text: dict[str, Any]) -> Shapes:
    yield from _siglip("vision_tower", vision)
    layers = config.get("vision_feature_layer", -1)
    seen = vision["hidden_size"] * (1 if isinstance(layers, int) else len(layers))
    yield "image_newline", [text["hidden_size"]]
    yield from _affine("multi_modal_projector.linear_1", [text["hidden_size"], seen])
    yield from _affine("multi_modal_projector.linear_2", [text["hidden_size"]] * 2)


def _siglip(at: str, vision: dict[str, Any]) -> Shapes:
    hidden, wide, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    yield f"{at}.embeddings.position_embedding.weight", [(vision["image_size"] // patch) ** 2, hidden]
    yield from _affine(f"{at}.embeddings.patch_embedding", [hidden, 3, patch, patch])
    for i in range(vision["num_hidden_layers"]):
        layer = f"{at}.encoder.layers.{i}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _affine(f"{layer}.self_attn.{name}", [hidden, hidden])
        yield from _affine(f"{layer}.layer_norm1", [hidden])
        yield from _affine(f"{layer}.layer_norm2", [hidden])
        yield from _affine(f"{layer}.mlp.fc1", [wide, hidden])
        yield from _affine(f"{layer}.mlp.fc2", [hidden, wide])
    yield from _affine(f"{at}.post_layernorm", [hidden])


def _affine(name: str, weight: list[int]) -> Shapes:
    """A weight and its bias."""
    yield f"{name}.weight", weight
    yield f"{name}.bias", weight[:1]


def _first(value: int | list[int]) -> int:
    return value if isinstance(value, int) else value[0]


FAMILIES: dict[str, Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], Shapes]] = {
    "internvl": _internvl,
    "llava_onevision": _llava_onevision,
    "smolvlm": _smolvlm,
}


# The parts of an Omni model that speak, heads that predict several tokens ahead (MTP), the pooling head of a SigLIP
# tower, and tables that older versions of transformers saved though they are computed. A recipe adds others by
# ``model.unused_weights``.


SPEAKING = ("talker.", "token2wav.", "code2wav.")
OTHERS = re.compile(r"(^|\.)(mtp\.|rotary_emb\.inv_freq$|embeddings\.position_ids$|vision_model\.head\.)")


def is_unloaded(name: str, also: Sequence[str] = ()) -> bool:
    """Whether a weight is left out on purpose; ``also`` are prefixes that a recipe names."""
    return name.startswith((*SPEAKING, *also)) or OTHERS.search(name) is not None


def told_by_part(names: Iterable[str], most: int = 4) -> str:
    """Names of weights in few words, by the part they belong to: ``model.layers.2 (12 weights), model.layers.3 (12 …)``."""
    names = list(names)
    if len(names) <= most:
        return ", ".join(sorted(names))
    parts = Counter(part_of(name) for name in sorted(names))
    told = [f"{part} ({count} {'weight' if count == 1 else 'weights'})" for part, count in parts.items()]
    return ", ".join(told[:most]) + (f" and {len(told) - most} more parts" if len(told) > most else "")


def part_of(name: str) -> str:
    """``a.layers.2.mlp.up.weight`` → ``a.layers.2``; without a number all but the last word."""
    words = name.split(".")
    numbers = [place for place, word in enumerate(words) if word.isdigit()]
    return ".".join(words[: numbers[0] + 1] if numbers else words[:-1] or words)


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


PLAIN_PARTS = (
    ("multi_modal_projector.", "projector"), ("image_newline", "projector"), ("connector.", "projector"),
    ("vision_tower.", "vision"), ("vision_model.", "vision"),
)  # fmt: skip
"""Parts of families whose towers are transformers' own, by the names of their weights."""

LONGEST_HEADER = 100_000_000
"""Bytes of a safetensors header at most, as safetensors itself has it."""

ASSETS = Path(__file__).resolve().parents[1] / "assets"


class IncompleteConfig(RecipeError):
    """A config.json that leaves the sizes of a model to defaults, which only transformers knows."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model. ``parameters`` counts them by group; ``exact`` says whether the weights themselves were counted.

    ``linears`` are the layers that low-rank adapters can sit on. ``queries`` is the size of a token's queries, all heads
    together: Qwen3-VL's is up to twice the hidden size.
    """

    family: str
    layers: int
    hidden: int
    queries: int
    key_values: int
    mlp: int
    vocabulary: int
    parameters: dict[str, int]
    exact: bool
    linears: tuple[Linear, ...] = ()
    tower_hidden: int = 0
    tower_depth: int = 0
    tower_mlp: int = 0
    positions: int = 0
    """The longest context that it was made for, in tokens; 0 if its config does not say."""

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(self.parameters.values())

    def trainable(self, freeze: tuple[str, ...]) -> int:
        """Parameters that are not frozen."""
        return sum(count for group, count in self.parameters.items() if group not in freeze)

    def adapters(self, lora: LoraSection) -> int:
        """Parameters of the adapters on the linear layers that are chosen."""
        chosen = [layer for layer in self.linears if layer.group in lora.groups and ends_in(layer.name, lora.modules)]
        return lora.rank * sum(layer.inputs + layer.outputs for layer in chosen)


def is_ours(path: str) -> bool:
    """Whether a ``model.path`` means a small model that is shipped or made on the spot: nothing of it needs a check."""
    return path.partition(":")[0] in ("tiny", "package")


def read_shape(
    path: str, revision: str = "", config: dict[str, Any] | None = None, unused: Sequence[str] = ()
) -> ModelShape | None:
    """The shape of the model that a recipe's ``model.path`` means, or None if it is not on this disk.

    ``config`` stands for its config.json, where that leaves keys to the defaults of transformers; ``unused`` are prefixes
    of weights that are not loaded.
    """
    scheme, _, name = path.partition(":")
    if scheme == "tiny":
        family, layers = family_and_layers(name)
        return _shape_of(tiny_config(family, layers), {}, exact=True) if family in KINDS else None
    folder = _folder(path, revision)
    if folder is None or not (folder / "config.json").is_file():
        return None
    try:
        config = config or json.loads((folder / "config.json").read_text())
        return _shape_of(config.get("thinker_config", config), _weight_shapes(folder, unused), exact=False)
    except KeyError as error:
        raise IncompleteConfig(
            f"model.path '{path}': its config.json does not say {error}, so the model's size is not known from it. Use the "
            "complete config.json that was published with the weights."
        ) from error
    except (OSError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError, struct.error) as error:
        raise RecipeError(
            f"model.path '{path}': config.json or a weight file there is damaged or of no known form ({error}). Copy or "
            "download the checkpoint again."
        ) from error


def _shape_of(config: dict[str, Any], shapes: dict[str, list[int]], *, exact: bool) -> ModelShape:
    """The shape by a config, and by the weights where there are some; ``exact`` where the config is known to tell all."""
    text = config.get("text_config", config)
    heads = text["num_attention_heads"]
    head_dim = text.get("head_dim") or text["hidden_size"] // heads
    experts = text.get("num_experts_per_tok", 0)
    if _tied(config):  # a head that is written out all the same is not loaded
        shapes = {name: shape for name, shape in shapes.items() if _group_of(name) != "head"}
    counted = _count_weights(shapes)
    vision = config.get("vision_config") or {}
    return ModelShape(
        family=config.get("model_type", "").removesuffix("_thinker"),
        layers=text["num_hidden_layers"],
        hidden=text["hidden_size"],
        queries=heads * head_dim,
        key_values=text.get("num_key_value_heads", heads) * head_dim,
        mlp=experts * text["moe_intermediate_size"] if experts else text["intermediate_size"],
        vocabulary=text["vocab_size"],
        parameters=counted or count_parameters(config),
        exact=exact or bool(counted),
        linears=linears_in(shapes, _group_of) if shapes else linears_by_config(config),
        tower_hidden=vision.get("hidden_size", 0),
        tower_depth=vision.get("depth", 0),
        tower_mlp=vision.get("intermediate_size", 0),
        positions=text.get("max_position_embeddings") or 0,
    )


def shape_by_config(config: dict[str, Any]) -> ModelShape:
    """The shape that a config alone tells, for the families we know."""
    return _shape_of(config, {}, exact=False)


def linears_by_config(config: dict[str, Any]) -> tuple[Linear, ...]:
    """Linear layers from a config alone, for the families we know."""
    return linears_of(config) + linears_in(tower_tensors(config) or {}, _group_of)


def count_parameters(config: dict[str, Any]) -> dict[str, int]:
    """Parameters by group from a config alone, for the families we know."""
    text = config.get("text_config", config)
    vision = config.get("vision_config")
    table = text["vocab_size"] * text["hidden_size"]
    counts = {
        "language": table + _language_size(text, text.get("model_type", config["model_type"])),
        "head": 0 if _tied(config) else table,
    }
    towers = tower_tensors(config)
    if towers is not None:
        counted = _count_weights(towers)
        counts |= {"vision": counted["vision"], "projector": counted["projector"]}
    elif vision:
        tower = _tower_qwen3 if config["model_type"].startswith("qwen3") else _tower_qwen25
        counts["vision"], counts["projector"] = tower(vision)
    if audio := config.get("audio_config"):
        counts["audio"], projector = _tower_audio(audio)
        counts["projector"] += projector
    return {group: counts.get(group, 0) for group in PARAMETER_GROUPS}


def _tied(config: dict[str, Any]) -> bool:
    """Whether the head is the embeddings."""
    return bool(config.get("tie_word_embeddings", config.get("text_config", config).get("tie_word_embeddings", False)))


def _language_size(text: dict[str, Any], family: str) -> int:
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    head_dim = text.get("head_dim") or hidden // heads
    queries, pairs = heads * head_dim, 2 * text.get("num_key_value_heads", heads) * head_dim
    attention = hidden * (2 * queries + pairs)
    if family.startswith("qwen3"):
        attention += 2 * head_dim
    elif family.startswith("qwen2"):
        attention += queries + pairs
    if experts := text.get("num_experts") or text.get("num_local_experts", 0):
        mlp = experts * 3 * hidden * text["moe_intermediate_size"] + hidden * experts
    else:
        mlp = 3 * hidden * text["intermediate_size"]
    return int(text["num_hidden_layers"] * (attention + mlp + 2 * hidden) + hidden)


def _tower_qwen25(vision: dict[str, Any]) -> tuple[int, int]:
    hidden, wide = vision["hidden_size"], vision["intermediate_size"]
    patch = vision.get("in_channels", 3) * vision.get("temporal_patch_size", 2) * vision["patch_size"] ** 2 * hidden
    block = 2 * hidden + 4 * hidden**2 + 4 * hidden + 3 * hidden * wide + 2 * wide + hidden
    return patch + vision["depth"] * block, hidden + _merger(vision)


def _tower_qwen3(vision: dict[str, Any]) -> tuple[int, int]:
    hidden, wide = vision["hidden_size"], vision["intermediate_size"]
    patch = (
        vision.get("in_channels", 3) * vision.get("temporal_patch_size", 2) * vision["patch_size"] ** 2 * hidden + hidden
    )
    places = vision["num_position_embeddings"] * hidden
    block = 4 * hidden + 4 * hidden**2 + 4 * hidden + 2 * hidden * wide + wide + hidden
    merged = hidden * vision.get("spatial_merge_size", 2) ** 2
    deepstack = len(vision.get("deepstack_visual_indexes", ())) * (2 * merged + _merger(vision))
    return patch + places + vision["depth"] * block, 2 * hidden + _merger(vision) + deepstack


def _tower_audio(audio: dict[str, Any]) -> tuple[int, int]:
    hidden, wide, out = audio["d_model"], audio["encoder_ffn_dim"], audio["output_dim"]
    block = 4 * hidden**2 + 3 * hidden + 4 * hidden + 2 * hidden * wide + wide + hidden
    if wide_channels := audio.get("downsample_hidden_size"):  # Qwen3-Omni's: over time and pitch, keys have a bias too
        convolutions = 9 * wide_channels * (1 + 2 * wide_channels) + 3 * wide_channels
        convolutions += wide_channels * halved(audio["num_mel_bins"]) * hidden
        projector = 2 * hidden + hidden * hidden + hidden + hidden * out + out
        return convolutions + audio["encoder_layers"] * (block + hidden), projector
    convolutions = 3 * hidden * (audio["num_mel_bins"] + hidden) + 2 * hidden
    return convolutions + audio["encoder_layers"] * block + 2 * out, 2 * hidden + hidden * out + out


def _merger(vision: dict[str, Any]) -> int:
    merged = vision["hidden_size"] * vision.get("spatial_merge_size", 2) ** 2
    return int(merged * merged + merged + merged * vision["out_hidden_size"] + vision["out_hidden_size"])


def _weight_shapes(folder: Path, unused: Sequence[str]) -> dict[str, list[int]]:
    """Tensors of the model by name, from the headers of the weight files; empty if there are none, or some are missing."""
    files, index = [folder / "model.safetensors"], folder / "model.safetensors.index.json"
    if not files[0].is_file() and index.is_file():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if not all(file.is_file() for file in files):
        return {}
    shapes: dict[str, list[int]] = {}
    for file in files:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > min(file.stat().st_size, LONGEST_HEADER):
                raise ValueError(f"the header of {file.name} is said to be longer than the file, or than any header")
            header = json.loads(opened.read(length))
        shapes |= {name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"}
    return {name.removeprefix("thinker."): shape for name, shape in shapes.items() if not is_unloaded(name, unused)}


def _count_weights(shapes: dict[str, list[int]]) -> dict[str, int]:
    """Parameters by group; empty if there are no weights."""
    counts = dict.fromkeys(PARAMETER_GROUPS, 0) if shapes else {}
    for name, shape in shapes.items():
        counts[_group_of(name)] += _product(shape)
    return counts


def _group_of(name: str) -> str:
    for part, group in PLAIN_PARTS:
        if part in name:
            return group
    if "visual." in name:
        return "projector" if "merger" in name else "vision"
    if name.startswith("audio_tower."):
        return "projector" if name.startswith(("audio_tower.proj", "audio_tower.ln_post.")) else "audio"
    return "head" if "lm_head." in name else "language"


def _product(sizes: list[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def _folder(path: str, revision: str) -> Path | None:
    """The folder of a checkpoint: given, shipped, or in the hub's cache."""
    scheme, _, name = path.partition(":")
    if scheme == "package":
        return ASSETS / name
    if scheme == "tiny":
        return None
    given = Path(path).expanduser()
    return given if given.is_dir() else cached_folder(path, revision)


def cached_folder(hub_id: str, revision: str) -> Path | None:
    """The snapshot of a hub id in the local cache, where there is one: of a revision, of main, or else the newest."""
    base = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", f"{base}/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    folder = cache / f"models--{hub_id.replace('/', '--')}"
    reference = folder / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision
    if commit:
        return folder / "snapshots" / commit
    newest = max(folder.glob("snapshots/*/config.json"), key=lambda file: file.stat().st_mtime, default=None)
    return newest.parent if newest else None

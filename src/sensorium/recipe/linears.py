"""The linear layers of a model, which low-rank adapters can sit on, told without torch from its files or its config."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    found = list(_language(text))
    if not tied:
        found.append(Linear("lm_head", "head", text["hidden_size"], text["vocab_size"]))
    if (vision := config.get("vision_config")) and "out_hidden_size" in vision:
        new, hears = config["model_type"].startswith("qwen3"), "audio_config" in config
        found += _tower(vision, plain=new, fused=new or not hears, named=new and not hears)
    if audio := config.get("audio_config"):
        found += _audio_tower(audio)
    return tuple(found)


def _language(text: dict[str, Any]) -> Iterator[Linear]:
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

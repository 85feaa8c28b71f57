"""The sizes of a model without torch, from the headers of its weight files or from its config.

Both give names and shapes of tensors, which are counted by parameter group and searched for linear layers::

    {"visual.blocks.0.attn.qkv.weight": [192, 64], …}  →  {"vision": 12288, …}, Linear("visual.blocks.0.attn.qkv", …)
"""

import json
import os
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from sensorium.recipe import family_facts
from sensorium.recipe.family_facts import FAMILIES, TEXT, FamilyFacts, Shapes, Sizes, group_by_name, is_unloaded
from sensorium.recipe.registry import PARAMETER_GROUPS, table
from sensorium.recipe.schema import LoraSection, ModelSection
from sensorium.vocabulary.errors import RecipeError


@dataclass(frozen=True)
class Linear:
    """A linear layer: its name in the files (whose prefix may differ from the model's), group and sizes."""

    name: str
    group: str
    inputs: int
    outputs: int


def ends_in(name: str, modules: Sequence[str]) -> bool:
    """Whether a layer's name ends in one of these, by whole words; always True where none are given."""
    return not modules or any(f".{name}".endswith(f".{module}") for module in modules)


def linears_in(shapes: Mapping[str, Sequence[int]], facts: FamilyFacts | None) -> tuple[Linear, ...]:
    """The linear layers among a checkpoint's tensors: tables, and the routers and experts of a mixture, are none."""
    found = []
    for tensor, shape in shapes.items():
        name = tensor.removesuffix(".weight")
        if len(shape) == 2 and name != tensor and not family_facts.is_table(name, facts) and ".experts." not in name:
            found.append(Linear(name, group_by_name(tensor, facts), shape[1], shape[0]))
    return tuple(found)


def linears_by_config(config: dict[str, Any]) -> tuple[Linear, ...]:
    """Linear layers from a config alone, for the families we know."""
    config = config.get("thinker_config", config)
    return linears_in(tensors_by_config(config), facts_of(config))


def facts_of(config: dict[str, Any]) -> FamilyFacts | None:
    """The facts of the family that a config names; None for one that we do not know."""
    return FAMILIES.get(_family(config))


def _family(config: dict[str, Any]) -> str:
    name: str = config.get("model_type", "")
    return name.removesuffix("_thinker")  # an Omni model without the parts that generate speech


def tensors_by_config(config: dict[str, Any]) -> dict[str, list[int]]:
    """The tensors of a whole model by its config; where the head is the embeddings, without it."""
    text = config.get("text_config", config)
    tensors = dict(_language_tensors(text, FAMILIES.get(text.get("model_type", _family(config)).removesuffix("_text"))))
    if not _tied(config):
        tensors["lm_head.weight"] = [text["vocab_size"], text["hidden_size"]]
    return tensors | tower_tensors(config)


def tower_tensors(config: dict[str, Any]) -> dict[str, list[int]]:
    """The tensors of a model's towers and projectors by its config; of a family without facts an estimate of the blocks."""
    facts = facts_of(config)
    if facts is not None:
        return dict(facts.tensors(config)) if facts.tensors else {}
    if not (vision := config.get("vision_config")):
        return {}
    hidden, wide = vision["hidden_size"], vision["intermediate_size"]
    block = {"attn.qkv": [3 * hidden, hidden], "attn.proj": [hidden, hidden], "mlp.down_proj": [hidden, wide]}
    block |= {"mlp.gate_proj": [wide, hidden], "mlp.up_proj": [wide, hidden]}
    return dict(family_facts.affine_layers("visual.blocks", vision["depth"], block))


def _language_tensors(text: dict[str, Any], facts: FamilyFacts | None) -> Shapes:
    """The tensors of a language model with layers as Qwen's or Llama's; its family's facts tell biases, norms, gates."""
    hidden = text["hidden_size"]
    norms = {"input_layernorm.weight": [hidden], "post_attention_layernorm.weight": [hidden]}
    mlp = _mlp_tensors(text)
    if facts and facts.sandwich:
        norms |= {"post_self_attn_layernorm.weight": [hidden], "post_mlp_layernorm.weight": [hidden]}
        wide = text["intermediate_size"]
        mlp = {"mlp.gate_up_proj.weight": [2 * wide, hidden], "mlp.down_proj.weight": [hidden, wide]}
    yield "language_model.embed_tokens.weight", [text["vocab_size"], hidden]
    yield "language_model.norm.weight", [hidden]
    for i, delta in enumerate(delta_layers(text)):
        layer = (_delta_tensors(text) if delta else _attention_tensors(text, facts)) | norms | mlp
        yield from ((f"language_model.layers.{i}.{name}", shape) for name, shape in layer.items())


def delta_layers(text: dict[str, Any]) -> list[bool]:
    """Which layers of a language model are gated delta nets. Without ``layer_types``, every nth is not."""
    count: int = text["num_hidden_layers"]
    if "linear_num_value_heads" not in text:
        return [False] * count
    if named := text.get("layer_types"):
        return [name == "linear_attention" for name in named]
    interval = text.get("full_attention_interval", 4)
    return [bool((i + 1) % interval) for i in range(count)]


def _attention_tensors(text: dict[str, Any], facts: FamilyFacts | None) -> dict[str, list[int]]:
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    head_dim = text.get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, text.get("num_key_value_heads", heads) * head_dim
    outputs = {"q": 2 * queries if facts and facts.query_gate else queries, "k": keys, "v": keys}
    layer = {f"self_attn.{name}_proj.weight": [size, hidden] for name, size in outputs.items()}
    layer |= {"self_attn.o_proj.weight": [hidden, queries]}
    if facts and facts.query_bias:
        layer |= {f"self_attn.{name}_proj.bias": [size] for name, size in outputs.items()}
    if facts and facts.query_norm:
        layer |= {"self_attn.q_norm.weight": [head_dim], "self_attn.k_norm.weight": [head_dim]}
    return layer


def _delta_tensors(text: dict[str, Any]) -> dict[str, list[int]]:
    hidden, heads = text["hidden_size"], text["linear_num_value_heads"]
    values, channels = heads * text["linear_value_head_dim"], _delta_channels(text)
    matrices = {"in_proj_qkv": channels, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    layer = {f"linear_attn.{name}.weight": [size, hidden] for name, size in matrices.items()}
    return layer | {
        "linear_attn.out_proj.weight": [hidden, values],
        "linear_attn.conv1d.weight": [channels, 1, text["linear_conv_kernel_dim"]],
        "linear_attn.norm.weight": [text["linear_value_head_dim"]],
        "linear_attn.A_log": [heads],
        "linear_attn.dt_bias": [heads],
    }


def _delta_channels(text: dict[str, Any]) -> int:
    """Queries, keys and values of a token of a gated delta net."""
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    channels: int = 2 * keys + text["linear_num_value_heads"] * text["linear_value_head_dim"]
    return channels


def _mlp_tensors(text: dict[str, Any]) -> dict[str, list[int]]:
    hidden = text["hidden_size"]
    if not (experts := text.get("num_experts") or text.get("num_local_experts", 0)):
        return _gated_tensors("mlp", hidden, text["intermediate_size"])
    wide = text["moe_intermediate_size"]
    layer = {"mlp.gate.weight": [experts, hidden], "mlp.experts.gate_up_proj": [experts, 2 * wide, hidden],
             "mlp.experts.down_proj": [experts, hidden, wide]}  # fmt: skip
    if shared := text.get("shared_expert_intermediate_size", 0):
        layer |= _gated_tensors("mlp.shared_expert", hidden, shared) | {"mlp.shared_expert_gate.weight": [1, hidden]}
    return layer


def _gated_tensors(at: str, hidden: int, wide: int) -> dict[str, list[int]]:
    return {f"{at}.gate_proj.weight": [wide, hidden], f"{at}.up_proj.weight": [wide, hidden],
            f"{at}.down_proj.weight": [hidden, wide]}  # fmt: skip


def told_by_part(names: Iterable[str], most: int = 4) -> str:
    """Names of weights in few words, by the part they belong to: ``model.layers.2 (12 weights), model.layers.3 (12 …)``."""
    names = list(names)
    if len(names) <= most:
        return ", ".join(sorted(names))
    parts = Counter(part_of(name) for name in sorted(names))
    shown = [f"{part} ({count} {'weight' if count == 1 else 'weights'})" for part, count in parts.items()]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more parts" if len(shown) > most else "")


def part_of(name: str) -> str:
    """``a.layers.2.mlp.up.weight`` → ``a.layers.2``; without a number all but the last word."""
    words = name.split(".")
    numbers = [place for place, word in enumerate(words) if word.isdigit()]
    return ".".join(words[: numbers[0] + 1] if numbers else words[:-1] or words)


MOST_LAYERS = 64


def family_and_layers(name: str) -> tuple[str, int]:
    """The family and the number of its language model's layers that a name such as ``qwen3`` or ``qwen3:4`` means."""
    family, colon, layers = name.partition(":")
    if colon and not (layers.isdecimal() and 1 <= int(layers) <= MOST_LAYERS):
        raise RecipeError(
            f"'tiny:{name}': after the family comes a number of layers, 1 to {MOST_LAYERS}, as in tiny:qwen3:4."
        )
    return family, int(layers) if colon else TEXT["num_hidden_layers"]


def tiny_config(family: str, layers: int = TEXT["num_hidden_layers"]) -> Sizes:
    """The sizes in the config.json of a tiny model."""
    kind = FAMILIES[family]
    text = kind.text | {"vocab_size": kind.rows, "num_hidden_layers": layers}
    name = {"model_type": family, "tie_word_embeddings": True, **kind.more}
    if not kind.has_towers:
        return name | text
    if "model_type" in text:
        towers = {"vision_config": kind.vision, "audio_config": kind.audio}
        return name | {"text_config": text} | {key: dict(sizes) for key, sizes in towers.items() if sizes}
    config = name | {"text_config": text, "vision_config": kind.vision | {"out_hidden_size": text["hidden_size"]}}
    if kind.audio:
        config["audio_config"] = kind.audio | {"output_dim": text["hidden_size"]}
    return config


LONGEST_HEADER = 100_000_000  # bytes, the limit of safetensors itself

ASSETS = Path(__file__).resolve().parents[1] / "assets"


class IncompleteConfig(RecipeError):
    """A config.json that leaves sizes of a model to the defaults of transformers."""


@dataclass(frozen=True)
class DeltaShape:
    """Sizes of the gated delta nets among a language model's layers: how many, and of one of them what a token has.

    ``channels``: its queries, keys and values before the convolution; ``values``: its values. ``state``: numbers of the
    state of a sequence; ``columns``: tokens before the next one that the convolution still needs.
    """

    layers: int
    channels: int
    values: int
    state: int
    columns: int

    def sequence_bytes(self, size: int) -> int:
        """What the nets of all layers know of a sequence, however long it is: a float32 state and a window each."""
        return self.layers * (4 * self.state + size * self.columns * self.channels)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model. ``parameters`` counts them by group; ``exact``: by the weights themselves, not by the config.

    ``linears`` are the layers that low-rank adapters can sit on. ``queries`` is the size of a token's queries, all heads
    together: Qwen3-VL's is up to twice the hidden size. ``positions``: the longest context that the model was made for, in
    tokens; 0 if its config does not say. ``delta``: of a model whose layers are not all attention.
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
    delta: DeltaShape | None = None

    @property
    def attention_layers(self) -> int:
        """Layers that have keys and values."""
        return self.layers - (self.delta.layers if self.delta else 0)

    @property
    def total(self) -> int:
        return sum(self.parameters.values())

    def trainable(self, freeze: tuple[str, ...]) -> int:
        return sum(count for group, count in self.parameters.items() if group not in freeze)

    def adapters(self, lora: LoraSection) -> int:
        """Parameters of the adapters on the linear layers that are chosen."""
        return lora.rank * sum(layer.inputs + layer.outputs for layer in self._adapted(lora))

    def merged(self, lora: LoraSection) -> int:
        """Weights of the layers that compute with their adapters merged, where a GPU samples and trains."""
        layers = self._adapted(lora) if lora.rank and lora.merge else []
        return sum(layer.inputs * layer.outputs for layer in layers if layer.group == "language")

    def _adapted(self, lora: LoraSection) -> list[Linear]:
        return [layer for layer in self.linears if layer.group in lora.groups and ends_in(layer.name, lora.modules)]


def is_ours(path: str) -> bool:
    """Whether a ``model.path`` means a small model that is shipped or made on the spot: its files need no check."""
    return path.partition(":")[0] in ("tiny", "package")


def on_general_path(section: ModelSection) -> bool:
    """Whether a model is computed by the general path: asked for, or of a family without an adapter; False if not known."""
    if section.family != "auto" or is_ours(section.path):
        return section.family == family_facts.GENERAL
    try:
        config = _config(section)
        return bool(config) and _family(config) not in table("family")
    except (ValueError, TypeError, AttributeError, RecursionError):  # refused where it is read
        return False


def stated_architectures(section: ModelSection) -> list[str]:
    """The classes of transformers that a model's config.json names; none if that is not known."""
    try:
        return [str(name) for name in _config(section).get("architectures") or ()]
    except (ValueError, TypeError, AttributeError, RecursionError):
        return []


def _config(section: ModelSection) -> dict[str, Any]:
    """The config.json of a model that is on this disk; else empty."""
    folder = None if is_ours(section.path) else _folder(section.path, section.revision)
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text()) if folder is not None else {}
    except OSError:
        return {}
    return config


def read_shape(
    path: str, revision: str = "", config: dict[str, Any] | None = None, unused: Sequence[str] = ()
) -> ModelShape | None:
    """The shape of the model that a recipe's ``model.path`` means, or None if it is not on this disk.

    ``config`` replaces its config.json, where that leaves keys to the defaults of transformers; ``unused`` are prefixes of
    weights that are not loaded.
    """
    scheme, _, name = path.partition(":")
    if scheme == "tiny":
        family, layers = family_and_layers(name)
        return _shape_of(tiny_config(family, layers), {}, exact=True) if family in FAMILIES else None
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
    """The shape by a config, and by the weights where there are some; ``exact`` if the config is known to be complete."""
    text = config.get("text_config", config)
    heads = text["num_attention_heads"]
    head_dim = text.get("head_dim") or text["hidden_size"] // heads
    experts = text.get("num_experts_per_tok", 0)
    facts = facts_of(config)
    if _tied(config):  # a head that is written out all the same is not loaded
        shapes = {name: shape for name, shape in shapes.items() if group_by_name(name, facts) != "head"}
    counted = _count_weights(shapes, facts)
    vision = config.get("vision_config") or {}
    return ModelShape(
        family=_family(config),
        layers=text["num_hidden_layers"],
        hidden=text["hidden_size"],
        queries=heads * head_dim,
        key_values=text.get("num_key_value_heads", heads) * head_dim,
        mlp=experts * (text.get("moe_intermediate_size") or text["intermediate_size"])
        + text.get("shared_expert_intermediate_size", 0)
        if experts
        else text["intermediate_size"],
        vocabulary=text["vocab_size"],
        parameters=counted or count_parameters(config),
        exact=exact or bool(counted),
        linears=linears_in(shapes, facts) if shapes else linears_by_config(config),
        tower_hidden=vision.get("hidden_size", 0),
        tower_depth=vision.get("depth", 0),
        tower_mlp=vision.get("intermediate_size", 0),
        positions=text.get("max_position_embeddings") or 0,
        delta=_delta_shape(text),
    )


def _delta_shape(text: dict[str, Any]) -> DeltaShape | None:
    if not any(deltas := delta_layers(text)):
        return None
    values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
    state, columns = values * text["linear_key_head_dim"], text["linear_conv_kernel_dim"] - 1
    return DeltaShape(sum(deltas), _delta_channels(text), values, state, columns)


def shape_by_config(config: dict[str, Any]) -> ModelShape:
    """The shape by a config alone, for the families we know."""
    return _shape_of(config, {}, exact=False)


def count_parameters(config: dict[str, Any]) -> dict[str, int]:
    """Parameters by group from a config alone, for the families we know."""
    return _count_weights(tensors_by_config(config), facts_of(config))


def _tied(config: dict[str, Any]) -> bool:
    return bool(config.get("tie_word_embeddings", config.get("text_config", config).get("tie_word_embeddings", False)))


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
                raise ValueError(f"the header of {file.name} claims to be longer than the file, or than any header")
            header = json.loads(opened.read(length))
        shapes |= {name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"}
    return {name.removeprefix("thinker."): shape for name, shape in shapes.items() if not is_unloaded(name, unused)}


def _count_weights(shapes: dict[str, list[int]], facts: FamilyFacts | None) -> dict[str, int]:
    """Parameters by group; empty if there are no weights."""
    counts = dict.fromkeys(PARAMETER_GROUPS, 0) if shapes else {}
    for name, shape in shapes.items():
        counts[group_by_name(name, facts)] += prod(shape)
    return counts


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

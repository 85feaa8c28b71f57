"""What the files of a checkpoint tell without torch: sizes from config.json, parameters from safetensors headers."""

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sensorium.recipe.linears import Linear, ends_in, halved, linears_in, linears_of
from sensorium.recipe.names import PARAMETER_GROUPS
from sensorium.recipe.schema import LoraSection
from sensorium.recipe.tiny_sizes import KINDS, family_and_layers, tiny_config
from sensorium.recipe.tower_tensors import tower_tensors
from sensorium.recipe.unloaded_weights import is_unloaded
from sensorium.vocabulary.errors import RecipeError

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
        "language": table + _language(text, text.get("model_type", config["model_type"])),
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


def _language(text: dict[str, Any], family: str) -> int:
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
    return text["num_hidden_layers"] * (attention + mlp + 2 * hidden) + hidden


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
    return merged * merged + merged + merged * vision["out_hidden_size"] + vision["out_hidden_size"]


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

"""What a checkpoint's small files must be before transformers opens them: files, and sizes that a model can have."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sensorium.vocabulary.errors import ModelError

ADAPTER_CONFIG = "adapter_config.json"
"""Where transformers finds it, it loads the adapters and the base model that it names, without a word."""

MOST = {
    "num_hidden_layers": 10_000, "num_layers": 10_000, "depth": 10_000, "encoder_layers": 10_000,
    "num_experts": 100_000, "num_local_experts": 100_000, "vocab_size": 100_000_000,
}  # fmt: skip
"""Numbers of a config by which modules or tables are made one by one, and what no model comes near to."""

MOST_TOKENS = 10_000_000
"""Token ids and merges of a tokenizer: tables of all ids up to the largest are made, holes included."""

MOST_GROWTH = 1000
"""How many times as long a normalizer or decoder may make a text."""

LEAST = dict.fromkeys(("hidden_size", "num_attention_heads", "num_key_value_heads", "num_heads", "head_dim"), 1)
LEAST |= dict.fromkeys((*MOST, "intermediate_size"), 0)
"""Numbers of a config that say how many there are of something, and the least of it."""


def check_small_files(path: str, folder: Path) -> None:
    """Refuse pipes and devices, which would be waited for, and a config by which building a model would not end."""
    for entry in sorted(folder.iterdir()):
        if entry.exists() and not entry.is_file() and not entry.is_dir():
            raise ModelError(
                f"model.path '{path}': its {entry.name} is a pipe or a device, not a file. Copy or download it again."
            )
    if not (folder / "config.json").is_file():
        raise ModelError(f"model.path '{path}': its config.json is no file that can be read. Copy or download it again.")
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except OSError as error:
        raise ModelError(f"model.path '{path}': cannot read its config.json: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"model.path '{path}': cannot load the checkpoint: its config.json is damaged: it is no whole JSON. "
            "Copy or download it again."
        ) from error
    if not isinstance(config, dict):
        raise ModelError(
            f"model.path '{path}': cannot load the checkpoint: its config.json is damaged: it holds no JSON "
            "object. Copy or download it again."
        )
    for name, value in _numbers(config, ""):
        key = name.rpartition(".")[2]
        if key in LEAST and not LEAST[key] <= value <= MOST.get(key, value):
            raise ModelError(
                f"model.path '{path}': its config.json says {name}: {value}, which no model has. Use the config that "
                "belongs to the weights."
            )
    if (folder / ADAPTER_CONFIG).exists():
        raise ModelError(
            f"model.path '{path}': its {ADAPTER_CONFIG} would have adapters added to the weights, or other weights loaded "
            "in their place. Merge the adapters into the weights (peft's merge_and_unload) and use the folder that this "
            f"saves, or remove {ADAPTER_CONFIG} to train the weights as they are."
        )
    _check_tokenizer(path, folder / "tokenizer.json")


def _check_tokenizer(path: str, file: Path) -> None:
    """Refuse ids by which the tables of a tokenizer would fill all memory: the library ends the process then."""
    try:
        held = json.loads(file.read_bytes())
        vocabulary = held["model"]["vocab"]
        ids = [*(vocabulary.values() if isinstance(vocabulary, dict) else [len(vocabulary)])]
        ids += [token["id"] for token in held.get("added_tokens") or ()]
        largest = max(ids, default=0)
        growth = max(_growth(held.get("normalizer")), _growth(held.get("decoder")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return  # no file, or a damaged one, which is refused where it is read
    if largest > MOST_TOKENS:
        raise ModelError(
            f"model.path '{path}': its tokenizer.json has the token id {largest}, which no model has. Copy or download it "
            "again."
        )
    if growth > MOST_GROWTH:
        raise ModelError(
            f"model.path '{path}': the normalizer or decoder in its tokenizer.json may make texts {growth:.3g} times as "
            f"long, which would fill all memory; no tokenizer needs more than {MOST_GROWTH}. Use the published one."
        )


def _growth(part: Any) -> float:
    """How many times as long the replacements of a normalizer or decoder, one after the other, can make a text."""
    if not isinstance(part, dict):
        return 1.0
    grown = 1.0
    for inner in part.get("normalizers") or part.get("decoders") or ():
        grown *= _growth(inner)
    if part.get("type") == "Replace":
        replaced = part["pattern"].get("String")
        # A regular expression may match nothing at all, between any two characters.
        grown *= max(1.0, len(part["content"]) / len(replaced)) if replaced else 1.0 + len(part["content"])
    if part.get("type") == "Prepend":
        grown *= 1.0 + len(part["prepend"])
    return grown


def _numbers(config: dict[str, Any], above: str) -> Iterator[tuple[str, float]]:
    """The numbers of a config and of the configs inside it, by their dotted names."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{above}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{above}{key}", value

"""Small real checkpoints of every family, made offline: config, safetensors, tokenizer, processor and chat template.

For tests and the demo: the same files, classes and code paths as the published models, at half a million parameters.
"""

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedTokenizerFast

from sensorium.models.tiny_processors import TOKEN_KEYS, tiny_processor
from sensorium.models.tiny_tokenizer import closing_token, tiny_tokenizer
from sensorium.models.weight_files import saving_weights
from sensorium.recipe.tiny_sizes import KINDS, TEXT, Kind, Sizes
from sensorium.vocabulary.errors import ModelError, nearest


def make_tiny(family: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write a random checkpoint of ``family`` into ``folder`` and return it.

    Overrides name keys of the text config (``hidden_size=64``), of the vision or audio config with ``vision_`` or
    ``audio_`` before them (``vision_depth=1``), or ``tie_word_embeddings`` (default True).
    """
    if family not in KINDS:
        raise ModelError(f"there is no tiny model of family '{family}'{nearest(family, list(KINDS))}")
    tokenizer = tiny_tokenizer(family, TEXT["max_position_embeddings"])
    model = _model(family, tokenizer, seed, dict(overrides))
    folder = Path(folder)
    with saving_weights(folder):
        model.save_pretrained(folder)
    owner = tiny_processor(family, tokenizer, model.config) if KINDS[family].vision else tokenizer
    owner.save_pretrained(folder)
    return folder


def _model(family: str, tokenizer: PreTrainedTokenizerFast, seed: int, overrides: dict[str, Any]) -> Any:
    library: Any = import_module("transformers")
    kind = KINDS[family]
    tie = overrides.pop("tie_word_embeddings", True)
    ends = {"eos_token_id": _id(tokenizer, closing_token(family)), "pad_token_id": _id(tokenizer, "<|endoftext|>"),
            "bos_token_id": None}  # fmt: skip
    text = kind.text | {"vocab_size": -(-len(tokenizer) // 64) * 64}
    config_class = getattr(library, f"{kind.prefix}Config")
    if kind.vision:
        config = _config(family, config_class, kind, text | ends, overrides, tokenizer, tie)
        model_class = getattr(library, f"{kind.prefix}ForConditionalGeneration")
    else:
        config = config_class(**_given(family, text, config_class, overrides), **ends, tie_word_embeddings=tie)
        model_class = getattr(library, f"{kind.prefix}ForCausalLM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    model.generation_config.eos_token_id = [ends["eos_token_id"], ends["pad_token_id"]]
    model.generation_config.pad_token_id = ends["pad_token_id"]
    return model


def _config(
    family: str, config_class: Any, kind: Kind, text: Sizes, overrides: Sizes, tokenizer: PreTrainedTokenizerFast, tie: bool
) -> Any:
    """The config of a model with towers; overrides go to the part that their prefix names."""
    parts = {"vision": dict(kind.vision), "audio": dict(kind.audio), "text": text}
    of_part: dict[str, Sizes] = {part: {} for part in parts}
    for key, value in overrides.items():
        part, _, name = key.partition("_")
        mine = part in ("vision", "audio") and bool(parts[part])
        of_part[part if mine else "text"][name if mine else key] = value
    classes = dict(config_class.sub_configs)
    if kind.text_type:
        classes["text_config"] = CONFIG_MAPPING[kind.text_type]
    if "model_type" in kind.vision:
        classes["vision_config"] = CONFIG_MAPPING[kind.vision["model_type"]]
    made = {
        f"{part}_config": _given(family, sizes, classes[f"{part}_config"], of_part[part])
        for part, sizes in parts.items() if sizes
    }  # fmt: skip
    if kind.text_type:
        made["text_config"] |= {"model_type": kind.text_type, "tie_word_embeddings": tie}
    else:
        made["vision_config"]["out_hidden_size"] = made["text_config"]["hidden_size"]
    if kind.audio:
        made["audio_config"]["output_dim"] = made["text_config"]["hidden_size"]
    ids = {key: _id(tokenizer, token) for key, token in TOKEN_KEYS[family].items()}
    return config_class(**made, **kind.more, **ids, tie_word_embeddings=tie)


def _given(family: str, sizes: Sizes, config_class: Any, overrides: Sizes) -> Sizes:
    known = list(inspect.signature(config_class).parameters)
    for key in overrides:
        if key not in known:
            raise ModelError(f"{config_class.__name__} of a tiny {family} has no key '{key}'{nearest(key, known)}")
    return sizes | overrides


def _id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    found = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found

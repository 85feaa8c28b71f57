"""What a checkpoint's small files must be before transformers opens them: files, and sizes that a model can have."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sensorium.models.torchvision_fix  # noqa: F401  (before transformers imports torchvision)
from sensorium.data.decoder import Decoder
from sensorium.data.media_store import MediaStore
from sensorium.models.chat_processor import ChatProcessor
from sensorium.models.checkpoint_path import find_checkpoint, find_weights, has_towers, missing_family, naming, own_config
from sensorium.models.quiet import quiet
from sensorium.models.tiny import take_published_sizes
from sensorium.recipe.family_facts import FAMILIES, FamilyFacts
from sensorium.recipe.names import resolve, table
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


TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model")
DEQUANTIZABLE = "fp8"
"""transformers' name for weights in blocks of FP8 with a scale each, as Qwen's FP8 checkpoints have them."""


@dataclass(frozen=True)
class CheckpointConfig:
    """The config of a checkpoint: ``place`` is its folder, ``adapter_class`` the family that reads it.

    ``dequantize``: its weights are FP8 and are loaded as plain numbers.
    """

    path: str
    place: str
    config: Any
    family: str
    adapter_class: Any
    dequantize: bool = False


def load_chat_processor(
    path: str,
    *,
    store: MediaStore,
    family: str = "auto",
    revision: str = "",
    decoder: Decoder | None = None,
    media_bytes: int = 1 << 29,
) -> ChatProcessor:
    """The chat processor of a checkpoint; ``path`` and the rest as ``load_policy`` takes them."""
    return chat_processor_of(read_config(path, family, revision, weights=False), store, decoder, media_bytes)


def load_stand_in(family: str, store: MediaStore) -> ChatProcessor:
    """The chat processor of a tiny model for a published one of its family, whose files are not here.

    Where the family's facts have ``published_pixels``, media take as many tokens as they do there; text takes more.
    """
    return chat_processor_of(read_config(f"tiny:{family}", weights=False), store, None, 1 << 29, published_sizes=True)


def read_config(
    path: str, family: str = "auto", revision: str = "", *, weights: bool = True, dequantize: bool = False
) -> CheckpointConfig:
    """A checkpoint's config and family; what cannot be trained here is refused. ``weights``: a hub's are fetched too."""
    found = config_at(path, find_checkpoint(path, revision), family, weights=weights, dequantize=dequantize)
    return replace(found, place=find_weights(path, found.place)) if weights else found


def config_at(
    path: str, place: str, family: str = "auto", *, weights: bool = True, dequantize: bool = False
) -> CheckpointConfig:
    """The config and family of a path whose folder was found. ``weights`` are wanted: quantized ones are refused."""
    from transformers import AutoConfig

    check_small_files(path, Path(place))
    with naming(path, place), quiet():
        config = AutoConfig.from_pretrained(place, trust_remote_code=False)
    quantized = _refuse_quantized(path, config, dequantize) if weights else False
    try:
        family = family_of(config.model_type, family, config)
    except ModelError as error:
        raise ModelError(f"model.path '{path}': {error}") from error
    return CheckpointConfig(path, place, config, family, resolve("family", family, "model.family"), quantized)


@contextmanager
def of_its_family(checkpoint: CheckpointConfig) -> Iterator[None]:
    """Turn errors of a family that is given a checkpoint of another one into a paragraph that says so."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ModelError(
            f"model.path '{checkpoint.path}': the checkpoint (model_type '{checkpoint.config.model_type}' in its "
            f"config.json) is not built as those of the family '{checkpoint.family}' are ({type(error).__name__}: "
            f"{error}). Is it the config.json that belongs to the weights and the processor files beside it? model.family: "
            "auto takes the family that the config names."
        ) from error


def chat_processor_of(
    checkpoint: CheckpointConfig,
    store: MediaStore,
    decoder: Decoder | None,
    media_bytes: int,
    *,
    published_sizes: bool = False,
) -> ChatProcessor:
    """The chat processor of a checkpoint whose config was read; a tiny one may take the published sizes of media."""
    from transformers import AutoTokenizer

    place, config = checkpoint.place, checkpoint.config
    if not any((Path(place) / name).is_file() for name in TOKENIZERS):  # transformers would make an empty one
        raise ModelError(
            f"model.path '{checkpoint.path}': the folder has no tokenizer ({', '.join(TOKENIZERS)}). Copy the files that "
            "are published beside the weights."
        )
    with naming(checkpoint.path, place), quiet():
        facts = FAMILIES.get(checkpoint.family)
        processor = _processor(place, config, facts)
        if published_sizes and facts is not None:
            take_published_sizes(facts, processor)
        tokenizer = getattr(processor, "tokenizer", None) or AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        end_ids = _end_ids(place, config, tokenizer)
    try:
        with of_its_family(checkpoint):
            return ChatProcessor(
                checkpoint.family,
                checkpoint.adapter_class.media_format(own_config(config), processor),
                tokenizer,
                processor,
                store,
                vocab_size=config.get_text_config().vocab_size,
                end_ids=end_ids,
                decoder=decoder,
                media_bytes=media_bytes,
            )
    except ModelError as error:
        named = str(error).startswith("model.path")
        raise error if named else ModelError(f"model.path '{checkpoint.path}': {error}") from error


def family_of(model_type: str, wanted: str = "auto", config: Any = None) -> str:
    """The family of a checkpoint by its ``model_type``; an unknown one is refused with what is missing for it."""
    if wanted != "auto":
        return wanted
    model_type = model_type.removesuffix("_thinker")  # Qwen2.5-Omni's, saved without the parts that speak
    if model_type not in table("family"):
        raise ModelError(missing_family(model_type, config))
    return model_type


def _processor(place: str, config: Any, facts: FamilyFacts | None) -> Any:
    if not has_towers(config):
        return None
    from transformers import AutoProcessor

    if facts is not None:
        facts.check_installed()
    processor = AutoProcessor.from_pretrained(place, trust_remote_code=False)
    if not processor.chat_template:  # older checkpoints keep it in tokenizer_config.json alone
        processor.chat_template = processor.tokenizer.chat_template
    return processor


def _end_ids(place: str, config: Any, tokenizer: Any) -> list[int]:
    """What the checkpoint ends a response on: by its generation config, or else its tokenizer."""
    from transformers import GenerationConfig

    if (Path(place) / "generation_config.json").is_file():
        named = GenerationConfig.from_pretrained(place).eos_token_id
    else:
        named = GenerationConfig.from_model_config(getattr(config, "thinker_config", config)).eos_token_id
    if named is None:
        named = tokenizer.eos_token_id
    several = named if isinstance(named, list | tuple) else [named]
    return [token for token in several if token is not None]


def _refuse_quantized(path: str, config: Any, dequantize: bool) -> bool:
    """Quantized weights cannot be trained; FP8 ones can be turned into plain numbers, which is True, if it is asked for."""
    parts = (config, *(vars(config).get(name) for name in ("text_config", "thinker_config")))
    said = next((found for part in parts if (found := getattr(part, "quantization_config", None))), None)
    if said is None:
        return False
    method = said.get("quant_method") if isinstance(said, dict) else getattr(said, "quant_method", None)
    name = str(getattr(method, "value", method) or "method not named")
    if name == DEQUANTIZABLE and dequantize:
        return True
    way_out = (
        " Or set model.dequantize: true: its weights are then loaded as plain numbers of model.dtype and trained, and what "
        "the FP8 weights have lost stays lost."
    )
    raise ModelError(
        f"model.path '{path}': the checkpoint is quantized ({name}), which is not supported. Use the model it was made "
        "from, in float32 or bfloat16 (model.dtype), with model.lora if memory is short."
        f"{way_out if name == DEQUANTIZABLE else ''}"
    )

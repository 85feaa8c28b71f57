"""The small files of a checkpoint: config, tokenizer and processor, checked before transformers opens them."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sensorium.data.decoder import Decoder
from sensorium.data.media_store import MediaStore
from sensorium.models.chat_processor import ChatProcessor
from sensorium.models.checkpoint_path import find_checkpoint, find_weights, has_towers, naming, own_config, quiet
from sensorium.models.general_path import refuse_general
from sensorium.models.tiny import take_published_sizes
from sensorium.recipe.family_facts import FAMILIES, GENERAL
from sensorium.recipe.registry import resolve, table
from sensorium.vocabulary.errors import ModelError, nearest

ADAPTER_CONFIG = "adapter_config.json"  # where it exists, transformers silently loads adapters and their base model
TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model")
DEQUANTIZABLE = "fp8"  # transformers' name for blocks of FP8 weights with a scale each, as in Qwen's FP8 checkpoints

# Bounds on numbers of a config.json that count modules or sizes. No model comes near the upper ones, and building one that
# exceeds them would not end.
MOST = {
    "num_hidden_layers": 10_000, "num_layers": 10_000, "depth": 10_000, "encoder_layers": 10_000,
    "num_experts": 100_000, "num_local_experts": 100_000, "vocab_size": 100_000_000,
}  # fmt: skip
LEAST = dict.fromkeys(("hidden_size", "num_attention_heads", "num_key_value_heads", "num_heads", "head_dim"), 1)
LEAST |= dict.fromkeys((*MOST, "intermediate_size"), 0)
MOST_TOKENS = 10_000_000  # largest token id: tokenizers make tables of all ids up to it
MOST_GROWTH = 1000  # how many times as long a normalizer or decoder may make a text


def check_small_files(path: str, folder: Path) -> None:
    """Refuse pipes and devices, which would block, and configs and tokenizers that would never finish loading."""

    def refused(problem: str) -> ModelError:
        return ModelError(f"model.path '{path}': {problem}")

    for entry in sorted(folder.iterdir()):
        if entry.exists() and not entry.is_file() and not entry.is_dir():
            raise refused(f"its {entry.name} is a pipe or a device, not a file. Copy or download it again.")
    file = folder / "config.json"
    if not file.is_file():
        raise refused("its config.json is no file that can be read. Copy or download it again.")
    damaged = "cannot load the checkpoint: its config.json is damaged: it is not"
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise refused(f"cannot read its config.json: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise refused(f"{damaged} complete JSON. Copy or download it again.") from error
    if not isinstance(config, dict):
        raise refused(f"{damaged} a JSON object. Copy or download it again.")
    for name, value in _numbers(config, ""):
        key = name.rpartition(".")[2]
        if key in LEAST and not LEAST[key] <= value <= MOST.get(key, value):
            raise refused(
                f"its config.json has {name}: {value}, which no model has. Use the config that belongs to the weights."
            )
    if (folder / ADAPTER_CONFIG).exists():
        raise refused(
            f"its {ADAPTER_CONFIG} would add adapters to the weights, or load other weights instead of them. Merge the "
            "adapters into the weights (peft's merge_and_unload) and use the folder that this saves, or remove "
            f"{ADAPTER_CONFIG} to train the weights as they are."
        )
    try:
        tokenizer = json.loads((folder / "tokenizer.json").read_bytes())
        vocabulary = tokenizer["model"]["vocab"]
        ids = [*(vocabulary.values() if isinstance(vocabulary, dict) else [len(vocabulary)])]
        largest = max([*ids, *(token["id"] for token in tokenizer.get("added_tokens") or ())], default=0)
        growth = max(_growth(tokenizer.get("normalizer")), _growth(tokenizer.get("decoder")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return  # no file, or a damaged one, which is refused where it is read
    if largest > MOST_TOKENS:
        raise refused(f"its tokenizer.json has the token id {largest}, which no model has. Copy or download it again.")
    if growth > MOST_GROWTH:
        raise refused(
            f"the normalizer or decoder in its tokenizer.json may make texts {growth:.3g} times as long, which would fill "
            f"all memory; no tokenizer needs more than {MOST_GROWTH}. Use the published one."
        )


def _growth(part: Any) -> float:
    """How many times as long the replacements of a normalizer or decoder, one after the other, can make a text."""
    if not isinstance(part, dict):
        return 1.0
    growth = prod(_growth(inner) for inner in part.get("normalizers") or part.get("decoders") or ())
    if part.get("type") == "Replace":
        replaced = part["pattern"].get("String")
        # A regular expression may match nothing at all, between any two characters.
        growth *= max(1.0, len(part["content"]) / len(replaced)) if replaced else 1.0 + len(part["content"])
    if part.get("type") == "Prepend":
        growth *= 1.0 + len(part["prepend"])
    return growth


def _numbers(config: dict[str, Any], above: str) -> Iterator[tuple[str, float]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{above}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{above}{key}", value


TemplateDefaults = Mapping[str, bool | int | float | str]
NO_DEFAULTS: TemplateDefaults = MappingProxyType({})
# What transformers gives a template itself.
GIVEN_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}


@dataclass(frozen=True)
class CheckpointConfig:
    """A checkpoint's config, its folder ``place`` and its family. ``dequantize``: load its FP8 weights as plain numbers."""

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
    template_defaults: TemplateDefaults = NO_DEFAULTS,
) -> ChatProcessor:
    """The chat processor of a checkpoint; arguments as of ``load_policy``."""
    checkpoint = read_config(path, family, revision, weights=False)
    return chat_processor_of(checkpoint, store, decoder, media_bytes, template_defaults)


def load_stand_in(family: str, store: MediaStore) -> ChatProcessor:
    """The chat processor of a tiny model in place of a published one of its family, whose files are not here.

    Where the family's facts have ``published_pixels``, media take as many tokens as they do there; text takes more.
    """
    return chat_processor_of(read_config(f"tiny:{family}", weights=False), store, None, 1 << 29, published_sizes=True)


def read_config(
    path: str, family: str = "auto", revision: str = "", *, weights: bool = True, dequantize: bool = False
) -> CheckpointConfig:
    """A checkpoint's config and family; what cannot be trained is refused. ``weights``: fetch those of a hub id too."""
    found = config_at(path, find_checkpoint(path, revision), family, weights=weights, dequantize=dequantize)
    return replace(found, place=find_weights(path, found.place)) if weights else found


def config_at(
    path: str, place: str, family: str = "auto", *, weights: bool = True, dequantize: bool = False
) -> CheckpointConfig:
    """The config and family of a path whose folder was found. With ``weights``, quantized ones are refused."""
    from transformers import AutoConfig

    check_small_files(path, Path(place))
    with naming(path, place), quiet():
        config = AutoConfig.from_pretrained(place, trust_remote_code=False)
    quantized = weights and _is_quantized(path, config, dequantize)
    try:
        family = family_of(config.model_type, family, config)
    except ModelError as error:
        raise ModelError(f"model.path '{path}': {error}") from error
    return CheckpointConfig(path, place, config, family, resolve("family", family, "model.family"), quantized)


def _set_defaults(path: str, owner: Any, defaults: TemplateDefaults) -> None:
    """Let a chat template take these values of its variables where its caller gives none.

    The values become a part of the template, so that whatever renders with it agrees: engines in other processes, and
    who loads a checkpoint of the run.
    """
    from jinja2 import Environment, TemplateSyntaxError, meta

    template = owner.chat_template
    if not isinstance(template, str):
        raise ModelError(f"model.path '{path}': it has no single chat template that model.chat_template_kwargs could set.")
    try:
        known = meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template))
    except TemplateSyntaxError:  # of extensions that only transformers has: their names are found in the text
        known = set(re.findall(r"[A-Za-z_]\w*", template))
    written = ""
    for name, value in defaults.items():
        if name not in known or name in GIVEN_VARIABLES:
            raise ModelError(
                f"model.chat_template_kwargs: the chat template of '{path}' has no variable '{name}'"
                f"{nearest(name, sorted(known - GIVEN_VARIABLES))}"
            )
        written += (
            f"{{% if {name} is not defined %}}{{% set {name} = {json.dumps(value, ensure_ascii=False)} %}}{{% endif %}}"
        )
    if not template.startswith(written):  # a run that goes on has them already
        owner.chat_template = written + template


@contextmanager
def of_its_family(checkpoint: CheckpointConfig) -> Iterator[None]:
    """Inside, errors of an adapter that is given a checkpoint of another family become a ModelError."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ModelError(
            f"model.path '{checkpoint.path}': the checkpoint (model_type '{checkpoint.config.model_type}' in its "
            f"config.json) is not built like those of the family '{checkpoint.family}' ({type(error).__name__}: {error}). "
            "Is it the config.json that belongs to the weights and the processor files beside it? model.family: auto takes "
            "the family that the config names."
        ) from error


def chat_processor_of(
    checkpoint: CheckpointConfig,
    store: MediaStore,
    decoder: Decoder | None,
    media_bytes: int,
    template_defaults: TemplateDefaults = NO_DEFAULTS,
    *,
    published_sizes: bool = False,
) -> ChatProcessor:
    """The chat processor of a checkpoint whose config was read; a tiny one may take the published sizes of media."""
    from transformers import AutoProcessor, AutoTokenizer

    path, place, config = checkpoint.path, Path(checkpoint.place), checkpoint.config
    if not any((place / name).is_file() for name in TOKENIZERS):  # transformers would make an empty one
        raise ModelError(
            f"model.path '{path}': the folder has no tokenizer ({', '.join(TOKENIZERS)}). Copy the files that are "
            "published beside the weights."
        )
    facts, processor = FAMILIES.get(checkpoint.family), None
    with naming(path, checkpoint.place), quiet():
        if has_towers(config):
            if facts is not None:
                facts.check_installed()
            processor = AutoProcessor.from_pretrained(place, trust_remote_code=False)
            if not processor.chat_template:  # older checkpoints have it in tokenizer_config.json alone
                processor.chat_template = processor.tokenizer.chat_template
        if published_sizes and facts is not None:
            take_published_sizes(facts, processor)
        tokenizer = getattr(processor, "tokenizer", None) or AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        end_ids = _end_ids(place, config, tokenizer)
    if template_defaults:
        _set_defaults(path, processor or tokenizer, template_defaults)
    try:
        with of_its_family(checkpoint):
            media_format = checkpoint.adapter_class.media_format(own_config(config), processor)
            vocab_size = config.get_text_config().vocab_size
            return ChatProcessor(
                checkpoint.family, media_format, tokenizer, processor, store,
                vocab_size=vocab_size, end_ids=end_ids, decoder=decoder, media_bytes=media_bytes,
            )  # fmt: skip
    except ModelError as error:
        named = str(error).startswith("model.path")
        raise error if named else ModelError(f"model.path '{path}': {error}") from error


def family_of(model_type: str, wanted: str = "auto", config: Any = None) -> str:
    """The family of a checkpoint by its ``model_type``: ``general`` for those that have none of their own."""
    if wanted == "auto":
        wanted = model_type.removesuffix("_thinker")  # Qwen2.5-Omni saved without its speaking parts
        wanted = wanted if wanted in table("family") else GENERAL
    if wanted == GENERAL and config is not None:
        refuse_general(own_config(config))
    return wanted


def _end_ids(folder: Path, config: Any, tokenizer: Any) -> list[int]:
    """The tokens that end a response, by the checkpoint's generation config, or else its tokenizer."""
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        named = GenerationConfig.from_pretrained(folder).eos_token_id
    else:
        named = GenerationConfig.from_model_config(getattr(config, "thinker_config", config)).eos_token_id
    if named is None:
        named = tokenizer.eos_token_id
    several = named if isinstance(named, list | tuple) else [named]
    return [token for token in several if token is not None]


def _is_quantized(path: str, config: Any, dequantize: bool) -> bool:
    """Whether weights are FP8 that ``dequantize`` allows to load as plain numbers; other quantized ones are refused."""
    parts = (config, *(vars(config).get(name) for name in ("text_config", "thinker_config")))
    settings = next((found for part in parts if (found := getattr(part, "quantization_config", None))), None)
    if settings is None:
        return False
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    name = str(getattr(method, "value", method) or "method not named")
    if name == DEQUANTIZABLE and dequantize:
        return True
    alternative = (
        " Or set model.dequantize: true: its weights are then loaded as plain numbers of model.dtype and trained; the "
        "precision that FP8 lost stays lost."
    )
    raise ModelError(
        f"model.path '{path}': the checkpoint is quantized ({name}), which is not supported. Use the model it was made "
        "from, in float32 or bfloat16 (model.dtype), with model.lora if memory is short."
        f"{alternative if name == DEQUANTIZABLE else ''}"
    )

"""From a checkpoint's small files (configs, tokenizer, template) to its chat processor; no weight file is opened."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sensorium.models.torchvision_fix  # noqa: F401  (before transformers imports torchvision)
from sensorium.media.decoder import Decoder
from sensorium.media.store import MediaStore
from sensorium.models.chat_processor import ChatProcessor
from sensorium.models.checkpoint_place import find_checkpoint, find_weights, naming
from sensorium.models.model_classes import has_towers, own_config
from sensorium.models.number_words import require_number_words
from sensorium.models.quiet import quiet
from sensorium.models.small_files import check_small_files
from sensorium.models.tiny_processors import PUBLISHED_PIXELS, take_published_sizes
from sensorium.models.unsupported import missing_family
from sensorium.recipe.names import resolve, table
from sensorium.vocabulary.errors import ModelError

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

    Where the family is in ``PUBLISHED_PIXELS``, media take as many tokens as they do there; text takes more.
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
        processor = _processor(place, config)
        if published_sizes and checkpoint.family in PUBLISHED_PIXELS:
            take_published_sizes(checkpoint.family, processor)
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


def _processor(place: str, config: Any) -> Any:
    if not has_towers(config):
        return None
    from transformers import AutoProcessor

    if config.model_type == "smolvlm":
        require_number_words()
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

"""From a checkpoint's small files (configs, tokenizer, template) to its chat processor; no weight file is opened."""

from dataclasses import dataclass
from typing import Any

import sensorium.models.torchvision_fix  # noqa: F401  (before transformers imports torchvision)
from sensorium.media.decoder import Decoder
from sensorium.media.store import MediaStore
from sensorium.models.chat_processor import ChatProcessor
from sensorium.models.checkpoint_place import find_checkpoint, naming
from sensorium.models.model_classes import has_towers, own_config
from sensorium.models.quiet import quiet
from sensorium.recipe.names import resolve, table
from sensorium.vocabulary.errors import ModelError, nearest


@dataclass(frozen=True)
class CheckpointConfig:
    """The config of a checkpoint: ``place`` is its folder or hub id, ``adapter_class`` the family that reads it."""

    path: str
    place: str
    config: Any
    family: str
    adapter_class: Any


def load_chat_processor(
    path: str,
    *,
    store: MediaStore,
    family: str = "auto",
    decoder: Decoder | None = None,
    media_bytes: int = 1 << 29,
) -> ChatProcessor:
    """The chat processor of a checkpoint; ``path`` and the rest as ``load_policy`` takes them."""
    return chat_processor_of(read_config(path, family), store, decoder, media_bytes)


def read_config(path: str, family: str = "auto") -> CheckpointConfig:
    """A checkpoint's config and family; what cannot be trained here is refused."""
    from transformers import AutoConfig

    place = find_checkpoint(path)
    with naming(path, place):
        config = AutoConfig.from_pretrained(place, trust_remote_code=False)
    _refuse_quantized(path, config)
    family = family_of(config.model_type, family)
    return CheckpointConfig(path, place, config, family, resolve("family", family, "model.family"))


def chat_processor_of(
    checkpoint: CheckpointConfig, store: MediaStore, decoder: Decoder | None, media_bytes: int
) -> ChatProcessor:
    """The chat processor of a checkpoint whose config was read."""
    from transformers import AutoTokenizer

    place, config = checkpoint.place, checkpoint.config
    with naming(checkpoint.path, place), quiet():
        processor = _processor(place, config)
        tokenizer = getattr(processor, "tokenizer", None) or AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        end_ids = _end_ids(place, config, tokenizer)
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


def family_of(model_type: str, wanted: str = "auto") -> str:
    """The family of a checkpoint by its ``model_type``; an unknown one is refused with the nearest name."""
    if wanted != "auto":
        return wanted
    model_type = model_type.removesuffix("_thinker")  # Qwen2.5-Omni's, saved without the parts that speak
    if model_type not in table("family"):
        raise ModelError(f"no adapter for model type '{model_type}'{nearest(model_type, list(table('family')))}")
    return model_type


def _processor(place: str, config: Any) -> Any:
    if not has_towers(config):
        return None
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(place, trust_remote_code=False)
    if not processor.chat_template:  # older checkpoints keep it in tokenizer_config.json alone
        processor.chat_template = processor.tokenizer.chat_template
    return processor


def _end_ids(place: str, config: Any, tokenizer: Any) -> list[int]:
    """What the checkpoint ends a response on: by its generation config, or else its tokenizer."""
    from transformers import GenerationConfig

    try:
        named = GenerationConfig.from_pretrained(place).eos_token_id
    except OSError:  # it has no generation_config.json
        named = GenerationConfig.from_model_config(getattr(config, "thinker_config", config)).eos_token_id
    if named is None:
        named = tokenizer.eos_token_id
    several = named if isinstance(named, list | tuple) else [named]
    return [token for token in several if token is not None]


def _refuse_quantized(path: str, config: Any) -> None:
    """Quantized weights cannot be trained here, and transformers needs other packages to read them."""
    for part in (config, *(vars(config).get(name) for name in ("text_config", "thinker_config"))):
        said = getattr(part, "quantization_config", None)
        if said:
            method = said.get("quant_method") if isinstance(said, dict) else getattr(said, "quant_method", None)
            name = getattr(method, "value", method) or "method not named"
            raise ModelError(
                f"model.path '{path}': the checkpoint is quantized ({name}), "
                "which is not supported. Use the model it was made from, in float32 or bfloat16 (model.dtype), with "
                "model.lora if memory is short."
            )

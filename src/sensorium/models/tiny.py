"""Small real checkpoints of every family, made offline: config, safetensors, tokenizer, processor and chat template.

For tests and the demo: the same files, classes and code paths as the published models, at half a million parameters.
"""

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from sensorium.models.tiny_tokenizer import TEMPLATES, tiny_tokenizer
from sensorium.recipe.tiny_sizes import KINDS, TEXT, Kind, Sizes
from sensorium.vocabulary.errors import ModelError, nearest

# The least and the most pixels of a picture, and of a frame.
MIN_PIXELS, MAX_PIXELS, MAX_FRAME_PIXELS = 28 * 28, 1024 * 28 * 28, 256 * 28 * 28


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
    model.save_pretrained(folder)
    owner = _processor(family, tokenizer, model.config) if KINDS[family].vision else tokenizer
    owner.save_pretrained(folder)
    return folder


def _model(family: str, tokenizer: PreTrainedTokenizerFast, seed: int, overrides: dict[str, Any]) -> Any:
    library: Any = import_module("transformers")
    kind = KINDS[family]
    tie = overrides.pop("tie_word_embeddings", True)
    ends = {"eos_token_id": _id(tokenizer, "<|im_end|>"), "pad_token_id": _id(tokenizer, "<|endoftext|>"),
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
    classes = config_class.sub_configs
    made = {
        f"{part}_config": _given(family, sizes, classes[f"{part}_config"], of_part[part])
        for part, sizes in parts.items() if sizes
    }  # fmt: skip
    made["vision_config"]["out_hidden_size"] = made["text_config"]["hidden_size"]
    if kind.audio:
        made["audio_config"]["output_dim"] = made["text_config"]["hidden_size"]
    return config_class(**made, **_token_ids(family, tokenizer), tie_word_embeddings=tie)


def _given(family: str, sizes: Sizes, config_class: Any, overrides: Sizes) -> Sizes:
    known = list(inspect.signature(config_class).parameters)
    for key in overrides:
        if key not in known:
            raise ModelError(f"{config_class.__name__} of a tiny {family} has no key '{key}'{nearest(key, known)}")
    return sizes | overrides


def _token_ids(family: str, tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    names = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
    edges = {"vision_start_token_id": "vision_start", "vision_end_token_id": "vision_end"}
    if family == "qwen2_5_omni":
        names = {"image_token_index": "IMAGE", "video_token_index": "VIDEO", "audio_token_index": "AUDIO"}
        edges = {
            "vision_start_token_id": "vision_bos", "vision_end_token_id": "vision_eos",
            "audio_start_token_id": "audio_bos", "audio_end_token_id": "audio_eos",
        }  # fmt: skip
    return {key: _id(tokenizer, f"<|{name}|>") for key, name in (names | edges).items()}


def _id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    found = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found


def _processor(family: str, tokenizer: PreTrainedTokenizerFast, config: Any) -> Any:
    import sensorium.models.torchvision_fix  # noqa: F401  (before the image processors import torchvision)

    library: Any = import_module("transformers")
    new = family.startswith("qwen3")
    look: Sizes = {"patch_size": config.vision_config.patch_size}
    if new:
        look |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    # Qwen3-VL's video processor counts the pixels of the whole clip, the others those of a frame.
    frames = 16 if new else 1
    clip = {"shortest_edge": MIN_PIXELS, "longest_edge": frames * MAX_FRAME_PIXELS}
    video_class = library.Qwen3VLVideoProcessor if new else library.Qwen2VLVideoProcessor
    parts: dict[str, Any] = {
        "image_processor": library.Qwen2VLImageProcessor(
            size={"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}, **look
        ),
        "video_processor": video_class(size=clip, cap_pixels_per_frame=False, **look),
        "tokenizer": tokenizer,
        "chat_template": TEMPLATES[family],
    }
    if family == "qwen2_5_omni":
        mels = config.audio_config.num_mel_bins
        parts["feature_extractor"] = library.WhisperFeatureExtractor(feature_size=mels, return_attention_mask=True)
        return library.Qwen2_5OmniProcessor(**parts)
    return (library.Qwen3VLProcessor if new else library.Qwen2_5_VLProcessor)(**parts)

"""Small real checkpoints of every family, made offline: config, safetensors, tokenizer, processor and chat template.

For tests and the demo: the same files, classes and code paths as the published models, at half a million parameters.
"""

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sensorium.vocabulary.errors import ModelError, nearest

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip

# Answers stand alone, words of a question follow a space: each becomes one token.
ANSWERS = (
    "red green blue yellow purple orange white black circle square triangle cross ring star diamond none "
    "left right up down top bottom middle yes no system user assistant Answer What Which How Where"
)
QUESTIONS = (
    "briefly what where which how many is are the in of to a colour shape shapes picture map move "
    "red green blue yellow circle square triangle cross none left right up down top bottom goal hole"
)
# Added tokens, as <think> is one of Qwen3's: `<answer>red</answer>` is three tokens.
TAGS = ("<answer>", "</answer>", "<think>", "</think>", "<action>", "</action>")
# Qwen's own way of cutting text into pieces.
PIECES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SYSTEM_PROMPT = "Answer briefly."

TURN = (
    "<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for block in message.content %}"
    "{% if block.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif block.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif block.type == 'text' %}{{ block.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
)
# Qwen3's own way: thoughts of assistant turns before the last question are not shown again.
THOUGHTLESS_TURN = (
    "{% set roles = messages | map(attribute='role') | list %}"
    "{% set last = roles[::-1].index('user') if 'user' in roles else 0 %}"
    "{% for message in messages %}{% set content = message.content if message.content is string else "
    "message.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join %}"
    "{% if message.role == 'assistant' and loop.revindex0 > last and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ content }}<|im_end|>\n{% endfor %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\n" + SYSTEM_PROMPT + "<|im_end|>\n{% endif %}"
)  # fmt: skip
GENERATION = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
EACH_TURN = "{% for message in messages %}" + TURN + "{% endfor %}"
TEMPLATES = {
    "qwen2_5_vl": DEFAULT_SYSTEM + EACH_TURN + GENERATION,
    "qwen3_vl": EACH_TURN + GENERATION,
    "qwen2": DEFAULT_SYSTEM + EACH_TURN + GENERATION,
    "qwen3": THOUGHTLESS_TURN + GENERATION,
}

# head_dim 32 is the smallest that vLLM's attention takes.
TEXT: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "initializer_range": 0.05,
}  # fmt: skip
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "initializer_range": 0.05,
}
SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (
        TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}},
        VISION | {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": (
        TEXT
        | {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5],
                                               "mrope_interleaved": True}},
        VISION | {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    ),
    "qwen2": (TEXT, {}),
    "qwen3": (TEXT | {"head_dim": 32}, {}),
}  # fmt: skip
MIN_PIXELS, MAX_PIXELS = 28 * 28, 1024 * 28 * 28


def tiny_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with Qwen's special tokens, trained on the words of the shipped tasks."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.normalizer = normalizers.NFC()
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512 - len(TAGS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(_corpus(), trainer)
    core.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[token for token in SPECIAL_TOKENS if token not in ("<|im_end|>", "<|endoftext|>")],
        chat_template=TEMPLATES[family],
        clean_up_tokenization_spaces=False,
        model_max_length=TEXT["max_position_embeddings"],
    )


def make_tiny(family: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write a random checkpoint of ``family`` into ``folder`` and return it.

    Overrides name keys of the text config (``hidden_size=64``), of the vision config with ``vision_`` before them
    (``vision_depth=1``), or ``tie_word_embeddings`` (default True).
    """
    if family not in SIZES:
        raise ModelError(f"there is no tiny model of family '{family}'{nearest(family, list(SIZES))}")
    tokenizer = tiny_tokenizer(family)
    model = _model(family, tokenizer, seed, overrides)
    folder = Path(folder)
    model.save_pretrained(folder)
    if SIZES[family][1]:
        _processor(family, tokenizer, model.config.vision_config.patch_size).save_pretrained(folder)
    else:
        tokenizer.save_pretrained(folder)
    return folder


def _corpus() -> list[str]:
    """Every word often enough to become one token."""
    return [*ANSWERS.split() * 8, *(f" {word}" for word in QUESTIONS.split() * 8)]


def _model(family: str, tokenizer: PreTrainedTokenizerFast, seed: int, overrides: dict[str, Any]) -> Any:
    import transformers

    text, vision = (dict(part) for part in SIZES[family])
    tie = overrides.pop("tie_word_embeddings", True)
    names = ("endoftext", "im_end", "image_pad", "video_pad", "vision_start", "vision_end")
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in names}
    text["vocab_size"] = -(-len(tokenizer) // 64) * 64
    ends = {"eos_token_id": ids["im_end"], "pad_token_id": ids["endoftext"], "bos_token_id": None}
    if vision:
        name = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
        config_class = getattr(transformers, f"{name}Config")
        parts = config_class.sub_configs
        _override(family, text, parts["text_config"], {k: v for k, v in overrides.items() if not k.startswith("vision_")})
        _override(family, vision, parts["vision_config"],
                  {k.removeprefix("vision_"): v for k, v in overrides.items() if k.startswith("vision_")})  # fmt: skip
        vision["out_hidden_size"] = text["hidden_size"]
        config = config_class(
            text_config=text | ends,
            vision_config=vision,
            image_token_id=ids["image_pad"],
            video_token_id=ids["video_pad"],
            vision_start_token_id=ids["vision_start"],
            vision_end_token_id=ids["vision_end"],
            tie_word_embeddings=tie,
        )
        model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    else:
        name = family.capitalize()
        config_class = getattr(transformers, f"{name}Config")
        _override(family, text, config_class, overrides)
        config = config_class(**text, **ends, tie_word_embeddings=tie)
        model_class = getattr(transformers, f"{name}ForCausalLM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    model.generation_config.eos_token_id = [ids["im_end"], ids["endoftext"]]
    model.generation_config.pad_token_id = ids["endoftext"]
    return model


def _override(family: str, sizes: dict[str, Any], config_class: Any, overrides: dict[str, Any]) -> None:
    known = list(inspect.signature(config_class).parameters)
    for key, value in overrides.items():
        if key not in known:
            raise ModelError(f"{config_class.__name__} of a tiny {family} has no key '{key}'{nearest(key, known)}")
        sizes[key] = value


def _processor(family: str, tokenizer: PreTrainedTokenizerFast, patch_size: int) -> Any:
    import sensorium.models.torchvision_fix  # noqa: F401  (before the image processors import torchvision)

    library: Any = import_module("transformers")
    video_name, processor_name, normalise = {
        "qwen2_5_vl": ("Qwen2VLVideoProcessor", "Qwen2_5_VLProcessor", {}),
        "qwen3_vl": ("Qwen3VLVideoProcessor", "Qwen3VLProcessor", {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}),
    }[family]
    pixels = {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
    return getattr(library, processor_name)(
        image_processor=library.Qwen2VLImageProcessor(patch_size=patch_size, size=pixels, **normalise),
        video_processor=getattr(library, video_name)(patch_size=patch_size),
        tokenizer=tokenizer,
        chat_template=TEMPLATES[family],
    )

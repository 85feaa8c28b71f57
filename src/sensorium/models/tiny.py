"""The tokenizers and chat templates of the tiny checkpoints: byte-level BPE with each family's own special tokens."""

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import CONFIG_MAPPING, PreTrainedTokenizerFast

from sensorium.models.families.smolvlm import require_number_words
from sensorium.models.weight_files import saving_weights
from sensorium.recipe.shape import KINDS, TEXT, Kind, Sizes
from sensorium.vocabulary.errors import ModelError, nearest

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
# Those of other families, by the names under which their processors ask the tokenizer for them.
OMNI_TOKENS = {
    "vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>", "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>",
    "audio_token": "<|AUDIO|>",
}  # fmt: skip
OMNI3_TOKENS = {
    "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>", "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>", "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>",
    "audio_token": "<|audio_pad|>",
}  # fmt: skip
INTERNVL_TOKENS = {
    "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}  # fmt: skip
SMOLVLM_TOKENS = {
    "end_of_utterance_token": "<end_of_utterance>", "fake_image_token": "<fake_token_around_image>",
    "image_token": "<image>", "global_image_token": "<global-img>",
}  # fmt: skip
TILE_TOKENS = {"smolvlm": tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))}
CLOSING = {"smolvlm": "<end_of_utterance>"}
"""What ends an assistant's turn where it is not ``<|im_end|>``."""
LLAVA_TOKENS = {"image_token": "<image>", "video_token": "<video>"}
OWN_TOKENS = {
    "llava_onevision": LLAVA_TOKENS,
    "smolvlm": SMOLVLM_TOKENS,
    "qwen2_5_omni": OMNI_TOKENS,
    "qwen3_omni_moe": OMNI3_TOKENS,
    "internvl": INTERNVL_TOKENS,
}

# Answers stand alone, words of a question follow a space: each becomes one token.
ANSWERS = (
    "red green blue yellow purple orange white black circle square triangle cross ring star diamond none "
    "left right up down top bottom middle yes no system user assistant Answer What Which How Where"
)
QUESTIONS = (
    "briefly what where which how many is are the in of to a colour shape shapes picture map move "
    "red green blue yellow circle square triangle cross none left right up down top bottom goal hole"
)
# What a family is told besides: the times of a video's frames, the words for sounds.
MORE_QUESTIONS = {
    "qwen2_5_omni": "video sound hear see tone high low loud soft",
    "qwen3_omni_moe": "video sound hear see tone high low loud soft",
    "qwen3_vl": "seconds",
    "qwen3_vl_moe": "seconds",
    "internvl": "Frame",
    "smolvlm": "User Assistant You provided following series frames from video Frame",
}
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
OMNI_TURN = (
    "<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for block in message.content %}"
    "{% if block.type == 'image' %}<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% elif block.type == 'video' %}<|vision_bos|><|VIDEO|><|vision_eos|>"
    "{% elif block.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif block.type == 'text' %}{{ block.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
)
OMNI3_TURN = TURN.replace(
    "{% elif block.type == 'text' %}",
    "{% elif block.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>{% elif block.type == 'text' %}",
)
SMOLVLM_TURN = (
    "{{ message.role | capitalize }}{% if message.content[0].type == 'image' %}:{% else %}{{ ': ' }}{% endif %}"
    "{% for block in message.content %}{% if block.type == 'text' %}{{ block.text }}{% elif block.type == 'image' %}<image>"
    "{% elif block.type == 'video' %}<video>{% endif %}{% endfor %}<end_of_utterance>\n"
)
INTERNVL_TURN = (
    "<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for block in message.content %}"
    "{% if block.type == 'image' %}<IMG_CONTEXT>{{ '\n' }}{% elif block.type == 'video' %}<video>{{ '\n' }}"
    "{% elif block.type == 'text' %}{{ block.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
)
LLAVA_TURN = INTERNVL_TURN.replace("<IMG_CONTEXT>", "<image>")
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
    "internvl": "{% for message in messages %}" + INTERNVL_TURN + "{% endfor %}" + GENERATION,
    "llava_onevision": "{% for message in messages %}" + LLAVA_TURN + "{% endfor %}" + GENERATION,
    "smolvlm": "<|im_start|>{% for message in messages %}" + SMOLVLM_TURN + "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}",
    "qwen2_5_omni": DEFAULT_SYSTEM + "{% for message in messages %}" + OMNI_TURN + "{% endfor %}" + GENERATION,
    "qwen3_omni_moe": "{% for message in messages %}" + OMNI3_TURN + "{% endfor %}" + GENERATION,
    "qwen2_5_vl": DEFAULT_SYSTEM + EACH_TURN + GENERATION,
    "qwen3_vl": EACH_TURN + GENERATION,
    "qwen3_vl_moe": EACH_TURN + GENERATION,
    "qwen2": DEFAULT_SYSTEM + EACH_TURN + GENERATION,
    "qwen3": THOUGHTLESS_TURN + GENERATION,
}


def tiny_tokenizer(family: str, longest: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the family's special tokens, trained on the words of the shipped tasks."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.normalizer = normalizers.NFC()
    core.decoder = decoders.ByteLevel()
    specials = special_tokens(family)
    trainer = trainers.BpeTrainer(
        vocab_size=512 - len(TAGS),
        special_tokens=list(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(_corpus(family), trainer)
    core.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    others = [token for token in specials if token not in (closing_token(family), "<|endoftext|>")]
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=closing_token(family),
        pad_token="<|endoftext|>",
        extra_special_tokens=others,
        **({"model_specific_special_tokens": dict(OWN_TOKENS[family])} if family in OWN_TOKENS else {}),
        chat_template=TEMPLATES[family],
        clean_up_tokenization_spaces=False,
        model_max_length=longest,
    )


def special_tokens(family: str) -> tuple[str, ...]:
    """The special tokens of a family, in the order of their ids."""
    if family not in OWN_TOKENS:
        return SPECIAL_TOKENS
    return (*SPECIAL_TOKENS[:3], *OWN_TOKENS[family].values(), *TILE_TOKENS.get(family, ()))


def closing_token(family: str) -> str:
    """What ends an assistant's turn."""
    return CLOSING.get(family, "<|im_end|>")


def _corpus(family: str) -> list[str]:
    """Every word often enough to become one token."""
    questions = f"{QUESTIONS} {MORE_QUESTIONS.get(family, '')}"
    return [*ANSWERS.split() * 8, *(f" {word}" for word in questions.split() * 8)]


# The least and the most pixels of a picture, and of a frame.
MIN_PIXELS, MAX_PIXELS, MAX_FRAME_PIXELS = 28 * 28, 1024 * 28 * 28, 256 * 28 * 28
MAX_TILES = 6
QWEN_KEYS = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}  # fmt: skip
OMNI_KEYS = {
    "image_token_index": "<|IMAGE|>", "video_token_index": "<|VIDEO|>", "audio_token_index": "<|AUDIO|>",
    "vision_start_token_id": "<|vision_bos|>", "vision_end_token_id": "<|vision_eos|>",
    "audio_start_token_id": "<|audio_bos|>", "audio_end_token_id": "<|audio_eos|>",
}  # fmt: skip
OMNI3_KEYS = QWEN_KEYS | {
    "audio_token_id": "<|audio_pad|>", "audio_start_token_id": "<|audio_start|>", "audio_end_token_id": "<|audio_end|>",
}  # fmt: skip
TOKEN_KEYS = {
    "qwen2_5_vl": QWEN_KEYS,
    "qwen3_vl": QWEN_KEYS,
    "qwen3_vl_moe": QWEN_KEYS,
    "qwen2_5_omni": OMNI_KEYS,
    "qwen3_omni_moe": OMNI3_KEYS,
    "internvl": {"image_token_id": "<IMG_CONTEXT>"},
    "smolvlm": {"image_token_id": "<image>"},
    "llava_onevision": {"image_token_index": "<image>", "video_token_index": "<video>"},
}
"""The keys by which the config of a family names its special tokens."""


PUBLISHED_PIXELS = {
    "qwen2_5_vl": ((3136, 12845056), (3136, 12845056)),
    "qwen3_vl": ((65536, 16777216), (4096, 25165824)),
    "qwen3_vl_moe": ((65536, 16777216), (4096, 25165824)),
    "qwen2_5_omni": ((3136, 12845056), (100352, 602112)),
    "qwen3_omni_moe": ((3136, 12845056), (100352, 786432)),
}
"""The least and most pixels of a picture, and of a frame (Qwen3-VL: a clip), of the families' published checkpoints."""
PUBLISHED_SOUND_S = 300
"""Seconds that the published checkpoint of Qwen2.5-Omni hears at most."""


def take_published_sizes(family: str, processor: Any) -> None:
    """Let a tiny checkpoint's processor take media as large and as long as the family's published checkpoints do."""
    for part, (least, most) in zip(("image_processor", "video_processor"), PUBLISHED_PIXELS[family], strict=True):
        getattr(processor, part).size = {"shortest_edge": least, "longest_edge": most}
    if family == "qwen2_5_omni":
        extractor = processor.feature_extractor
        extractor.chunk_length, extractor.n_samples = PUBLISHED_SOUND_S, PUBLISHED_SOUND_S * extractor.sampling_rate


def tiny_processor(family: str, tokenizer: PreTrainedTokenizerFast, config: Any) -> Any:
    """The processor of a tiny checkpoint with towers."""
    import sensorium.models.torchvision_fix  # noqa: F401  (before the image processors import torchvision)

    library: Any = import_module("transformers")
    given = {"tokenizer": tokenizer, "chat_template": TEMPLATES[family]}
    if family == "internvl":
        return _tiled(library, given, config)
    if family == "llava_onevision":
        return _grids_of_tiles(library, given, config)
    if family == "smolvlm":
        return _rows_of_tiles(library, given, config)
    return _qwen(family, library, given, config)


def _tiled(library: Any, given: dict[str, Any], config: Any) -> Any:
    """InternVL's: pictures of several tiles, frames of one."""
    side, patch = config.vision_config.image_size[0], config.vision_config.patch_size[0]
    size = {"height": side, "width": side}
    return library.InternVLProcessor(
        image_processor=library.GotOcr2ImageProcessor(size=size, max_patches=MAX_TILES),
        video_processor=library.InternVLVideoProcessor(size=size),
        image_seq_length=int(side // patch * config.downsample_ratio) ** 2,
        **given,
    )


def _grids_of_tiles(library: Any, given: dict[str, Any], config: Any) -> Any:
    """LLaVA-OneVision's: grids of up to four tiles."""
    side, patch = config.vision_config.image_size, config.vision_config.patch_size
    size, grids = {"height": side, "width": side}, config.image_grid_pinpoints
    return library.LlavaOnevisionProcessor(
        image_processor=library.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=grids),
        video_processor=library.LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=(side // patch) ** 2,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        **given,
    )


def _rows_of_tiles(library: Any, given: dict[str, Any], config: Any) -> Any:
    """SmolVLM2's: two tiles on the longer side."""
    require_number_words()
    vision = config.vision_config
    sizes = {"size": {"longest_edge": 2 * vision.image_size}, "max_image_size": {"longest_edge": vision.image_size}}
    return library.SmolVLMProcessor(
        image_processor=library.SmolVLMImageProcessor(**sizes),
        video_processor=library.SmolVLMVideoProcessor(**sizes),
        image_seq_len=(vision.image_size // vision.patch_size // config.scale_factor) ** 2,
        **given,
    )


def _qwen(family: str, library: Any, given: dict[str, Any], config: Any) -> Any:
    """Pictures and frames of any size, in patches."""
    new = family.startswith("qwen3")
    look: Sizes = {"patch_size": config.vision_config.patch_size}
    if new:
        look |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    # Qwen3-VL's video processor counts the pixels of the whole clip, the others those of a frame.
    whole = family.startswith("qwen3_vl")
    clip = {"shortest_edge": MIN_PIXELS, "longest_edge": (16 if whole else 1) * MAX_FRAME_PIXELS}
    video_class = library.Qwen3VLVideoProcessor if whole else library.Qwen2VLVideoProcessor
    picture = {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
    given |= {
        "image_processor": library.Qwen2VLImageProcessor(size=picture, **look),
        "video_processor": video_class(size=clip, cap_pixels_per_frame=False, **look),
    }
    if "omni" in family:
        mels = config.audio_config.num_mel_bins
        given["feature_extractor"] = library.WhisperFeatureExtractor(feature_size=mels, return_attention_mask=True)
        return (library.Qwen3OmniMoeProcessor if new else library.Qwen2_5OmniProcessor)(**given)
    return (library.Qwen3VLProcessor if new else library.Qwen2_5_VLProcessor)(**given)


# For tests and the demo: the same files, classes and code paths as the published models, at half a million parameters.


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

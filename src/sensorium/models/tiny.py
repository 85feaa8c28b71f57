"""The tokenizers and chat templates of the tiny checkpoints: byte-level BPE with each family's own special tokens."""

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import CONFIG_MAPPING, PreTrainedTokenizerFast

from sensorium.models.weight_files import saving_weights
from sensorium.recipe.family_facts import FAMILIES, TEXT, FamilyFacts, Sizes
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


def tiny_tokenizer(family: str, longest: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the family's special tokens, trained on the words of the shipped tasks."""
    facts, core = FAMILIES[family], Tokenizer(models.BPE())
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
    core.train_from_iterator(_corpus(facts), trainer)
    core.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    others = [token for token in specials if token not in (facts.closing, "<|endoftext|>")]
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=facts.closing,
        pad_token="<|endoftext|>",
        extra_special_tokens=others,
        **({"model_specific_special_tokens": dict(facts.tokens)} if facts.tokens else {}),
        chat_template=facts.template,
        clean_up_tokenization_spaces=False,
        model_max_length=longest,
    )


def special_tokens(family: str) -> tuple[str, ...]:
    """The special tokens of a family, in the order of their ids."""
    facts = FAMILIES[family]
    return (*SPECIAL_TOKENS[:3], *facts.tokens.values(), *facts.more_tokens) if facts.tokens else SPECIAL_TOKENS


def _corpus(facts: FamilyFacts) -> list[str]:
    """Every word often enough to become one token."""
    questions = f"{QUESTIONS} {facts.words}"
    return [*ANSWERS.split() * 8, *(f" {word}" for word in questions.split() * 8)]


def take_published_sizes(facts: FamilyFacts, processor: Any) -> None:
    """Let a tiny checkpoint's processor take media as large and as long as the family's published checkpoints do."""
    for part, (least, most) in zip(("image_processor", "video_processor"), facts.published_pixels or (), strict=False):
        getattr(processor, part).size = {"shortest_edge": least, "longest_edge": most}
    if facts.published_sound_s:
        extractor = processor.feature_extractor
        extractor.chunk_length = facts.published_sound_s
        extractor.n_samples = facts.published_sound_s * extractor.sampling_rate


def tiny_processor(facts: FamilyFacts, tokenizer: PreTrainedTokenizerFast, config: Any) -> Any:
    """The processor of a tiny checkpoint with towers."""
    import sensorium.models.torchvision_fix  # noqa: F401  (before the image processors import torchvision)

    assert facts.processor is not None, "a family with towers has a processor"
    facts.check_installed()
    return facts.processor(import_module("transformers"), {"tokenizer": tokenizer, "chat_template": facts.template}, config)


# For tests and the demo: the same files, classes and code paths as the published models, at half a million parameters.


def make_tiny(family: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write a random checkpoint of ``family`` into ``folder`` and return it.

    Overrides name keys of the text config (``hidden_size=64``), of the vision or audio config with ``vision_`` or
    ``audio_`` before them (``vision_depth=1``), or ``tie_word_embeddings`` (default True).
    """
    if family not in FAMILIES:
        raise ModelError(f"there is no tiny model of family '{family}'{nearest(family, list(FAMILIES))}")
    tokenizer = tiny_tokenizer(family, TEXT["max_position_embeddings"])
    model = _model(family, tokenizer, seed, dict(overrides))
    folder, facts = Path(folder), FAMILIES[family]
    if facts.before_saving:
        facts.before_saving(model)
    with saving_weights(folder):
        model.save_pretrained(folder)
    owner = tiny_processor(facts, tokenizer, model.config) if facts.has_towers else tokenizer
    owner.save_pretrained(folder)
    return folder


def _model(family: str, tokenizer: PreTrainedTokenizerFast, seed: int, overrides: dict[str, Any]) -> Any:
    library: Any = import_module("transformers")
    kind = FAMILIES[family]
    tie = overrides.pop("tie_word_embeddings", True) and kind.more.get("tie_word_embeddings", True)
    ends = {"eos_token_id": _id(tokenizer, kind.closing), "pad_token_id": _id(tokenizer, "<|endoftext|>"),
            "bos_token_id": None}  # fmt: skip
    text = kind.text | {"vocab_size": -(-len(tokenizer) // 64) * 64}
    config_class = getattr(library, f"{kind.prefix}Config")
    if kind.has_towers:
        config = _config(family, config_class, kind, text | ends, overrides, tokenizer, tie)
    else:
        config = config_class(**_given(family, text, config_class, overrides), **ends, tie_word_embeddings=tie)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(library, kind.model_class)(config)
    model.generation_config.eos_token_id = [ends["eos_token_id"], ends["pad_token_id"]]
    model.generation_config.pad_token_id = ends["pad_token_id"]
    return model


def _config(
    family: str,
    config_class: Any,
    kind: FamilyFacts,
    text: Sizes,
    overrides: Sizes,
    tokenizer: PreTrainedTokenizerFast,
    tie: bool,
) -> Any:
    """The config of a model with towers; overrides go to the part that their prefix names."""
    parts = {"vision": dict(kind.vision), "audio": dict(kind.audio), "text": text}
    of_part: dict[str, Sizes] = {part: {} for part in parts}
    for key, value in overrides.items():
        part, _, name = key.partition("_")
        mine = part in ("vision", "audio") and bool(parts[part])
        of_part[part if mine else "text"][name if mine else key] = value
    classes = dict(config_class.sub_configs)
    for part in parts:
        if "model_type" in parts[part]:
            classes[f"{part}_config"] = CONFIG_MAPPING[parts[part]["model_type"]]
    made = {
        f"{part}_config": _given(family, sizes, classes[f"{part}_config"], of_part[part])
        for part, sizes in parts.items() if sizes
    }  # fmt: skip
    if "model_type" in text:
        made["text_config"]["tie_word_embeddings"] = tie
    else:
        made["vision_config"]["out_hidden_size"] = made["text_config"]["hidden_size"]
        if kind.audio:
            made["audio_config"]["output_dim"] = made["text_config"]["hidden_size"]
    ids = {key: _id(tokenizer, token) for key, token in kind.token_keys.items()}
    return config_class(**{"tie_word_embeddings": tie} | made | kind.more | ids)


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

"""Tiny random checkpoints for tests and the demo: half a million weights in the files and classes of the published models.

Tokenizers are byte-level BPE with each family's own special tokens; sizes, templates and processors are the family's facts.
"""

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import CONFIG_MAPPING, PreTrainedTokenizerFast

from sensorium.models.weight_files import saving_weights
from sensorium.recipe.family_facts import FAMILIES, TEXT, FamilyFacts
from sensorium.recipe.model_shape import tiny_config
from sensorium.vocabulary.errors import ModelError, nearest

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip

PAD = "<|endoftext|>"
# Answers have no space before them, words of a question do: each becomes one token.
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
# How Qwen cuts text into pieces.
PIECES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def tiny_tokenizer(facts: FamilyFacts) -> PreTrainedTokenizerFast:
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
    specials = special_tokens(facts)
    trainer = trainers.BpeTrainer(
        vocab_size=512 - len(TAGS),
        special_tokens=list(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    questions = f"{QUESTIONS} {facts.words}".split()
    words = [*ANSWERS.split() * 8, *(f" {word}" for word in questions * 8)]  # often enough to become one token each
    core.train_from_iterator(words, trainer)
    core.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=facts.closing,
        pad_token=PAD,
        extra_special_tokens=[token for token in specials if token not in (facts.closing, PAD)],
        **({"model_specific_special_tokens": dict(facts.tokens)} if facts.tokens else {}),
        chat_template=facts.template,
        clean_up_tokenization_spaces=False,
        model_max_length=TEXT["max_position_embeddings"],
    )


def special_tokens(facts: FamilyFacts) -> tuple[str, ...]:
    """The special tokens of a family, in the order of their ids."""
    return (*SPECIAL_TOKENS[:3], *facts.tokens.values(), *facts.more_tokens) if facts.tokens else SPECIAL_TOKENS


def take_published_sizes(facts: FamilyFacts, processor: Any) -> None:
    """Let a tiny checkpoint's processor take media as large and as long as the family's published checkpoints do."""
    for part, (least, most) in zip(("image_processor", "video_processor"), facts.published_pixels or (), strict=False):
        getattr(processor, part).size = {"shortest_edge": least, "longest_edge": most}
    if facts.published_sound_s:
        extractor = processor.feature_extractor
        extractor.chunk_length = facts.published_sound_s
        extractor.n_samples = facts.published_sound_s * extractor.sampling_rate


def make_tiny(family: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write a random checkpoint of ``family`` into ``folder`` and return it.

    Overrides name keys of the text config (``hidden_size=64``), of the vision or audio config with ``vision_`` or
    ``audio_`` before them (``vision_depth=1``), or ``tie_word_embeddings`` (default True).
    """
    if family not in FAMILIES:
        raise ModelError(f"there is no tiny model of family '{family}'{nearest(family, list(FAMILIES))}")
    import sensorium.models.torchvision_fix  # noqa: F401  (before the image processors import torchvision)

    library, facts, folder = import_module("transformers"), FAMILIES[family], Path(folder)
    facts.check_installed()
    tokenizer = tiny_tokenizer(facts)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (facts.closing, PAD, *facts.token_keys.values())}
    config = _config(family, ids, overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(library, facts.model_class)(config)
    model.generation_config.eos_token_id = [ids[facts.closing], ids[PAD]]
    model.generation_config.pad_token_id = ids[PAD]
    if facts.before_saving:
        facts.before_saving(model)
    with saving_weights(folder):
        model.save_pretrained(folder)
    owner: Any = tokenizer
    if facts.processor:
        owner = facts.processor(library, {"tokenizer": tokenizer, "chat_template": facts.template}, config)
    owner.save_pretrained(folder)
    return folder


def _config(family: str, ids: dict[str, Any], overrides: dict[str, Any]) -> Any:
    """The config of a tiny model; an override goes to the part that its prefix names, or else to the language model."""
    facts, config = FAMILIES[family], tiny_config(family)
    config_class = getattr(import_module("transformers"), f"{facts.prefix}Config")
    del config["model_type"]
    text = config.get("text_config", config)
    for key, value in overrides.items():
        if key == "tie_word_embeddings":
            config[key] = value and config[key]
            continue
        part, _, name = key.partition("_")
        if part not in ("vision", "audio") or f"{part}_config" not in config:
            part, name = "text", key
        sizes, part_class = config.get(f"{part}_config", config), config_class
        if sizes is not config:
            part_class = config_class.sub_configs[f"{part}_config"]
        if "model_type" in sizes:
            part_class = CONFIG_MAPPING[sizes["model_type"]]
        known = [*sizes, *inspect.signature(part_class).parameters]
        if name not in known:
            raise ModelError(f"{part_class.__name__} of a tiny {family} has no key '{name}'{nearest(name, known)}")
        sizes[name] = value
    text |= {"eos_token_id": ids[facts.closing], "pad_token_id": ids[PAD], "bos_token_id": None}
    if "model_type" in text:
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    elif facts.has_towers:
        config["vision_config"]["out_hidden_size"] = text["hidden_size"]
        if facts.audio:
            config["audio_config"]["output_dim"] = text["hidden_size"]
    return config_class(**config, **{key: ids[token] for key, token in facts.token_keys.items()})

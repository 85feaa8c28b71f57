"""The facts of a model family that need no torch: sizes, tokens and template of its tiny model, shapes of its towers.

A family is one file, ``models/families/NAME.py``, and one line in ``recipe/registry.py``. Its adapter class holds its
``FamilyFacts`` as ``facts``. That file imports neither torch nor transformers when it is imported, so the dry run reads
the facts by the family's name::

    FAMILIES["internvl"].tensors(config)  →  ("vision_tower.embeddings.cls_token", [1, 1, 64]), …
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from sensorium.recipe.registry import resolve, table
from sensorium.vocabulary.errors import ModelError


class DeferredModule:
    """Imports a module when an attribute is first read. Files name the module itself under TYPE_CHECKING."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(import_module(self._name), attribute)
        setattr(self, attribute, found)  # the next access costs nothing
        return found


GENERAL = "general"  # the family of all others, of which nothing is known beforehand
Config = dict[str, Any]
Sizes = dict[str, Any]
Shapes = Iterator[tuple[str, list[int]]]  # names and shapes of tensors


@dataclass(frozen=True)
class FamilyFacts:
    """The facts of a family. Those of its tiny model: ``prefix`` to ``published_sound_s``.

    ``prefix``: of transformers' classes. ``text``, ``vision``, ``audio``: tiny sizes of its parts, with a ``model_type``
    where the family takes several; ``more``: other keys of its config. ``rows``: of the embedding.
    ``template``: the chat template. ``tokens``: its own special tokens by the names under which its processor asks the
    tokenizer for them (none: Qwen's), ``more_tokens`` others; ``closing`` ends an assistant's turn. ``token_keys``: the
    keys by which its config names special tokens. ``words``: words of its prompts that the shipped tasks do not use.
    ``processor``: builds its processor from transformers, the given tokenizer and template, and the config.
    ``before_saving``: corrects a fresh stock model: names that transformers would save other than the published ones, or
    first weights that would make it a poor model of its kind.
    ``published_pixels``: the least and most pixels of a picture, and of a frame (Qwen3-VL: a clip), and
    ``published_sound_s`` the seconds of sound, that its published checkpoints take.

    Those of its checkpoints: ``tensors`` gives the tensors of its towers and projectors by a config. ``parts`` sorts
    weights into groups by what their names contain, first match first; others are the language model's or the head's.
    ``tables``: how the names of two-dimensional weights end that are no linear layers.
    ``unloaded``: patterns of published weights that are left out on purpose. ``names``: what published names contain.
    ``requires``: a package it cannot do without, and why. ``vllm``: its log-probs from vLLM were held to the native
    engine's, so that engine may sample it; ``vllm_adapters``: its LoRA too. ``turned_experts``: published experts have
    their last two axes the other way round. ``renamed``: transformers renames its published weights. ``query_bias``,
    ``query_norm``: whether queries and keys (and values) of its own language model have biases, or norms;
    ``query_gate``: its queries come with a gate of the same size. ``sandwich``: norms stand before and after attention
    and MLP, whose gate and up are one layer. ``light_tower``: the blocks of its vision tower are functions that keep
    little for the backward pass (``models/tower.py``). ``stands_in``: ``sensorium validate`` takes its tiny model in
    place of a checkpoint that is not on this machine and whose name tells no family.
    """

    prefix: str
    text: Sizes
    template: str
    vision: Sizes = field(default_factory=dict)
    audio: Sizes = field(default_factory=dict)
    more: Sizes = field(default_factory=dict)
    rows: int = 448
    tokens: Mapping[str, str] = field(default_factory=dict)
    more_tokens: tuple[str, ...] = ()
    closing: str = "<|im_end|>"
    token_keys: Mapping[str, str] = field(default_factory=dict)
    words: str = ""
    processor: Callable[[Any, dict[str, Any], Any], Any] | None = None
    before_saving: Callable[[Any], None] | None = None
    published_pixels: tuple[tuple[int, int], tuple[int, int]] | None = None
    published_sound_s: int = 0
    tensors: Callable[[Config], Shapes] | None = None
    parts: tuple[tuple[str, str], ...] = ()
    tables: tuple[str, ...] = ()
    unloaded: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    requires: tuple[str, str] | None = None
    vllm: bool = False
    vllm_adapters: bool = True
    turned_experts: bool = False
    renamed: bool = False
    query_bias: bool = False
    query_norm: bool = False
    query_gate: bool = False
    sandwich: bool = False
    light_tower: bool = False
    stands_in: bool = False

    def check_installed(self) -> None:
        """Refuse to go on without the package that the family needs."""
        if self.requires and find_spec(self.requires[0]) is None:
            package, why = self.requires
            raise ModelError(f"a {self.prefix} model needs the package {package}: {why}")

    @property
    def has_towers(self) -> bool:
        """Whether it takes more than text."""
        return bool(self.vision or self.audio)

    @property
    def has_experts(self) -> bool:
        """Whether its language model is a mixture of experts."""
        return "num_experts" in self.text

    @property
    def has_delta_nets(self) -> bool:
        """Whether some layers of its language model are gated delta nets."""
        return "linear_num_value_heads" in self.text

    @property
    def is_thinker(self) -> bool:
        """Whether it is one part of the published models, below ``thinker.``; the others speak."""
        return self.prefix.endswith("Thinker")

    @property
    def model_class(self) -> str:
        return f"{self.prefix}For{'ConditionalGeneration' if self.has_towers else 'CausalLM'}"


class FamilyTable(Mapping[str, FamilyFacts]):
    """The facts by the family's name. It lists the shipped families; one of the user's own is found by its name."""

    def __getitem__(self, name: str) -> FamilyFacts:
        if name not in table("family"):
            raise KeyError(name)
        facts = getattr(resolve("family", name), "facts", None)
        if not isinstance(facts, FamilyFacts):
            raise KeyError(name)
        return facts

    def __iter__(self) -> Iterator[str]:
        return (name for name, place in table("family").items() if place.startswith("sensorium.models.families."))

    def __len__(self) -> int:
        return sum(1 for _ in self)


FAMILIES = FamilyTable()

# Tables that older versions of transformers saved though they are computed, and heads that predict several tokens ahead.
UNLOADED = (r"(^|\.)(mtp\.|rotary_emb\.inv_freq$|embeddings\.position_ids$)",)


def is_unloaded(name: str, also: Sequence[str] = ()) -> bool:
    """Whether a weight is left out on purpose; ``also`` are prefixes that a recipe names."""
    return name.startswith(tuple(also)) or _unloaded().search(name) is not None


@lru_cache(maxsize=1)
def _unloaded() -> re.Pattern[str]:
    return re.compile("|".join([*UNLOADED, *(pattern for facts in FAMILIES.values() for pattern in facts.unloaded)]))


# Words of a weight's name that tell its group in a checkpoint of an unknown family; the first word that tells decides.
WORDS_OF_GROUPS = (
    ("language", r"layers|embed_tokens|transformer|llm|text_.*|.*language.*"),
    ("projector", r".*(proj|connector|align|merger|newline|resampler|qformer|_table).*|embed_(vision|audio)"),
    ("vision", r".*(vision|visual|image|img|vit).*|vq.*"),
    ("audio", r".*(audio|speech|sound).*"),
)


def group_by_name(name: str, facts: FamilyFacts | None) -> str:
    """The parameter group of a weight in a file; that of an unknown family is told by the words of its name."""
    if facts is None:
        return _group_by_words(name)
    for part, group in facts.parts:
        if part in name:
            return group
    return "head" if "lm_head." in name else "language"


def _group_by_words(name: str) -> str:
    """``model.vision_tower.merger.weight`` → vision, ``model.merger.weight`` → projector."""
    words = name.split(".")
    if "lm_head" in words:
        return "head"
    for word in words:
        for group, pattern in WORDS_OF_GROUPS:
            if re.fullmatch(pattern, word):
                return group
    return "language"


def is_table(name: str, facts: FamilyFacts | None) -> bool:
    """Whether a two-dimensional weight is a table, or the router of a mixture, and no linear layer."""
    several = [facts] if facts else FAMILIES.values()
    return name.endswith(("embed_tokens", "mlp.gate", *(table for one in several for table in one.tables)))


def affine(name: str, weight: list[int]) -> Shapes:
    """A weight and its bias."""
    yield f"{name}.weight", weight
    yield f"{name}.bias", weight[:1]


def affine_layers(at: str, count: int, weights: Mapping[str, list[int]]) -> Shapes:
    """The same weights with their biases in each of ``count`` layers."""
    for i in range(count):
        for name, weight in weights.items():
            yield from affine(f"{at}.{i}.{name}", weight)


# head_dim 32 is the smallest that vLLM's attention takes.
TEXT: Sizes = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "initializer_range": 0.05,
}  # fmt: skip
AUDIO: Sizes = {
    "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 128, "num_mel_bins": 64,
    "initializer_range": 0.05,
}  # fmt: skip
# A tower as transformers' own, four patches on each side of a tile.
PLAIN_VISION: Sizes = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "image_size": 56,
    "patch_size": 14, "initializer_range": 0.05,
}  # fmt: skip

SYSTEM_PROMPT = "Answer briefly."
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\n" + SYSTEM_PROMPT + "<|im_end|>\n{% endif %}"
GENERATION = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def chat_template(media: Mapping[str, str], *, system: bool = False) -> str:
    """A template that shows each kind of medium by its text; ``system`` adds a default system prompt."""
    shown = "".join(f"block.type == '{kind}' %}}{text}{{% elif " for kind, text in media.items())
    turn = (
        "<|im_start|>{{ message.role }}\n"
        "{% if message.content is string %}{{ message.content }}{% else %}{% for block in message.content %}"
        "{% if " + shown + "block.type == 'text' %}{{ block.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    )
    start = DEFAULT_SYSTEM if system else ""
    return start + "{% for message in messages %}" + turn + "{% endfor %}" + GENERATION

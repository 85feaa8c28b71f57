"""Text-only Qwen2, Qwen2.5, Qwen3 and Llama: a language model and a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

from sensorium.models.families.qwen2_5_vl import SHOWN
from sensorium.models.family import IMPLEMENTATION, DefaultMedia, DefaultModel, MediaFormat, Tower
from sensorium.models.prepared_media import Extent, Preprocessor
from sensorium.recipe.family_facts import GENERATION, TEXT, FamilyFacts, chat_template
from sensorium.vocabulary.content import MediaKind

QWEN2 = TEXT | {"model_type": "qwen2"}
"""Tiny sizes of the language model of families that take several kinds of one."""

# Qwen3's own way: thoughts of assistant turns before the last question are not shown again.
THOUGHTLESS_TURNS = (
    "{% set roles = messages | map(attribute='role') | list %}"
    "{% set last = roles[::-1].index('user') if 'user' in roles else 0 %}"
    "{% for message in messages %}{% set content = message.content if message.content is string else "
    "message.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join %}"
    "{% if message.role == 'assistant' and loop.revindex0 > last and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ content }}<|im_end|>\n{% endfor %}"
)


class NoMedia(DefaultMedia):
    """A model of text takes no media."""

    def __init__(self, config: Any, processor: Any) -> None:
        self.placeholders: dict[MediaKind, int] = {}
        self.preprocessors: dict[MediaKind, Preprocessor] = {}

    def expand(self, extent: Extent) -> NoReturn:
        """Nothing asks for this: media are refused before."""
        raise AssertionError("a text-only model expands nothing")


class TextModel(DefaultModel):
    """The adapter of a language model with a head; of those below."""

    media_format: ClassVar[type[MediaFormat]] = NoMedia
    attention: ClassVar[Any] = IMPLEMENTATION
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {"language": ("model.",), "head": ("lm_head.",)}

    def __init__(self, model: Any) -> None:
        self.core = self.language_model = model.model
        self.head = model.lm_head
        self.towers: dict[MediaKind, Tower] = {}


class Qwen2(TextModel):
    """``Qwen2ForCausalLM``: Qwen2 and Qwen2.5."""

    facts: ClassVar[FamilyFacts] = FamilyFacts("Qwen2", TEXT, chat_template(SHOWN, system=True), query_bias=True, vllm=True)


class Qwen3(TextModel):
    """``Qwen3ForCausalLM``."""

    facts: ClassVar[FamilyFacts] = FamilyFacts(
        "Qwen3", TEXT | {"head_dim": 32}, THOUGHTLESS_TURNS + GENERATION, query_norm=True, vllm=True
    )


class Llama(TextModel):
    """``LlamaForCausalLM``: Llama, SmolLM2 and others of its architecture."""

    facts: ClassVar[FamilyFacts] = FamilyFacts("Llama", TEXT, chat_template(SHOWN, system=True), vllm=True)

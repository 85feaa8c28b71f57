"""Text-only Qwen2, Qwen2.5 and Qwen3: a language model and a head."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from torch import Tensor

from sensorium.models.attention import IMPLEMENTATION
from sensorium.models.features import Grid, Prepared
from sensorium.models.layout import Features
from sensorium.vocabulary.content import Media, MediaKind
from sensorium.vocabulary.errors import ModelError


class TextModel:
    """The adapter of ``Qwen2ForCausalLM`` and ``Qwen3ForCausalLM``."""

    attention: ClassVar[Any] = IMPLEMENTATION
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {"language": ("model.",), "head": ("lm_head.",)}

    def __init__(self, model: Any, processor: Any) -> None:
        self.language_model = model.model
        self.head = model.lm_head
        self.placeholders: dict[MediaKind, int] = {}

    def rotary(self, hidden_BTH: Tensor, positions_3BT: Tensor) -> tuple[Tensor, Tensor]:
        """One axis: the three are equal for text."""
        return self.language_model.rotary_emb(hidden_BTH, positions_3BT[0])

    def preprocess(self, items: Sequence[tuple[Media, bytes]]) -> NoReturn:
        """Text models have no media."""
        raise ModelError(f"a text-only model cannot look at {items[0][0].kind} {items[0][0].origin}; use a vision family.")

    def count(self, grid: Grid) -> NoReturn:
        """Text models have no media."""
        raise AssertionError("a text-only model expands nothing")

    def positions(self, ids_T: Tensor, grids: Sequence[Grid]) -> NoReturn:
        """Text models have no media."""
        raise AssertionError("a text-only model expands nothing")

    def tower(self, prepared: Sequence[Prepared]) -> list[Features]:
        """Text models have no tower."""
        raise AssertionError("a text-only model has no tower")

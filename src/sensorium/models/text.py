"""Text-only Qwen2, Qwen2.5 and Qwen3: a language model and a head."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from torch import Tensor

from sensorium.models.attention import IMPLEMENTATION
from sensorium.models.features import Extent, Preprocessor
from sensorium.models.tower import VisionTower
from sensorium.vocabulary.content import MediaKind


class TextModel:
    """The adapter of ``Qwen2ForCausalLM`` and ``Qwen3ForCausalLM``."""

    attention: ClassVar[Any] = IMPLEMENTATION
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {"language": ("model.",), "head": ("lm_head.",)}

    def __init__(self, model: Any, processor: Any) -> None:
        self.language_model = model.model
        self.head = model.lm_head
        self.placeholders: dict[MediaKind, int] = {}
        self.preprocessors: dict[MediaKind, Preprocessor] = {}
        self.towers: dict[MediaKind, VisionTower] = {}

    def rotary(self, hidden_BTH: Tensor, positions_3BT: Tensor) -> tuple[Tensor, Tensor]:
        """One axis: the three are equal for text."""
        return self.language_model.rotary_emb(hidden_BTH, positions_3BT[0])

    def expand(self, extent: Extent) -> NoReturn:
        """Text models have no media."""
        raise AssertionError("a text-only model expands nothing")

    def positions(self, ids_T: Tensor, extents: Sequence[Extent]) -> NoReturn:
        """Text models have no media."""
        raise AssertionError("a text-only model expands nothing")

"""Text-only Qwen2, Qwen2.5 and Qwen3: a language model and a head."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from torch import Tensor

from sensorium.models.attention import IMPLEMENTATION
from sensorium.models.family import MediaFormat, Tower
from sensorium.models.prepared_media import Extent, Preprocessor
from sensorium.vocabulary.content import MediaKind
from sensorium.vocabulary.decoding import FrameRule


class NoMedia:
    """A model of text takes no media."""

    def __init__(self, config: Any, processor: Any) -> None:
        self.written_tokens: tuple[str, ...] = ()
        self.placeholders: dict[MediaKind, int] = {}
        self.frame_rule = FrameRule()
        self.own_marks: dict[MediaKind, tuple[int, int]] = {}
        self.stand_ins: dict[str, int] = {}
        self.joined: dict[MediaKind, tuple[str, str]] = {}
        self.preprocessors: dict[MediaKind, Preprocessor] = {}

    def expand(self, extent: Extent) -> NoReturn:
        """Text models have no media."""
        raise AssertionError("a text-only model expands nothing")

    def positions(self, ids_T: Tensor, extents: Sequence[Extent]) -> NoReturn:
        """Text models have no media."""
        raise AssertionError("a text-only model expands nothing")


class TextModel:
    """The adapter of ``Qwen2ForCausalLM`` and ``Qwen3ForCausalLM``."""

    media_format: ClassVar[type[MediaFormat]] = NoMedia
    attention: ClassVar[Any] = IMPLEMENTATION
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {"language": ("model.",), "head": ("lm_head.",)}

    def __init__(self, model: Any) -> None:
        self.language_model = model.model
        self.head = model.lm_head
        self.towers: dict[MediaKind, Tower] = {}

    def rotary(self, hidden_BTH: Tensor, positions_3BT: Tensor) -> tuple[Tensor, Tensor]:
        """One axis: the three are equal for text."""
        return self.language_model.rotary_emb(hidden_BTH, positions_3BT[0])

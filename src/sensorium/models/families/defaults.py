"""What most families have in common: a media format without special cases, ordinary positions, the usual parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from sensorium.models.deferred import DeferredModule
from sensorium.models.family import IMPLEMENTATION
from sensorium.models.prepared_media import Extent
from sensorium.models.segment_layout import Expansion
from sensorium.vocabulary.content import MediaKind
from sensorium.vocabulary.decoding import FrameRule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = DeferredModule("torch")


class DefaultMedia:
    """A media format that counts media as it counts text, writes no special tokens and leaves the template as it is."""

    written_tokens: ClassVar[tuple[str, ...]] = ()
    frame_rule = FrameRule()
    own_marks: Mapping[MediaKind, tuple[int, int]] = MappingProxyType({})
    stand_ins: Mapping[str, int] = MappingProxyType({})
    joined: Mapping[MediaKind, tuple[str, str, str]] = MappingProxyType({})
    tail = ""

    def positions(self, ids_T: Tensor, extents: Sequence[Extent]) -> Tensor:
        """Positions [3, T], the same on all axes."""
        return torch.arange(len(ids_T)).expand(3, -1)


class DefaultModel:
    """An adapter of a model whose towers, language model and head have their usual names, with ordinary positions."""

    attention: ClassVar[Any] = {"text_config": IMPLEMENTATION}

    def __init__(self, model: Any) -> None:
        self.core = model.model
        self.language_model = self.core.language_model
        self.head = model.lm_head

    def rotary(self, hidden_BTH: Tensor, positions_3BT: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of one axis: all three are equal."""
        return self.language_model.rotary_emb(hidden_BTH, positions_3BT[0])


def repeated(token: int, count: int) -> Expansion:
    """A placeholder that becomes ``count`` of itself, each of which takes a feature."""
    return Expansion((token,) * count, ((0, count),))

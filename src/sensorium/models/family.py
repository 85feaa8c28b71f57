"""The two halves of a model family: how media become tokens, and how the model computes.

``MediaFormat`` needs only a checkpoint's config and processor; ``Family`` wraps a loaded model with its weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from sensorium.models.prepared_media import Extent, Preprocessor, TowerInput
from sensorium.models.segment_layout import Expansion, Features, Runs
from sensorium.recipe.family_facts import DeferredModule
from sensorium.vocabulary.content import MediaKind
from sensorium.vocabulary.decoding import FrameRule

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
else:
    torch = DeferredModule("torch")

IMPLEMENTATION = "sensorium"  # the name of our attention in transformers' registry (``models/attention.py``)


class MediaFormat(Protocol):
    """How a family's media become tokens and positions. Built as ``MediaFormat(config, processor)``; no processor for text.

    ``placeholders`` and ``preprocessors`` have an entry for each kind of medium that the family takes.
    ``written_tokens``: special tokens that a model of the family may write in answers (boxes, for example). Other special
    tokens are never sampled, except those that end a response. ``frame_rule``: how frames of a video are sampled and sized
    where its parameters leave it open.

    Three mappings are empty for most families. ``own_marks``: kinds whose expansion has its own start and end marks; the
    template's marks around it are dropped. ``stand_ins``: texts that the template writes for a medium and that are no
    tokens, with the special token that replaces them in stored segments. ``joined``: kinds whose expansion is text that
    joins its neighbours, with the text that it removes from the end of the text before, the text that it puts there, and
    the text that it puts before the text after. ``tail``: what stands at the end of a first prompt that shows media.
    """

    @property
    def written_tokens(self) -> Sequence[str]: ...

    @property
    def placeholders(self) -> Mapping[MediaKind, int]: ...

    @property
    def stand_ins(self) -> Mapping[str, int]: ...

    @property
    def joined(self) -> Mapping[MediaKind, tuple[str, str, str]]: ...

    @property
    def tail(self) -> str: ...

    @property
    def frame_rule(self) -> FrameRule: ...

    @property
    def own_marks(self) -> Mapping[MediaKind, tuple[int, int]]: ...

    @property
    def preprocessors(self) -> Mapping[MediaKind, Preprocessor]: ...

    def __init__(self, config: Any, processor: Any) -> None: ...

    def expand(self, extent: Extent) -> Expansion:
        """The tokens of a medium of this extent."""
        ...

    def positions(self, ids_T: Tensor, extents: Sequence[Extent]) -> Tensor:
        """Positions [3, T] of a segment with media, starting at 0, as the published weights were trained."""
        ...


@runtime_checkable
class HearsInVideo(Protocol):
    """A media format that interleaves a video with its sound (``use_audio_in_video``)."""

    def interleave(self, video: Extent, sound: Extent) -> tuple[tuple[int, ...], Runs, Runs]:
        """The tokens of the pair: ids, the runs that take the video's features, and the sound's runs."""
        ...


class Tower(Protocol):
    """The part of a model that encodes pictures and videos, or sounds. ``module`` has all its parameters."""

    module: nn.Module

    def __call__(self, prepared: Sequence[TowerInput]) -> list[Features]:
        """One pass over media, split per item."""
        ...


class Family(Protocol):
    """An adapter over a stock transformers model. Built as ``Family(model)``.

    ``media_format`` is the class of the other half. ``language_model`` has ``embed_tokens``, ``layers``, ``norm`` and
    ``rotary_emb``. ``attention`` is transformers' ``attn_implementation`` that hands the language model's attention to the
    caller. ``groups``: parameter-name prefixes of each group; the longest prefix that fits decides. ``towers`` has an entry
    for each kind of medium that the family takes. A shipped family also has ``facts`` (``recipe/family_facts.py``); one of
    your own may leave them out, and then has no tiny model.
    """

    media_format: ClassVar[type[MediaFormat]]
    attention: Any
    groups: Mapping[str, tuple[str, ...]]
    language_model: Any
    head: Any
    towers: Mapping[MediaKind, Tower]

    def __init__(self, model: Any) -> None: ...

    def rotary(self, hidden_BTH: Tensor, positions_3BT: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions."""
        ...


def groups_of(adapter_class: Any, model: Any) -> Mapping[str, tuple[str, ...]]:
    """The parameter groups of a model by its adapter's class: the same for all models, or found in this one."""
    found = getattr(adapter_class, "groups_of", None)
    groups: Mapping[str, tuple[str, ...]] = adapter_class.groups if found is None else found(model)
    return groups


def one_axis(angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """What ``Family.rotary`` gives as [B, T, D]: of three equal axes (``families/qwen2_5_vl.py``) the first."""
    cos, sin = (part[0] if part.ndim == 4 else part for part in angles)
    return cos, sin


def group_of(name: str, groups: Mapping[str, tuple[str, ...]]) -> str | None:
    """The group of a parameter: the one with the longest prefix that fits."""
    fitting = [(len(prefix), group) for group, several in groups.items() for prefix in several if name.startswith(prefix)]
    return max(fitting)[1] if fitting else None


# What most families have in common: ordinary positions, and the usual parts.


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

"""What a model family answers, in two halves: how media stand in a context, and how the model computes.

``MediaFormat`` needs a checkpoint's config and processor only; ``Family`` wraps a loaded model with its weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from sensorium.models.prepared_media import Extent, Preprocessor, TowerInput
from sensorium.models.segment_layout import Expansion, Features, Runs
from sensorium.vocabulary.content import MediaKind
from sensorium.vocabulary.decoding import FrameRule

if TYPE_CHECKING:
    from torch import Tensor, nn

IMPLEMENTATION = "sensorium"
"""The name under which transformers knows our attention (``models/attention.py``)."""


class MediaFormat(Protocol):
    """How a family's media become tokens and positions. Built as ``MediaFormat(config, processor)``; no processor for text.

    ``placeholders`` and ``preprocessors`` have an entry for each kind of medium that the family takes.
    ``written_tokens`` names the special tokens that a model of the family may write in answers (boxes, for one). Other
    special tokens are never sampled, but for those that end a response.

    Two mappings are empty for most families. ``stand_ins``: texts by which the template shows a medium and which are no
    tokens, with the special token that stands for them in stored segments. ``joined``: kinds whose expansion is text that
    joins its neighbours, with the text that it takes from the end of what stands before, and what it puts before what
    follows.
    """

    @property
    def written_tokens(self) -> Sequence[str]: ...

    @property
    def placeholders(self) -> Mapping[MediaKind, int]: ...

    @property
    def stand_ins(self) -> Mapping[str, int]: ...

    @property
    def joined(self) -> Mapping[MediaKind, tuple[str, str]]: ...

    @property
    def frame_rule(self) -> FrameRule:
        """By which rule the frames of a video are taken, and how large they are, where nothing is said."""
        ...

    @property
    def own_marks(self) -> Mapping[MediaKind, tuple[int, int]]:
        """Kinds whose expansion brings its start and end marks: those that the template writes around it are left out."""
        ...

    @property
    def preprocessors(self) -> Mapping[MediaKind, Preprocessor]: ...

    def __init__(self, config: Any, processor: Any) -> None: ...

    def expand(self, extent: Extent) -> Expansion:
        """What stands in a context for a medium of this extent."""
        ...

    def positions(self, ids_T: Tensor, extents: Sequence[Extent]) -> Tensor:
        """Positions [3, T] of a segment that holds media and starts at 0, as the published weights were trained."""
        ...


@runtime_checkable
class HearsInVideo(Protocol):
    """A media format that interleaves a video with its sound (``use_audio_in_video``)."""

    def interleave(self, video: Extent, sound: Extent) -> tuple[tuple[int, ...], Runs, Runs]:
        """What stands in a context for the pair: token ids, the runs that take the video's features, the sound's runs."""
        ...


class Tower(Protocol):
    """The part of a model that encodes pictures and videos, or sounds. All its parameters are those of ``module``."""

    module: nn.Module

    def __call__(self, prepared: Sequence[TowerInput]) -> list[Features]:
        """One pass over media, split per item."""
        ...


class Family(Protocol):
    """An adapter over a stock transformers model. Built as ``Family(model)``.

    ``media_format`` is the class of the family's other half. ``language_model`` has ``embed_tokens``, ``layers``, ``norm``
    and ``rotary_emb``. ``attention`` is the argument of transformers' ``attn_implementation`` that hands the language
    model's attention to the caller. ``groups`` gives the parameter-name prefixes of each group; a name goes to the group
    with the longest prefix that fits. ``towers`` has an entry for each kind of medium that the family takes. A shipped one
    also has ``facts`` (``recipe/family_facts.py``), which a family of your own may leave out: then it has no tiny model.
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


def group_of(name: str, groups: Mapping[str, tuple[str, ...]]) -> str | None:
    """The group of a parameter: the one with the longest prefix that fits."""
    fitting = [(len(prefix), group) for group, several in groups.items() for prefix in several if name.startswith(prefix)]
    return max(fitting)[1] if fitting else None

"""What a model family answers: its parts, its placeholders, how media expand, where tokens stand, what its tower says."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from sensorium.models.features import Grid, Prepared, Preprocessor
from sensorium.models.layout import Features
from sensorium.vocabulary.content import MediaKind


class Family(Protocol):
    """An adapter over a stock transformers model. Built as ``Family(model, processor)``; the processor may be None.

    ``language_model`` has ``embed_tokens``, ``layers``, ``norm`` and ``rotary_emb``. ``attention`` is the argument of
    transformers' ``attn_implementation`` that hands the language model's attention to the caller. ``groups`` gives the
    parameter-name prefixes of each group; a name goes to the group with the longest prefix that fits.
    """

    attention: Any
    groups: Mapping[str, tuple[str, ...]]
    language_model: Any
    head: Any
    placeholders: Mapping[MediaKind, int]
    preprocess: Preprocessor

    def __init__(self, model: Any, processor: Any) -> None: ...

    def count(self, grid: Grid) -> int:
        """How many tokens a medium of this grid expands to."""
        ...

    def positions(self, ids_T: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Positions [3, T] of a segment that holds media and starts at 0, by the model's own function."""
        ...

    def rotary(self, hidden_BTH: Tensor, positions_3BT: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions."""
        ...

    def tower(self, prepared: Sequence[Prepared]) -> list[Features]:
        """One pass of the tower over media, split per item."""
        ...


def group_of(name: str, groups: Mapping[str, tuple[str, ...]]) -> str | None:
    """The group of a parameter: the one with the longest prefix that fits."""
    fitting = [(len(prefix), group) for group, several in groups.items() for prefix in several if name.startswith(prefix)]
    return max(fitting)[1] if fitting else None

"""A stored segment as the language model sees it: placeholders expanded, positions, and slots for features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from sensorium.vocabulary.content import Media
from sensorium.vocabulary.errors import SpanMismatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Where features go, in order: (first token, how many) of each unbroken run. A video with timestamps has several.
Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Expansion:
    """The expansion of a medium's placeholder: token ids, and the runs of them that take its features."""

    ids: tuple[int, ...]
    runs: Runs

    @property
    def count(self) -> int:
        return sum(count for _, count in self.runs)


@dataclass(frozen=True)
class Slot:
    """The expanded tokens of a segment that take the features of a medium."""

    media: Media
    runs: Runs

    @property
    def start(self) -> int:
        return self.runs[0][0]

    @property
    def count(self) -> int:
        return sum(count for _, count in self.runs)

    def moved(self, by: int) -> Slot:
        """The same slot if its segment begins ``by`` tokens later."""
        return Slot(self.media, tuple((start + by, count) for start, count in self.runs))

    def place(self, features: Features, row: int = 0) -> Placement:
        """The medium's features in this slot of a row; a wrong count is refused."""
        given = features.embeds_NH.shape[0]
        if given != self.count:
            raise mismatch(self.media, f"{self.count} placeholder tokens for {given} features")
        return Placement(row, self.runs, features)


@dataclass(frozen=True)
class Layout:
    """A segment after expansion. ``positions_3T`` start at 0; the next segment starts at ``advance``.

    ``ends_S`` is, for each stored token, the index of its last expanded token: log-probs refer to stored tokens.
    """

    ids_T: Tensor
    positions_3T: Tensor
    advance: int
    ends_S: Tensor
    slots: tuple[Slot, ...]

    def __len__(self) -> int:
        return int(self.ids_T.shape[0])


@dataclass(frozen=True)
class Features:
    """The features of one medium: embeddings, and deepstack levels where the family has them."""

    embeds_NH: Tensor
    deepstack_NH: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.embeds_NH, *self.deepstack_NH))

    def rows(self, rows_K: Tensor) -> Features:
        return Features(self.embeds_NH[rows_K], tuple(level_NH[rows_K] for level_NH in self.deepstack_NH))


@dataclass(frozen=True)
class Placement:
    """Features and the tokens ``runs`` of a batch's row that take them."""

    row: int
    runs: Runs
    features: Features


def placements(layout: Layout, features: Mapping[Media, Features], row: int = 0, offset: int = 0) -> list[Placement]:
    """Where the features of a segment go whose first token is at ``offset`` of a row; a wrong count is refused."""
    return [slot.moved(offset).place(features[slot.media], row) for slot in layout.slots]


def expansion_of(ids: Sequence[int], token: int) -> Expansion:
    """Tokens among which each ``token`` takes a feature."""
    runs = (list(places) for one, places in groupby(range(len(ids)), ids.__getitem__) if one == token)
    return Expansion(tuple(ids), tuple((places[0], len(places)) for places in runs))


def mismatch(media: Media, what: str) -> SpanMismatch:
    """An error that names the item whose placeholders and features disagree."""
    return SpanMismatch(f"{media.kind} {media.hash[:12]} ({media.origin or 'unknown origin'}): {what}.")


def sent_to(device: torch.device, table: Tensor) -> Tensor:
    """A CPU tensor on a device, from pinned memory: a copy from other memory waits for all earlier GPU work."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)

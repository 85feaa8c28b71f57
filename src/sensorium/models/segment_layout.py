"""How a stored segment looks to the language model: placeholders expanded, positions laid out, feature slots marked."""

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

Runs = tuple[tuple[int, int], ...]
"""Where features go, in order: (first token, how many) of each unbroken run. A video with timestamps has several."""


@dataclass(frozen=True)
class Expansion:
    """What the placeholder of a medium becomes: token ids, and the runs of them that take its features."""

    ids: tuple[int, ...]
    runs: Runs

    @property
    def count(self) -> int:
        """How many features it takes."""
        return _total(self.runs)


@dataclass(frozen=True)
class Slot:
    """The expanded tokens of a segment that take the features of a medium."""

    media: Media
    runs: Runs

    @property
    def start(self) -> int:
        """The first of these tokens."""
        return self.runs[0][0]

    @property
    def count(self) -> int:
        """How many features it takes."""
        return _total(self.runs)

    def moved(self, by: int) -> Slot:
        """The same slot where its segment begins ``by`` tokens later."""
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
    """What a tower makes of one medium: embeddings, and deepstack levels where the family has them."""

    embeds_NH: Tensor
    deepstack_NH: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """Memory they take."""
        return sum(tensor.nbytes for tensor in (self.embeds_NH, *self.deepstack_NH))

    def rows(self, rows_K: Tensor) -> Features:
        """Some of them."""
        return Features(self.embeds_NH[rows_K], tuple(level_NH[rows_K] for level_NH in self.deepstack_NH))


@dataclass(frozen=True)
class Placement:
    """Features that take the places ``runs`` of a row of a batch."""

    row: int
    runs: Runs
    features: Features


def placements(layout: Layout, features: Mapping[Media, Features], row: int = 0, offset: int = 0) -> list[Placement]:
    """Where the features of a segment go when its first token stands at ``offset`` of a row; a wrong count is refused."""
    return [slot.moved(offset).place(features[slot.media], row) for slot in layout.slots]


def expansion_of(ids: Sequence[int], token: int) -> Expansion:
    """Tokens among which each ``token`` takes a feature."""
    shown = (list(places) for one, places in groupby(range(len(ids)), ids.__getitem__) if one == token)
    return Expansion(tuple(ids), tuple((places[0], len(places)) for places in shown))


def mismatch(media: Media, what: str) -> SpanMismatch:
    """The error that names the item whose placeholders and features disagree."""
    return SpanMismatch(f"{media.kind} {media.hash[:12]} ({media.origin or 'unknown origin'}): {what}.")


def _total(runs: Runs) -> int:
    return sum(count for _, count in runs)


def sent_to(device: torch.device, table: Tensor) -> Tensor:
    """A table of the CPU on a device. From pinned memory: a copy from elsewhere waits until all work before it is done."""
    if device.type != "cuda":
        return table.to(device)
    return table.pin_memory().to(device, non_blocking=True)

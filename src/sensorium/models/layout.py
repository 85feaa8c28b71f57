"""How a stored segment looks to the language model: placeholders expanded, positions laid out, feature slots marked."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from sensorium.vocabulary.content import Media
from sensorium.vocabulary.errors import SpanMismatch


@dataclass(frozen=True)
class Slot:
    """Expanded tokens ``start … start+count`` of a segment take the features of a medium, in order."""

    start: int
    count: int
    media: Media


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


@dataclass(frozen=True)
class Placement:
    """Features that take the places ``start …`` of a row of a batch."""

    row: int
    start: int
    features: Features


def placements(layout: Layout, features: Mapping[Media, Features], row: int = 0, offset: int = 0) -> list[Placement]:
    """Where the features of a segment go when its first token stands at ``offset`` of a row; a wrong count is refused."""
    placed = []
    for slot in layout.slots:
        given = features[slot.media]
        if given.embeds_NH.shape[0] != slot.count:
            raise mismatch(slot.media, f"{slot.count} placeholder tokens for {given.embeds_NH.shape[0]} features")
        placed.append(Placement(row, offset + slot.start, given))
    return placed


def mismatch(media: Media, what: str) -> SpanMismatch:
    """The error that names the item whose placeholders and features disagree."""
    return SpanMismatch(f"{media.kind} {media.hash[:12]} ({media.origin or 'unknown origin'}): {what}.")

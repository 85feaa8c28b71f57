"""How a stored segment looks to the language model: placeholders expanded, positions laid out, feature slots marked."""

from dataclasses import dataclass

from torch import Tensor

from sensorium.vocabulary.content import Media


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

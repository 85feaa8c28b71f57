"""What a request's context needs computed: which of its tokens are in a cache already, and where the rest stand."""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sensorium.models.layout import Features, Placement, Slot
from sensorium.models.policy import Policy
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.episode import Segment
from sensorium.vocabulary.errors import EngineError


@dataclass(frozen=True)
class Known:
    """A segment of a thread (its key and stored tokens), and the cache length and rotary position right after it."""

    key: str
    stored: int
    length: int
    position: int


@dataclass(frozen=True)
class Kept:
    """Keys and values set aside: of a thread between its turns, or of a prompt for members of its group that come later.

    ``length`` entries are held; after a response that is one less than its segments have, since the last token drawn was
    never fed. A prompt also keeps ``hidden_H`` of its last token, so that nothing is computed again for the next member.
    """

    known: tuple[Known, ...]
    length: int
    block: Tensor
    hidden_H: Tensor | None = None


@dataclass(frozen=True)
class Fill:
    """The tokens of a context that are not cached, right after the ``held`` ones that are."""

    known: tuple[Known, ...]
    held: int
    ids_T: Tensor
    positions_3T: Tensor
    slots: tuple[Slot, ...]

    def placements(self, row: int, features: Mapping[Media, Features]) -> list[Placement]:
        """Where the features go when the new tokens start at 0 of a row of the forward."""
        return [slot.place(features[slot.media], row) for slot in self.slots]


def context_key(context: Sequence[Segment]) -> tuple[tuple[str, int], ...]:
    """Identity of a context by its segments: equal contexts share one prefill."""
    return tuple((segment.key, len(segment.tokens)) for segment in context)


def plan(policy: Policy, context: Sequence[Segment], known: Sequence[Known] = (), held: int = 0) -> Fill:
    """What is left to compute of a context when ``held`` tokens of a thread with segments ``known`` are cached."""
    same = 0
    while same < min(len(known), len(context)):
        if (known[same].key, known[same].stored) != (context[same].key, len(context[same].tokens)):
            break
        same += 1
    held = min(held, known[same - 1].length if same else 0)
    if same == len(context) and same:
        held = min(held, known[same - 1].length - 1)  # the last token has to be fed: its hidden state gives the next
    first = next((i for i in range(same) if known[i].length > held), same)
    begin = known[first - 1] if first else Known("", 0, 0, 0)
    after, ids, positions, slots = list(known[:first]), [], [], []
    length, position = begin.length, begin.position
    for segment in context[first:]:
        layout = policy.chat.layout(segment)
        ids.append(layout.ids_T)
        positions.append(layout.positions_3T + position)
        slots += [slot.moved(length - begin.length) for slot in layout.slots]
        length += len(layout)
        position += layout.advance
        after.append(Known(segment.key, len(segment.tokens), length, position))
    cut = held - begin.length
    if any(slot.start < cut for slot in slots):
        cut, held = 0, begin.length  # never enter a segment in the middle of its media
    if length == held:
        raise EngineError("a context without tokens: there is nothing to continue.")
    slots = [slot.moved(-cut) for slot in slots]
    return Fill(tuple(after), held, torch.cat(ids)[cut:], torch.cat(positions, 1)[:, cut:], tuple(slots))


class KeptStore:
    """Keys and values set aside, by thread name or context key; the least recently used leave when the limit is reached."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held = 0
        self._items: OrderedDict[Hashable, Kept] = OrderedDict()

    def put(self, key: Hashable, kept: Kept) -> None:
        """Set keys and values aside."""
        self.pop(key)
        self._items[key] = kept
        self._held += kept.block.nbytes
        while self._held > self._limit:
            self.pop(next(iter(self._items)))

    def get(self, key: Hashable) -> Kept | None:
        """Look up without taking away."""
        if key in self._items:
            self._items.move_to_end(key)
        return self._items.get(key)

    def pop(self, key: Hashable) -> Kept | None:
        """Take away."""
        kept = self._items.pop(key, None)
        if kept is not None:
            self._held -= kept.block.nbytes
        return kept

    def clear(self) -> None:
        """Forget everything."""
        self._items.clear()
        self._held = 0

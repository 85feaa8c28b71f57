"""Prefix matching and the prefix cache: how much of a request's context is cached, and what is left to compute.

Example. A thread had a prompt of 10 tokens and got a response of 3. The last sampled token was never fed, so its KV are 12:

    stored:  prefix = [prompt: length 10, response: length 13], length = 12
    context: [prompt, response, observation of 4 tokens]
    plan:    held = 12; to compute: the last token of the response and the 4 new ones, 5 tokens at positions 12 to 16

Had the response been rewritten, only the prompt would match: held = 10, and everything after it is computed. Not so in a
model with gated delta nets: its state is that after all 12 tokens. If it cannot continue from there, it continues from the
state that was stored of the prompt alone, or computes the whole context.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from sensorium.data.lru import LRU
from sensorium.models.delta_net import DeltaState
from sensorium.models.policy import Policy
from sensorium.models.segment_layout import Features, Placement, Slot
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.episode import Routes, Segment
from sensorium.vocabulary.errors import EngineError


@dataclass(frozen=True)
class PrefixEntry:
    """A segment of a cached context: its key, its tokens, and the context's length and rotary position after it."""

    key: str
    tokens: int
    length: int
    position: int

    def matches(self, segment: Segment) -> bool:
        """Whether this is the entry of that very segment."""
        return (self.key, self.tokens) == (segment.key, len(segment.tokens))


@dataclass(frozen=True)
class StoredKV:
    """Keys and values set aside: of a thread between its turns, or of a prompt for later requests of its group.

    ``block`` has ``length`` tokens. After a response that is one less than in ``prefix``: the last sampled token was
    never fed. A prompt is stored with ``hidden_H`` of its last token, so that the next request computes nothing of it.
    ``states`` are those of delta nets after exactly ``length`` tokens, in models that have some. ``routes`` are of a
    prompt, from its first token on: a thread's are in its responses.
    """

    prefix: tuple[PrefixEntry, ...]
    length: int
    block: Tensor
    hidden_H: Tensor | None = None
    states: tuple[DeltaState, ...] = ()
    routes: Routes | None = None

    @property
    def nbytes(self) -> int:
        """Memory of keys, values and states."""
        routes = 0 if self.routes is None else len(self.routes.context)
        return self.block.nbytes + routes + sum(one.window_BWC.nbytes + one.state_BGKV.nbytes for one in self.states)


@dataclass(frozen=True)
class UncachedSuffix:
    """The tokens of a context to compute, right after its ``held`` cached ones. ``prefix`` describes the whole context."""

    prefix: tuple[PrefixEntry, ...]
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


def plan(
    policy: Policy, context: Sequence[Segment], prefix: Sequence[PrefixEntry] = (), held: int = 0, *, whole: bool = False
) -> UncachedSuffix:
    """What is left to compute of a context when ``held`` tokens of a thread with segments ``prefix`` are cached.

    ``whole``: all of these tokens are used or none, for what is cached includes a state after the last of them.
    """
    suffix = _plan(policy, context, prefix, held)
    return _plan(policy, context, (), 0) if whole and suffix.held != held else suffix


def _plan(policy: Policy, context: Sequence[Segment], prefix: Sequence[PrefixEntry], held: int) -> UncachedSuffix:
    same = _common_segments(prefix, context)
    held = min(held, prefix[same - 1].length if same else 0)
    if same == len(context) and same:
        held = min(held, prefix[same - 1].length - 1)  # the last token must be fed: its hidden state gives the next token
    first = next((i for i in range(same) if prefix[i].length > held), same)  # the first segment that is not wholly cached
    begin = prefix[first - 1] if first else PrefixEntry("", 0, 0, 0)
    entries, ids, positions, slots = list(prefix[:first]), [], [], []
    length, position = begin.length, begin.position
    for segment in context[first:]:
        layout = policy.chat.layout(segment)
        ids.append(layout.ids_T)
        positions.append(layout.positions_3T + position)
        slots += [slot.moved(length - begin.length) for slot in layout.slots]
        length += len(layout)
        position += layout.advance
        entries.append(PrefixEntry(segment.key, len(segment.tokens), length, position))
    cut = held - begin.length  # cached tokens of the first segment
    if any(slot.start < cut for slot in slots):
        cut, held = 0, begin.length  # never start in the middle of a segment's media
    if length == held:
        raise EngineError("a context without tokens: there is nothing to continue.")
    slots = [slot.moved(-cut) for slot in slots]
    return UncachedSuffix(tuple(entries), held, torch.cat(ids)[cut:], torch.cat(positions, 1)[:, cut:], tuple(slots))


def _common_segments(prefix: Sequence[PrefixEntry], context: Sequence[Segment]) -> int:
    """How many segments at the start are the same in both."""
    pairs = zip(prefix, context, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0].matches(pair[1]), pairs))


class PrefixCache(LRU[Hashable, StoredKV]):
    """Stored keys and values, by thread name or context key, within a bound on bytes."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes, lambda stored: stored.nbytes)

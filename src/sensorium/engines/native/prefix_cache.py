"""Prefix matching and the prefix cache: how much of a request's context is cached, and what is left to compute; the
features of its media, encoded once per policy version.

Example. A thread had a prompt of 10 tokens and got a response of 3. The last sampled token was never fed, so its KV are
12:

    stored:  prefix = [prompt: length 10, response: length 13], length = 12
    context: [prompt, response, observation of 4 tokens]
    plan:    held = 12; to compute: the last token of the response and the 4 new ones, 5 tokens at positions 12 to 16

Had the response been rewritten, only the prompt would match: held = 10, and everything after it is computed. Not so in
a model with gated delta nets: its state is that after all 12 tokens. If it cannot continue from there, it continues
from the state that was stored of the prompt alone, or computes the whole context.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sensorium.data.lru import LRU
from sensorium.engines.scheduler import Job
from sensorium.models.attention import Attention
from sensorium.models.delta_net import DeltaState
from sensorium.models.experts import RouterOutput
from sensorium.models.policy import Policy
from sensorium.models.segment_layout import Features, Placement, Slot, sent_to
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.episode import Routes, Segment
from sensorium.vocabulary.errors import EngineError, SensoriumError


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


class FeatureCache:
    """Features of media under the current weights: each distinct medium goes through the tower once per version."""

    def __init__(self, policy: Policy, limit_bytes: int) -> None:
        self.encoded = 0
        self._policy = policy
        self._items: LRU[Media, Features] = LRU(limit_bytes, lambda features: features.nbytes)

    def get(self, media: Sequence[Media]) -> tuple[dict[Media, Features], dict[Media, SensoriumError]]:
        """Features of media, those missing in one tower pass; and the errors of those that have none."""
        missing = [item for item in dict.fromkeys(media) if item not in self._items]
        made, errors = self._encode(missing)
        known = {item: found for item in media if (found := self._items.get(item)) is not None}
        for item, features in made.items():
            self._items.put(item, features)
        return made | known, errors

    def _encode(self, media: list[Media]) -> tuple[dict[Media, Features], dict[Media, SensoriumError]]:
        if not media:
            return {}, {}
        try:
            made = self._policy.encode(media)
        except SensoriumError as error:
            if len(media) == 1:
                return {}, {media[0]: error}
            # One bad medium must not cost the others: find it by encoding one at a time.
            made = {}
            errors: dict[Media, SensoriumError] = {}
            for item in media:
                one, wrong = self._encode([item])
                made |= one
                errors |= wrong
            return made, errors
        self.encoded += len(made)
        return made, {}

    def clear(self) -> None:
        """Forget the features: the weights changed."""
        self._items.clear()


def check_features(
    suffix: UncachedSuffix | None, features: Mapping[Media, Features], errors: Mapping[Media, SensoriumError]
) -> None:
    """Raise what is wrong with the media of a context: the tower's error, or a span that does not fit its features."""
    for slot in suffix.slots if suffix is not None else ():
        if slot.media in errors:
            raise errors[slot.media]
        slot.place(features[slot.media])


# Padded tokens of one forward, and entries of the mask of continued rows. A GPU takes as long for few tokens as for many.
CHUNK = {"cuda": (24576, 1 << 26), "cpu": (8192, 1 << 24)}


class PrefillRows(Protocol):
    """Where the keys and values of prefilled rows go."""

    @property
    def device(self) -> torch.device: ...

    def put(self, row: int, stored: Tensor, length: int, states: Sequence[DeltaState]) -> None: ...

    def attention(self, first: int, held: Sequence[int], new: Sequence[int]) -> Attention: ...


class PrefillCounters(Protocol):
    """The counters that a prefill adds to."""

    prefills: int
    prefill_tokens: int
    extensions: int
    extension_tokens: int


@dataclass
class SharedContext:
    """A distinct context of a tick and the requests that share it.

    ``stored`` is copied into the row before ``suffix`` is computed. Without a suffix, the stored prompt is whole.
    ``routes``: of the context, as far as they are known, once it is computed.
    """

    key: object
    prefix: tuple[PrefixEntry, ...]
    suffix: UncachedSuffix | None
    stored: StoredKV | None
    jobs: list[Job]
    routes: Routes | None = None

    @classmethod
    def plan(cls, policy: Policy, job: Job, key: object, stored: StoredKV | None) -> "SharedContext":
        """What a request's context needs, given what was stored of its thread or prompt."""
        if stored is None:
            suffix = plan(policy, job.request.context)
            return cls(key, suffix.prefix, suffix, None, [job])
        if stored.hidden_H is not None and len(stored.prefix) == len(job.request.context):
            return cls(key, stored.prefix, None, stored, [job])
        suffix = plan(policy, job.request.context, stored.prefix, stored.length, whole=bool(stored.states))
        return cls(key, suffix.prefix, suffix, stored if suffix.held else None, [job])

    @property
    def shareable(self) -> bool:
        """Whether another thread can have the same context: one without the unique words of a model."""
        return all(segment.author == "environment" for segment in self.jobs[0].request.context)

    def whole(self, block: Tensor, hidden_H: Tensor, states: tuple[DeltaState, ...]) -> StoredKV:
        """What is stored of it for later requests, once it is computed."""
        routes = self.routes if self.routes is not None and self.routes.start == 0 else None
        return StoredKV(self.prefix, self.prefix[-1].length, block, hidden_H, states, routes)

    @property
    def media(self) -> tuple[Media, ...]:
        """The media whose features it needs."""
        return tuple(slot.media for slot in self.suffix.slots) if self.suffix is not None else ()

    def work(self) -> tuple[int, int]:
        """Sorting key: fresh contexts first, then continued ones, longest first, then those with nothing to compute."""
        if self.suffix is None:
            return 2, 0
        return (1 if self.suffix.held else 0), -self.suffix.ids_T.shape[0]


class RouteRecorder:
    """Records which experts tokens are sent to, as bytes."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        routers: list[Any] = policy.routers
        self.layers, self.top_k = len(routers), policy.experts_per_token
        self.dtype = torch.uint8 if max(router.num_experts for router in routers) <= 256 else torch.int16

    def watch(self) -> AbstractContextManager[list[RouterOutput]]:
        """Collects what routers decide in the pass inside."""
        return self._policy.watch_routers()

    def buffer(self, rows: int) -> Tensor:
        """Where a decode step writes the routes [B, L, K] of the tokens that it feeds."""
        return torch.zeros(rows, self.layers, self.top_k, dtype=self.dtype, device=self._policy.device)

    def rows_of(self, seen: Sequence[RouterOutput], lengths: Sequence[int]) -> list[bytes]:
        """The routes of each row of a padded pass, without the padding."""
        ids_BTLK = torch.stack([one.ids_TK for one in seen], 1).to(self.dtype).unflatten(0, (len(lengths), -1)).cpu()
        return [ids_BTLK[i, :length].numpy().tobytes() for i, length in enumerate(lengths)]

    def continued(self, entry: SharedContext, computed: bytes) -> Routes:
        """The routes of a context whose last tokens were computed now. A thread's earlier responses have those before."""
        assert entry.suffix is not None
        held, width = entry.suffix.held, self.dtype.itemsize
        before = entry.stored.routes if entry.stored is not None else None
        if before is None or not held:
            return Routes(held, computed, b"", self.layers, self.top_k, width)
        return replace(before, context=before.context[: (held - before.start) * before.row] + computed)


@contextmanager
def recording_routes(policy: Policy, routes_BLK: Tensor | None) -> Iterator[None]:
    """Writes what routers decide in the decode step inside into the buffer of its rows, if there is one."""
    if routes_BLK is None:
        yield
        return
    with policy.watch_routers() as seen:
        yield
    routes_BLK.copy_(torch.stack([one.ids_TK for one in seen], 1))


def prefill(
    policy: Policy,
    cache: PrefillRows,
    entries: Sequence[SharedContext],
    first: int,
    features: Mapping[Media, Features],
    counters: PrefillCounters,
    recorder: RouteRecorder | None = None,
) -> Tensor:
    """Compute entry i (sorted by ``work``) in cache row ``first + i``; the hidden state of each context's last token.

    With a ``recorder``, entries get their routes.
    """
    for i, entry in enumerate(entries):
        if entry.stored is not None:
            held = entry.suffix.held if entry.suffix else entry.stored.length
            cache.put(first + i, entry.stored.block, held, entry.stored.states)
    suffixes = [entry.suffix for entry in entries if entry.suffix is not None]
    hidden = []
    for start, chunk in _chunks(suffixes, *CHUNK.get(cache.device.type, CHUNK["cuda"])):
        with nullcontext() if recorder is None else recorder.watch() as seen:
            hidden.append(_forward(policy, cache, chunk, first + start, features))
        if recorder is not None and seen is not None:
            computed = recorder.rows_of(seen, [suffix.ids_T.shape[0] for suffix in chunk])
            for entry, rows in zip(entries[start : start + len(chunk)], computed, strict=True):
                entry.routes = recorder.continued(entry, rows)
        new = sum(suffix.ids_T.shape[0] for suffix in chunk)
        if chunk[0].held:
            counters.extensions += len(chunk)
            counters.extension_tokens += new
        else:
            counters.prefills += len(chunk)
            counters.prefill_tokens += new
    for entry in entries:
        if entry.suffix is None and entry.stored is not None:
            entry.routes = entry.stored.routes
    hidden += [
        entry.stored.hidden_H[None]
        for entry in entries
        if not entry.suffix and entry.stored and entry.stored.hidden_H is not None
    ]
    return torch.cat(hidden)


def _chunks(suffixes: Sequence[UncachedSuffix], tokens: int, scores: int) -> Iterator[tuple[int, list[UncachedSuffix]]]:
    """Runs of suffixes of one kind, none shorter than half the longest, within a bound of padded tokens."""
    start = 0
    chunk: list[UncachedSuffix] = []
    for i, suffix in enumerate(suffixes):
        if chunk:
            longest = chunk[0].ids_T.shape[0]
            padded = (len(chunk) + 1) * longest
            seen = max(other.held for other in (*chunk, suffix)) + longest
            fits = padded <= tokens and 2 * suffix.ids_T.shape[0] >= longest
            if not fits or bool(suffix.held) != bool(chunk[0].held) or (suffix.held and padded * seen > scores):
                yield start, chunk
                start, chunk = i, []
        chunk.append(suffix)
    if chunk:
        yield start, chunk


def _forward(
    policy: Policy, cache: PrefillRows, chunk: Sequence[UncachedSuffix], first: int, features: Mapping[Media, Features]
) -> Tensor:
    device = cache.device
    ids_BT = pad_sequence([suffix.ids_T for suffix in chunk], batch_first=True, padding_value=policy.chat.stop_ids[0])
    positions_3BT = pad_sequence([suffix.positions_3T.T for suffix in chunk], batch_first=True).permute(2, 0, 1)
    attention = cache.attention(first, [suffix.held for suffix in chunk], [suffix.ids_T.shape[0] for suffix in chunk])
    placements = [place for row, suffix in enumerate(chunk) for place in suffix.placements(row, features)]
    hidden_BTH = policy.language(sent_to(device, ids_BT), sent_to(device, positions_3BT), attention, placements)
    last_B = sent_to(device, torch.tensor([suffix.ids_T.shape[0] - 1 for suffix in chunk]))
    return hidden_BTH[torch.arange(len(chunk), device=device), last_B]

"""Features of media for prefill: encoded once per policy version, checked against the spans that take them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sensorium.data.lru import LRU
from sensorium.engines.native.prefix_cache import PrefixEntry, StoredKV, UncachedSuffix, plan
from sensorium.engines.scheduler import Job
from sensorium.models.attention import Attention
from sensorium.models.delta_net import DeltaState
from sensorium.models.experts import RouterOutput
from sensorium.models.policy import Policy
from sensorium.models.segment_layout import Features, sent_to
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.episode import Routes
from sensorium.vocabulary.errors import SensoriumError


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


CHUNK_TOKENS = 8192  # padded tokens of one forward
CHUNK_SCORES = 1 << 24  # entries of the mask of continued rows


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
    for start, chunk in _chunks(suffixes):
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


def _chunks(suffixes: Sequence[UncachedSuffix]) -> Iterator[tuple[int, list[UncachedSuffix]]]:
    """Runs of suffixes of one kind, none shorter than half the longest, within a bound of padded tokens."""
    start = 0
    chunk: list[UncachedSuffix] = []
    for i, suffix in enumerate(suffixes):
        if chunk:
            longest = chunk[0].ids_T.shape[0]
            padded = (len(chunk) + 1) * longest
            seen = max(other.held for other in (*chunk, suffix)) + longest
            fits = padded <= CHUNK_TOKENS and 2 * suffix.ids_T.shape[0] >= longest
            if not fits or bool(suffix.held) != bool(chunk[0].held) or (suffix.held and padded * seen > CHUNK_SCORES):
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

"""Prefill: the contexts of a tick, each distinct one computed once, in padded chunks of similar length."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sensorium.engines.native.contexts import Fill, Kept, Known, plan
from sensorium.engines.scheduler import Job
from sensorium.models.attention import Attention
from sensorium.models.layout import Features
from sensorium.models.policy import Policy
from sensorium.vocabulary.content import Media

CHUNK_TOKENS = 8192  # padded tokens of one forward
CHUNK_SCORES = 1 << 24  # entries of the mask of continued rows


class PrefillRows(Protocol):
    """Where the keys and values of prefilled rows go."""

    @property
    def device(self) -> torch.device: ...

    def put(self, row: int, kept: Tensor, length: int) -> None: ...

    def attention(self, first: int, held: Sequence[int], new: Sequence[int]) -> Attention: ...


class PrefillCounters(Protocol):
    """The counters that a prefill moves."""

    prefills: int
    prefill_tokens: int
    extensions: int
    extension_tokens: int


@dataclass
class Entry:
    """A distinct context of a tick and the requests that share it.

    ``kept`` is laid into the row before ``fill`` is computed; no fill: the prompt is kept whole, its last hidden state too.
    """

    key: object
    known: tuple[Known, ...]
    fill: Fill | None
    kept: Kept | None
    jobs: list[Job]

    @classmethod
    def plan(cls, policy: Policy, job: Job, key: object, kept: Kept | None) -> "Entry":
        """What a request's context needs, given what was kept of its thread or prompt."""
        if kept is not None and kept.hidden_H is not None:
            return cls(key, kept.known, None, kept, [job])
        fill = plan(policy, job.request.context, kept.known, kept.length) if kept else plan(policy, job.request.context)
        return cls(key, fill.known, fill, kept if fill.held else None, [job])

    @property
    def shareable(self) -> bool:
        """Whether another thread can have the same context: one without the unique words of a model."""
        return all(segment.author == "environment" for segment in self.jobs[0].request.context)

    @property
    def media(self) -> tuple[Media, ...]:
        """The media whose features it needs."""
        return tuple(slot.media for slot in self.fill.slots) if self.fill is not None else ()

    def work(self) -> tuple[int, int]:
        """Sorting key: fresh contexts first, then continued ones, longest first, then those with nothing to compute."""
        if self.fill is None:
            return 2, 0
        return (1 if self.fill.held else 0), -self.fill.ids_T.shape[0]


def prefill(
    policy: Policy,
    cache: PrefillRows,
    entries: Sequence[Entry],
    first: int,
    features: Mapping[Media, Features],
    counters: PrefillCounters,
) -> Tensor:
    """Compute entry i (sorted by ``work``) in cache row ``first + i``; the hidden state of each context's last token."""
    for i, entry in enumerate(entries):
        if entry.kept is not None:
            cache.put(first + i, entry.kept.block, entry.fill.held if entry.fill else entry.kept.length)
    fills = [entry.fill for entry in entries if entry.fill is not None]
    hidden = []
    for start, chunk in _chunks(fills):
        hidden.append(_forward(policy, cache, chunk, first + start, features))
        new = sum(fill.ids_T.shape[0] for fill in chunk)
        if chunk[0].held:
            counters.extensions += len(chunk)
            counters.extension_tokens += new
        else:
            counters.prefills += len(chunk)
            counters.prefill_tokens += new
    hidden += [
        entry.kept.hidden_H[None] for entry in entries if not entry.fill and entry.kept and entry.kept.hidden_H is not None
    ]
    return torch.cat(hidden)


def _chunks(fills: Sequence[Fill]) -> Iterator[tuple[int, list[Fill]]]:
    """Runs of fills of one kind, none shorter than half the longest, within a bound of padded tokens."""
    start = 0
    chunk: list[Fill] = []
    for i, fill in enumerate(fills):
        if chunk:
            longest = chunk[0].ids_T.shape[0]
            padded = (len(chunk) + 1) * longest
            seen = max(other.held for other in (*chunk, fill)) + longest
            fits = padded <= CHUNK_TOKENS and 2 * fill.ids_T.shape[0] >= longest
            if not fits or bool(fill.held) != bool(chunk[0].held) or (fill.held and padded * seen > CHUNK_SCORES):
                yield start, chunk
                start, chunk = i, []
        chunk.append(fill)
    if chunk:
        yield start, chunk


def _forward(
    policy: Policy, cache: PrefillRows, chunk: Sequence[Fill], first: int, features: Mapping[Media, Features]
) -> Tensor:
    device = cache.device
    ids_BT = pad_sequence([fill.ids_T for fill in chunk], batch_first=True, padding_value=policy.chat.stop_ids[0])
    positions_BT3 = pad_sequence([fill.positions_3T.T for fill in chunk], batch_first=True)
    attention = cache.attention(first, [fill.held for fill in chunk], [fill.ids_T.shape[0] for fill in chunk])
    placements = [place for row, fill in enumerate(chunk) for place in fill.placements(row, features)]
    hidden_BTH = policy.language(ids_BT.to(device), positions_BT3.permute(2, 0, 1).to(device), attention, placements)
    last_B = torch.tensor([fill.ids_T.shape[0] - 1 for fill in chunk], device=device)
    return hidden_BTH[torch.arange(len(chunk), device=device), last_B]

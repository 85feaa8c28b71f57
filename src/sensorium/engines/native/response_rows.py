"""Rows: the responses being written, as the host knows them and as the device holds them."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sensorium.engines.native.key_values import KVCache, causal_bias, write_places
from sensorium.engines.native.prefix_cache import PrefixEntry
from sensorium.engines.native.sampler import SamplingRows, signed64, uniforms
from sensorium.engines.protocol import FinishReason
from sensorium.engines.scheduler import Job, WrittenPart
from sensorium.models.policy import Policy
from sensorium.vocabulary.episode import Routes

AHEAD = 16  # steps whose random numbers are computed at once


class StopStrings:
    """Finds stop strings in a stream of bytes, across token borders, without looking back further than the longest."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop.encode() for stop in stops if stop]
        self._memory = max((len(stop) for stop in self._stops), default=1) - 1
        self._tail = b""

    def feed(self, new: bytes) -> bool:
        """True as soon as a stop string is complete."""
        text = self._tail + new
        self._tail = text[max(0, len(text) - self._memory) :]
        return any(stop in text for stop in self._stops)


class Row:
    """One response being written after a context of ``length`` tokens whose next rotary position is ``position``.

    With n tokens drawn, the last of them goes to cache entry ``length + n - 1`` when it is fed. Of a response that is
    carried over from earlier weights, the context holds the ``before`` tokens that those wrote.
    """

    def __init__(
        self,
        job: Job,
        prefix: tuple[PrefixEntry, ...],
        limit: int,
        stop_ids: frozenset[int],
        token_bytes: Callable[[int], bytes] | None = None,
    ) -> None:
        self.job = job
        self.prefix = prefix
        self.length = prefix[-1].length
        self.position = prefix[-1].position
        self.sampling = job.request.sampling
        self.before = sum(len(part.tokens) for part in job.carried)
        self.budget = min(self.sampling.max_new_tokens - self.before, limit - self.length)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.sampled_logprobs: list[float] = []
        self.context_routes: Routes | None = None  # None: they are not recorded
        self.own_routes: list[bytes] = []  # of the tokens that were fed
        self._stop_ids = stop_ids if self.sampling.stop_tokens else frozenset()
        self._stops = StopStrings(self.sampling.stop) if self.sampling.stop else None
        if self._stops is not None and token_bytes is not None:
            self._stops.feed(b"".join(token_bytes(token) for part in job.carried for token in part.tokens))

    def carry(self, version: int) -> None:
        """Hand what these weights wrote to the job, which is then admitted again."""
        if self.tokens:
            self.job.carried = self.parts(version)

    def parts(self, version: int) -> tuple[WrittenPart, ...]:
        """All that was written, by the weights that wrote it; these are of ``version``."""
        begun = self.context_routes
        routes = None if begun is None else replace(begun, own=b"".join(self.own_routes))
        own = WrittenPart(version, tuple(self.tokens), tuple(self.logprobs), tuple(self.sampled_logprobs), routes)
        return (*self.job.carried, own)

    def take(self, token: int, logprob: float, sampled: float, policy: Policy) -> FinishReason | None:
        """Append a sampled token; the reason why the response ends, if it does."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.sampled_logprobs.append(sampled)
        if token in self._stop_ids or (self._stops is not None and self._stops.feed(policy.chat.token_bytes(token))):
            return "stop"
        return "length" if len(self.tokens) >= self.budget else None

    def prefix_after(self, key: str) -> tuple[PrefixEntry, ...]:
        """The thread's segments with the response behind the context."""
        drawn = len(self.tokens)
        context = self.prefix[:-1] if self.before else self.prefix  # what was carried over is part of the response
        return (*context, PrefixEntry(key, self.before + drawn, self.length + drawn, self.position + drawn))

    @property
    def cached(self) -> int:
        """Tokens of the thread in the cache: all but the last drawn, which was not fed yet."""
        return self.length + len(self.tokens) - 1


class Batch:
    """The rows on the device: row i of every tensor is row i of the cache. Laid out anew when rows come or go.

    A step reads and moves on these tensors in place. ``reach`` is how far the longest row has got in the cache. Random
    numbers are functions of a row's key and its token's place, so those of the next steps are computed together.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        cache: KVCache,
        forbidden_F: Tensor,
        stop_S: Tensor,
        vocab_size: int,
        routes_BLK: Tensor | None = None,
    ) -> None:
        device = forbidden_F.device
        table = [[row.tokens[-1] if row.tokens else 0 for row in rows]]
        table.append([row.position + len(row.tokens) - 1 for row in rows])
        table.append([row.cached for row in rows])
        table.append([signed64(row.job.request.key) for row in rows])
        table.append([row.before + len(row.tokens) for row in rows])
        self.tokens_B, self.positions_B, lengths_B, self._keys_B, self._counts_B = torch.tensor(
            table, device=device
        ).unbind(0)
        self._uniforms_TB = torch.empty(0, len(rows), dtype=torch.float64)
        self.block, self.states = cache.block, cache.states
        self.routes_BLK = torch.empty(len(rows), 0, 0) if routes_BLK is None else routes_BLK
        self.reach = max(table[2]) + 1
        self.write_N = write_places(cache, 0, lengths_B, 1)
        self.bias_B11S = causal_bias(cache, lengths_B, 1, cache.capacity)
        self.see_B = torch.arange(len(rows), device=device) * cache.capacity + lengths_B
        self.sampling = SamplingRows.of([row.sampling for row in rows], forbidden_F, stop_S, vocab_size)

    def fed(self) -> tuple[Tensor, ...]:
        """What ``steps.feed`` takes."""
        bias_B11S = self.bias_B11S[..., : self.reach]
        return self.tokens_B, self.positions_B, self.block, self.write_N, bias_B11S, self.routes_BLK, *self.states.tensors

    def drawn(self) -> tuple[Tensor, ...]:
        """What ``steps.draw`` takes besides logits and sampling parameters."""
        return self.tokens_B, self.positions_B, self.write_N, self.see_B, self.bias_B11S

    def next_uniforms(self) -> Tensor:
        """Random numbers [B], for the next token of each row."""
        if not len(self._uniforms_TB):
            ahead_T1 = torch.arange(AHEAD, device=self._keys_B.device)[:, None]
            self._uniforms_TB = uniforms(self._keys_B, self._counts_B + ahead_T1)
            self._counts_B += AHEAD
        taken_B, self._uniforms_TB = self._uniforms_TB[0], self._uniforms_TB[1:]
        return taken_B

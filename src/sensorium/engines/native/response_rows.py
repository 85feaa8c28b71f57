"""Rows: the responses being written, as the host knows them and as the device holds them."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sensorium.engines.native.key_values import KVCache, causal_bias, write_places
from sensorium.engines.native.prefix_cache import PrefixEntry
from sensorium.engines.native.sampler import SamplingRows, signed64, uniforms
from sensorium.engines.protocol import FinishReason, Response
from sensorium.engines.scheduler import Job
from sensorium.models.policy import Policy
from sensorium.vocabulary.episode import Routes, VersionSpan

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

    With n tokens drawn, the last of them goes to cache entry ``length + n - 1`` when it is fed.
    """

    def __init__(
        self,
        job: Job,
        prefix: tuple[PrefixEntry, ...],
        limit: int,
        stop_ids: frozenset[int],
    ) -> None:
        self.job = job
        self.prefix = prefix
        self.length = prefix[-1].length
        self.position = prefix[-1].position
        self.sampling = job.request.sampling
        self.budget = min(self.sampling.max_new_tokens, limit - self.length)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.sampled_logprobs: list[float] = []
        self.context_routes: Routes | None = None  # None: they are not recorded
        self.own_routes: list[bytes] = []  # of the tokens that were fed
        self._stop_ids = stop_ids if self.sampling.stop_tokens else frozenset()
        self._stops = StopStrings(self.sampling.stop) if self.sampling.stop else None
        self._spans: list[VersionSpan] = []  # of earlier weights

    def end_version(self, version: int) -> None:
        """Weights of ``version`` wrote what follows the earlier spans; other weights go on."""
        start = self._spans[-1].end if self._spans else 0
        if len(self.tokens) > start:
            self._spans.append(VersionSpan(version, start, len(self.tokens)))

    def response(self, policy: Policy, version: int, finish: FinishReason) -> Response:
        """The whole response, whose last tokens are of ``version``. Of several, it says which wrote which tokens."""
        self.end_version(version)
        versions = tuple(self._spans) if len(self._spans) > 1 else ()
        name, first = self.job.request.name, self._spans[0].version
        segment = policy.chat.written(self.tokens, self.logprobs, self.sampled_logprobs, name, first, versions)
        if self.context_routes is not None:
            segment = replace(segment, routes=replace(self.context_routes, own=b"".join(self.own_routes)))
        return Response(segment, finish, versions)

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
        return (*self.prefix, PrefixEntry(key, drawn, self.length + drawn, self.position + drawn))

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
        table.append([len(row.tokens) for row in rows])
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

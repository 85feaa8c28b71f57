"""Attention over trees laid out flat: every run of tokens sees its ancestors' keys and values, and itself causally.

The mask of a tree is block-sparse: a dense one costs (P + G·R)² for a prompt of P and G responses of R tokens. Here runs
are batched into rectangles instead, queries [R, Q] against keys [R, P + Q], with the shared prefix gathered for each run.
So sharing a prefix never costs more than repeating it, and no group need be split for the mask's sake.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from sensorium.kernels.first_use import fall_back, trying
from sensorium.kernels.matched_ops import KeyStore, MatchedOps, QueryTiles, queries_of_tile, with_gradient_of
from sensorium.learner.token_runs import Levels, TokenRun, arrange, arrange_levels, nearest_above, take
from sensorium.learner.tree_states import TreeStates
from sensorium.models.attention import finer, masked_attention, one_row
from sensorium.models.delta_net import DeltaTokens


class TreeAttention:
    """Attention of one flat row [1, T] that holds trees, their runs arranged in batches."""

    def __init__(self, batches: Sequence[Sequence[TokenRun]], device: torch.device) -> None:
        self._rectangles = [_rectangle(runs, device) for runs in batches]
        self._sizes = [sum(run.length for run in runs) for runs in batches]
        self._batches, self._device = batches, device
        self._states: TreeStates | None = None

    def __call__(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float) -> Tensor:
        """Attend; [1, T, H, D]."""
        query_THD, key_TKD, value_TKD = (one_row(x) for x in (query_BHTD, key_BKTD, value_BKTD))
        return self.attend(query_THD, key_TKD, value_TKD, key_TKD, value_TKD, scaling)[None]

    def delta(self, net: Any, tokens: DeltaTokens) -> Tensor:
        """The gated delta nets of models that have some; [1, T, G, V]."""
        if self._states is None:
            self._states = TreeStates([run for runs in self._batches for run in runs], self._device)
        return self._states(net, tokens)

    def attend(
        self, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, scaling: float
    ) -> Tensor:
        """Attend; [T, H, D]. Ancestors are found among ``keys_SKD`` and ``values_SKD``."""
        parts = zip(*(x.split(self._sizes) for x in (query_THD, key_TKD, value_TKD)), self._rectangles, strict=True)
        outs = []
        for query_NHD, key_NKD, value_NKD, rectangle in parts:
            query_RHQD = rectangle.lay(query_NHD)
            key_RKSD = rectangle.lay(key_NKD, keys_SKD)
            value_RKSD = rectangle.lay(value_NKD, values_SKD)
            out_RQHD = masked_attention(query_RHQD, key_RKSD, value_RKSD, scaling, rectangle.mask)
            outs.append(rectangle.flatten(out_RQHD))
        return torch.cat(outs)


@dataclass(frozen=True)
class _Rectangle:
    """R runs padded to Q tokens of their own below P tokens of ancestors.

    ``own_RQ`` and ``real_N`` (None: nothing is padded) take the runs' N tokens to the rectangle and back; ``above_RP`` are
    places in the whole row. ``mask`` [R or 1, 1, Q, P + Q]; None: causal.
    """

    rows: int
    own_RQ: Tensor | None
    real_N: Tensor | None
    above_RP: Tensor | None
    mask: Tensor | None

    def lay(self, own_NHD: Tensor, all_THD: Tensor | None = None) -> Tensor:
        """[R, H, Q, D] of the runs' own tokens, or [R, H, P + Q, D] with their ancestors' before them."""
        own_RQHD = own_NHD.unflatten(0, (self.rows, -1)) if self.own_RQ is None else take(own_NHD, self.own_RQ)
        if all_THD is not None and self.above_RP is not None:
            own_RQHD = torch.cat([take(all_THD, self.above_RP), own_RQHD], dim=1)
        return own_RQHD.transpose(1, 2)

    def flatten(self, out_RQHD: Tensor) -> Tensor:
        """[N, H, D] without padding."""
        out_NHD = out_RQHD.flatten(0, 1)
        return out_NHD if self.real_N is None else out_NHD.index_select(0, self.real_N)


def _rectangle(runs: Sequence[TokenRun], device: torch.device) -> _Rectangle:
    lengths_R = np.array([run.length for run in runs])
    width = int(lengths_R.max())
    own_RQ = real_N = None
    if not (lengths_R == width).all():
        offsets_R = lengths_R.cumsum() - lengths_R
        # Padding repeats a run's last token: as a query its result is dropped, as a key nobody before it sees it.
        index_RQ = offsets_R[:, None] + np.minimum(np.arange(width), lengths_R[:, None] - 1)
        own_RQ = torch.from_numpy(index_RQ).to(device)
        real_N = torch.from_numpy(np.flatnonzero(np.arange(width) < lengths_R[:, None])).to(device)
    prefixes_R = np.array([run.prefix for run in runs])
    above = int(prefixes_R.max())
    if not above:
        return _Rectangle(len(runs), own_RQ, real_N, None, None)
    above_RP = np.zeros((len(runs), above), dtype=np.int64)
    known: dict[TokenRun | None, np.ndarray] = {}
    for row, run in enumerate(runs):
        if run.above not in known:
            known[run.above] = run.ancestors()
        above_RP[row, : run.prefix] = known[run.above]
    mask = torch.from_numpy(_mask(prefixes_R, above, width)).to(device)
    return _Rectangle(len(runs), own_RQ, real_N, torch.from_numpy(above_RP).to(device), mask)


def _mask(prefixes_R: np.ndarray, above: int, width: int) -> np.ndarray:
    """What a run's tokens see: all of its ancestors, and itself causally. One row for all where prefixes are alike."""
    if (prefixes_R == above).all():
        prefixes_R = prefixes_R[:1]
    steps_Q = np.arange(width)
    mask_RQS = np.empty((len(prefixes_R), 1, width, above + width), dtype=bool)
    mask_RQS[..., :above] = np.arange(above) < prefixes_R[:, None, None, None]
    mask_RQS[..., above:] = steps_Q <= steps_Q[:, None]
    return mask_RQS


# cuDNN makes a plan for every pair of sizes, which takes 38 ms forward and 45 backward on an H200: it is for sizes that
# come again. So that they do, queries are filled up with zeros to one of few ``sizes``: those neither give nor take a
# gradient. No mask, or a causal one for gradients. Axes: Q queries, S keys, H query heads, K key heads, D.


def block_attention(
    query_QHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scaling: float, size: int
) -> tuple[Tensor, Tensor]:
    """The result [Q, H, D] and its log-sum-exp [H, Q], computed as ``size`` queries."""
    count = len(query_QHD)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *map(_batched, (_filled(query_QHD, size), key_SKD, value_SKD)), None, True, 0.0, False, False, scale=scaling
    )
    return out[0].transpose(0, 1)[:count].contiguous(), lse.reshape(-1, size)[:, :count]


def block_gradients(
    saved: Sequence[Tensor], given_QHD: Tensor, scaling: float, size: int, causal: bool = False
) -> list[Tensor]:
    """Gradients of queries [Q, H, D], keys [S, K, D] and values, from these, a result and its log-sum-exp [H, Q].

    The log-sum-exp may be of more keys than these: then these are what a part of the result has seen.
    """
    query_QHD, key_SKD, value_SKD, out_QHD, lse_HQ = saved
    count, none = len(given_QHD), _no_cudnn_dropout(given_QHD.device)
    given, query, out = (_batched(_filled(x, size)) for x in (given_QHD, query_QHD, out_QHD))
    key, value, lse = _batched(key_SKD), _batched(value_SKD), pad(lse_HQ, (0, size - count))
    found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        given, query, key, value, out, lse[None, ..., None], none, none, None, None, None, size, key.shape[2], 0.0, causal,
        scale=scaling,
    )  # fmt: skip
    queries, keys, values = (gradient[0].transpose(0, 1) for gradient in found)
    return [queries[:count], keys, values]


def _filled(x_QHD: Tensor, size: int) -> Tensor:
    """With zeros for queries that are not there."""
    return x_QHD if len(x_QHD) == size else pad(x_QHD, (0, 0, 0, 0, 0, size - len(x_QHD)))


def _batched(x_NHD: Tensor) -> Tensor:
    """[1, H, N, D], not a copy."""
    return x_NHD.transpose(0, 1)[None]


@lru_cache(maxsize=16)
def _no_cudnn_dropout(device: torch.device) -> Tensor:
    """The state of random numbers that a call without dropout takes and does not read."""
    return torch.zeros((), dtype=torch.int64, device=device)


# Worked example. Prompts P and Q, P with responses A and B, Q with C, stand in the row as ``P Q | A B C``, level by
# level. own: each of P, Q, A, B, C sees itself causally one call above: the stretches (A B) and (C) see the stretches
# (P) and (Q) whole one call for each pair of levels The parts of a token that sees both are weighted by the exponential
# of their log-sum-exp. In the backward pass each call is given the merged result and log-sum-exp, which is all that
# flash attention needs to know of the other. The gradients of a prompt's keys are summed over its responses inside the
# kernel, in float32. The forward pass of bfloat16 runs in float16 (``models.attention.finer``). What long responses see
# of a long prompt is computed by cuDNN (``block_attention``), where sizes come again, and so are the gradients of what
# a long prompt sees of itself; not that itself, since flash attention leaves the bits that the engine's prefill leaves.
# Axes: T tokens, H query heads, K key heads, D.


# How far results and gradients in 16 bits may be from float32 attention over the same inputs, relative to the largest.
BOUND = 0.02
TRIAL_SEED = 0
# Blocks are filled up to a multiple of so many queries, have so many times as many at most, and at least so many keys. A
# plan of cuDNN's for a pair of sizes takes 38 ms forward and 45 backward, and a block of 2,048 queries over 4,154 keys
# gains 0.12 and 0.3: one that comes OFTEN (in four micro-batches of 36 layers) has lost as much backward, and will soon
# have. A rest of 504 queries would take flash attention as long as cuDNN takes for 1,536. Gradients of a run over itself
# are a block of their own where it has as many tokens as LONG blocks.
BLOCK, LONGEST, OFTEN, LONG = 512, 4, 144, 2


class Flash(Protocol):
    """Attention over segments [T, H, D], forward with its log-sum-exp [H, T], and backward from a result and its own."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, part: "Part", scaling: float) -> tuple[Tensor, Tensor]: ...

    def backward(self, saved: Sequence[Tensor], gradient: Tensor, part: "Part", scaling: float) -> Sequence[Tensor]: ...


@dataclass(frozen=True)
class Part:
    """One call: segments of the tokens ``queries`` see segments of the tokens ``keys``, both of ends ``…_ends``."""

    queries: slice
    keys: slice | Tensor
    query_ends: Tensor
    key_ends: Tensor
    longest_query: int
    longest_key: int
    causal: bool
    block: int = 0
    """Of one long segment: with how many queries cuDNN may compute it, those at the end zeros."""


class LevelAttention:
    """Attention of one flat row [1, T] that holds trees level by level.

    By flash attention in 16 bits, once that has been held against the attention over rectangles; by rectangles otherwise.
    """

    def __init__(self, levels: Levels, device: torch.device, flash: Flash | None = None, block: int = BLOCK) -> None:
        self._levels, self._device, self._flash = levels, device, flash
        self.own = _own([run for level in levels for run in level], device)
        self.own_apart = [part for level in levels for part in _own_apart(level, device, LONG * block)]
        pairs = [(up, below) for below in range(1, len(levels)) for up in range(below)]
        self.above = [part for pair in pairs for part in _above(levels, *pair, device, block)]
        self._rectangles: tuple[TreeAttention, Tensor, Tensor] | None = None
        self._states: TreeStates | None = None

    def __call__(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float) -> Tensor:
        """Attend; [1, T, H, D]."""
        flash = self._flash
        if flash is None:
            flash = usable(query_BHTD.device, query_BHTD.dtype, query_BHTD.shape[1], *key_BKTD.shape[1::2])
        if flash is None:
            return self.rectangles(query_BHTD, key_BKTD, value_BKTD, scaling)
        flat = (one_row(x).contiguous() for x in (query_BHTD, key_BKTD, value_BKTD))
        out_THD: Tensor = _LevelFlash.apply(*flat, self, flash, scaling)
        return out_THD[None]

    def delta(self, net: Any, tokens: DeltaTokens) -> Tensor:
        """The gated delta nets of models that have some; [1, T, G, V]."""
        if self._states is None:
            self._states = TreeStates([run for level in self._levels for run in level], self._device)
        return self._states(net, tokens)

    def rectangles(self, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float) -> Tensor:
        """The same by the attention over rectangles, whose row stands in another order."""
        if self._rectangles is None:
            self._rectangles = _as_rectangles(self._levels, self._device)
        attention, order_T, back_T = self._rectangles
        query, key, value = (x.index_select(2, order_T) for x in (query_BHTD, key_BKTD, value_BKTD))
        return attention(0, query, key, value, scaling).index_select(1, back_T)


def merge(out_NHD: Tensor, lse_HT: Tensor, more_NHD: Tensor, more_lse_HN: Tensor, start: int) -> None:
    """Add attention over further keys to the result of N tokens, in place; ``start`` is where their log-sum-exps begin."""
    own_HN = lse_HT[:, start : start + len(out_NHD)]
    total_HN = torch.logaddexp(own_HN, more_lse_HN)
    share_NH1 = (more_lse_HN - total_HN).exp().T[..., None]
    wide = share_NH1.dtype
    out_NHD.copy_(torch.lerp(out_NHD.to(wide), more_NHD.to(wide), share_NH1))
    own_HN.copy_(total_HN)


class _LevelFlash(torch.autograd.Function):
    """(queries [T, H, D], keys [T, K, D], values) → attention of every token over itself and what is above it."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, row: LevelAttention, flash: Flash, scaling: float
    ) -> Tensor:
        fine_query, fine_key, fine_value = finer(query), finer(key), finer(value)
        out, lse = flash.forward(fine_query, fine_key, fine_value, row.own, scaling)
        for part in row.above:
            queries, keys, values = fine_query[part.queries], fine_key[part.keys], fine_value[part.keys]
            more, more_lse = flash.forward(queries, keys, values, part, scaling)
            merge(out[part.queries], lse, more, more_lse, part.queries.start)
        out = out.to(query.dtype)
        ctx.row, ctx.flash, ctx.scaling = row, flash, scaling
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        gradient, row = gradients[0].contiguous(), ctx.row

        def of(part: Part) -> Sequence[Tensor]:
            rows = part.queries
            saved = (query[rows], key[part.keys], value[part.keys], out[rows], lse[:, rows].contiguous())
            found: Sequence[Tensor] = ctx.flash.backward(saved, gradient[rows], part, ctx.scaling)
            return found

        own = [of(part) for part in row.own_apart]
        sums = own[0] if len(own) == 1 else [torch.cat(several) for several in zip(*own, strict=True)]
        for part in row.above:
            for summed, more, rows in zip(sums, of(part), (part.queries, part.keys, part.keys), strict=True):
                if isinstance(rows, slice):
                    summed[rows].add_(more)
                else:
                    summed.index_add_(0, rows, more)
        return *sums, None, None, None


class TorchFlash:
    """Torch's own flash attention on CUDA, 16 bits; blocks of sizes that come so often (None: never) by cuDNN."""

    def __init__(self, often: int | None = None) -> None:
        self.often = often
        self._times: Counter[tuple[int, int, bool, bool]] = Counter()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, part: Part, scaling: float) -> tuple[Tensor, Tensor]:
        """The result and its log-sum-exp."""
        if self.leaves_to_cudnn(part):
            return block_attention(query, key, value, scaling, part.block)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, part.query_ends, part.key_ends, part.longest_query, part.longest_key, 0.0, part.causal,
            False, scale=scaling,
        )  # fmt: skip
        assert lse.shape == (query.shape[1], query.shape[0]), f"log-sum-exp of shape {tuple(lse.shape)}"
        return out, lse

    def backward(self, saved: Sequence[Tensor], gradient: Tensor, part: Part, scaling: float) -> Sequence[Tensor]:
        """Gradients of queries, keys and values."""
        if self.leaves_to_cudnn(part, back=True):
            return block_gradients(saved, gradient, scaling, part.block, part.causal)
        unused = _no_dropout(gradient.device)
        found: Sequence[Tensor] = torch.ops.aten._flash_attention_backward(
            gradient, *saved, part.query_ends, part.key_ends, part.longest_query, part.longest_key, 0.0, part.causal,
            unused, unused, scale=scaling,
        )  # fmt: skip
        return found

    def leaves_to_cudnn(self, part: Part, back: bool = False) -> bool:
        """Whether a part is a block of sizes that have come often enough before; counts it."""
        if not part.block or self.often is None:
            return False
        sizes = (part.block, part.longest_key, part.causal, back)
        self._times[sizes] += 1
        return self._times[sizes] > self.often


@lru_cache(maxsize=16)
def _no_dropout(device: torch.device) -> Tensor:
    """The state of random numbers that a call without dropout takes and does not read."""
    return torch.empty(2, dtype=torch.uint64, device=device)


@lru_cache(maxsize=64)
def usable(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, size: int) -> Flash | None:
    """Torch's flash attention where it takes these heads and agrees with float32 attention over rectangles."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    try:
        if find_spec("triton") is None:
            raise ValueError("Triton is not installed")
        if size % 8 or size > 256:
            raise ValueError(f"heads of {size} are not taken by flash attention")
        _check(TorchFlash(), device, dtype, heads, kv_heads, size)
    except Exception as error:  # a kernel that this GPU cannot run is a reason to be slow, not to stop
        fall_back(f"the learner attends over padded rectangles, which is slower, not by flash: {_reason(error)}")
        return None
    try:
        _check(TorchFlash(often=0), device, dtype, heads, kv_heads, size)
    except Exception as error:
        fall_back(f"attention to long prompts is not computed by cuDNN, which is faster: {_reason(error)}")
        return TorchFlash()
    return TorchFlash(OFTEN)


def _check(flash: Flash, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, size: int) -> None:
    """Raises ValueError where results or gradients are too far off."""
    with trying():
        error = trial(flash, device, dtype, heads, kv_heads, size)
    if not error <= BOUND:
        raise ValueError(f"it is {error:.2g} off (bound {BOUND:g})")


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def trial(flash: Flash, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, size: int) -> float:
    """The largest error of results and gradients on a few small trees, against float32, relative to the largest value."""
    lone, prompt, other = TokenRun(37, None), TokenRun(150, None), TokenRun(65, None)
    runs = [lone, prompt, other, *(TokenRun(length, prompt) for length in (1, 140, 33)), TokenRun(70, other)]
    runs += [TokenRun(20, runs[-1]), TokenRun(9, runs[-1])]
    row = LevelAttention(arrange_levels(runs), device, flash, block=64)
    generator = torch.Generator().manual_seed(TRIAL_SEED)
    count = sum(run.length for run in runs)
    drawn = [torch.randn(1, several, count, size, generator=generator) for several in (heads, kv_heads, kv_heads)]
    gradient = torch.randn(1, count, heads, size, generator=generator).to(device, dtype)
    results = []
    for attend, kind in ((partial(row, 0), dtype), (row.rectangles, torch.float32)):
        query, key, value = (x.to(device, dtype).to(kind).requires_grad_() for x in drawn)
        out = attend(query, key, value, size**-0.5)
        found = torch.autograd.grad(out, [query, key, value], gradient.to(kind))
        results.append([x.detach().float() for x in (out, *found)])
    pairs = list(zip(*results, strict=True))
    errors = [float((found - right).abs().max() / right.abs().max()) for found, right in pairs]
    return max(errors) if all(bool(found.isfinite().all()) for found, _ in pairs) else float("inf")


def _end(level: Sequence[TokenRun]) -> int:
    return level[-1].start + level[-1].length


def _span(level: Sequence[TokenRun]) -> slice:
    return slice(level[0].start, _end(level))


def segment_ends(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Where segments of these lengths begin and end."""
    return torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)).to(device)


def _own(runs: Sequence[TokenRun], device: torch.device, block: bool = False) -> Part:
    """Every one of these runs, which stand side by side, over itself; a single one may be a block."""
    lengths, rows = [run.length for run in runs], _span(runs)
    ends = segment_ends(lengths, device)
    return Part(rows, rows, ends, ends, _at_least_two(lengths), _at_least_two(lengths), True, lengths[0] if block else 0)


def _own_apart(level: Sequence[TokenRun], device: torch.device, long: int) -> list[Part]:
    """The runs of a level over themselves: each ``long`` one by itself, those between two of them together."""
    grouped = groupby(level, key=lambda run: run.length >= long)
    together = [[[run] for run in runs] if is_long else [list(runs)] for is_long, runs in grouped]
    return [_own(runs, device, block=runs[0].length >= long) for several in together for runs in several]


def _stretches(levels: Levels, up: int, below: int) -> dict[TokenRun, int]:
    """The runs of level ``up`` that level ``below`` sees, in its order, and how many of its tokens see each."""
    stretches: dict[TokenRun, int] = {}
    for run in levels[below]:
        above: TokenRun | None = run
        for _ in range(below - up):
            above = None if above is None else nearest_above(above)
        assert above is not None, "a run of a lower level has one above it"
        stretches[above] = stretches.get(above, 0) + run.length
    return stretches


def _above(levels: Levels, up: int, below: int, device: torch.device, block: int) -> list[Part]:
    """All of level ``below`` as stretches that see one run of level ``up`` each; blocks of long stretches apart.

    Example, with blocks of 512, a stretch of 2,100 tokens over a run of 1,300: 2,048 tokens over 1,300, and 52, which cuDNN
    computes as 512. Short stretches stay together as far as they stand together.
    """
    stretches, start = _stretches(levels, up, below), levels[below][0].start
    parts: list[Part] = []
    short: dict[TokenRun, int] = {}

    def close() -> None:
        if short:
            rows = slice(start - sum(short.values()), start)
            parts.append(_part(rows, list(short), list(short.values()), device))
            short.clear()

    for run, length in stretches.items():
        if min(length, run.length) >= block:
            close()
            for begin in range(0, length, LONGEST * block):
                count = min(length - begin, LONGEST * block)
                rows = slice(start + begin, start + begin + count)
                parts.append(_part(rows, [run], [count], device, block=-(-count // block) * block))
        else:
            short[run] = length
        start += length
    close()
    return parts


def _part(queries: slice, seen: Sequence[TokenRun], lengths: Sequence[int], device: torch.device, block: int = 0) -> Part:
    """Stretches of so many queries that see one run each."""
    places = np.concatenate([np.arange(run.start, run.start + run.length) for run in seen])
    keys: slice | Tensor = slice(int(places[0]), int(places[-1]) + 1)
    if len(places) != places[-1] + 1 - places[0]:
        keys = torch.from_numpy(places).to(device)
    sizes = [run.length for run in seen]
    ends = segment_ends(lengths, device), segment_ends(sizes, device)
    return Part(queries, keys, *ends, _at_least_two(lengths), _at_least_two(sizes), False, block)


def _at_least_two(lengths: Sequence[int]) -> int:
    """The longest; for a bound of 1 the kernel lays out its result in another way."""
    return max(2, *lengths)


def _as_rectangles(levels: Levels, device: torch.device) -> tuple[TreeAttention, Tensor, Tensor]:
    """The attention over rectangles of the same trees, the order of its row, and the way back."""
    copies: dict[TokenRun, TokenRun] = {}
    for run in (run for level in levels for run in level):
        parent = nearest_above(run)
        copies[run] = replace(run, above=None if parent is None else copies[parent])
    batches = arrange(list(copies.values()))
    order_T = np.empty(_end(levels[-1]), dtype=np.int64)
    for run, copy in copies.items():
        order_T[copy.start : copy.start + copy.length] = np.arange(run.start, run.start + run.length)
    back_T = np.argsort(order_T)
    return TreeAttention(batches, device), torch.from_numpy(order_T).to(device), torch.from_numpy(back_T).to(device)


class MatchedTree(LevelAttention):
    """Attention of one flat row [1, T] that holds trees level by level: the gradients of ``LevelAttention``, other sums."""

    def __init__(self, levels: Levels, device: torch.device, ops: MatchedOps) -> None:
        super().__init__(levels, device)
        self._ops = ops
        self._tiles: QueryTiles | None = None

    def __call__(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float) -> Tensor:
        """Attend; [1, T, H, D]."""
        with torch.no_grad():
            query, key, value = (one_row(x).contiguous() for x in (query_BHTD, key_BKTD, value_BKTD))
            _, kv_heads, size = key.shape
            if self._tiles is None:
                each = queries_of_tile(query.shape[1], kv_heads)
                self._tiles = tiles_of([run for level in self._levels for run in level], each, self._device)
            exact = self._ops.attend(query, KeyStore(key, value, kv_heads, kv_heads * size, size), self._tiles, scaling)
        if not torch.is_grad_enabled():
            return exact[None]
        return with_gradient_of(exact[None], super().__call__(layer, query_BHTD, key_BKTD, value_BKTD, scaling))


def tiles_of(runs: Sequence[TokenRun], each: int, device: torch.device) -> QueryTiles:
    """Tiles of at most ``each`` queries; the context of a run is its ancestors' tokens and its own."""
    tiles: list[tuple[int, int, int, int]] = []
    contexts, base = [], 0
    for run in runs:
        context = np.concatenate([run.ancestors(), np.arange(run.start, run.start + run.length)])
        tiles += [
            (run.start + start, min(each, run.length - start), base, run.prefix + start)
            for start in range(0, run.length, each)
        ]
        contexts.append(context)
        base += len(context)
    first, count, at, place = torch.tensor(tiles).T.contiguous().to(device).unbind()
    return QueryTiles(first, count, at, place, torch.from_numpy(np.concatenate(contexts)).to(device))

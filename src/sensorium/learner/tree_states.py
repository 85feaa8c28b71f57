"""Gated delta nets over trees laid out flat: every run of tokens starts from the state at the end of the run above it.

Worked example. A prompt P with responses A and B, and C, which goes on from A, in one row ``P A B C``::

    level 0: P from nothing        → state of P, kept with its graph
    level 1: A and B from P's      → state of A (nothing follows B)
    level 2: C from A's

So a prompt is computed once, and the gradient of its state, summed over its responses, flows back into it once. The
convolution reads a few columns before each token. Those of a run's first tokens belong to the runs above it, which are
in the same row: they are gathered, and all others come from one convolution over the row.

Axes: T tokens of the row, C channels, W columns that the convolution reads before a token, N tokens of a level, R runs,
Q tokens of the longest of some runs, G value heads, K and V sizes of a state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sensorium.kernels.delta_rule import fla_chunks, torch_chunks, usable
from sensorium.learner.token_runs import TokenRun, nearest_above, take
from sensorium.models.delta_net import DeltaTokens, Windows, by_torch, convolved_at, has_kernel, heads_of, window_size

CHUNK = 64  # of the torch form, which pads to a multiple of it: runs of as many chunks are padded to each other for free


@dataclass(frozen=True)
class _Window:
    """The first tokens of runs: their places, and the W + 1 columns that the convolution reads for each."""

    places_M: Tensor
    columns_MW: Tensor
    known_MW1: Tensor  # 0 where there is nothing: the first run of a tree has no column before it


@dataclass(frozen=True)
class _Batch:
    """Runs of a level as rows padded to Q tokens. Indices are among the level's N tokens and R runs."""

    runs_R: Tensor
    tokens_RQ: Tensor
    real_RQ1: Tensor | None  # None: nothing is padded


@dataclass(frozen=True)
class _Level:
    """Runs of one depth. ``parents_R``: the run of the level above whose state each starts from.

    ``places_N``: their tokens in the row. ``kept``: whether others start from their states. ``ends_R1``: where runs begin
    and end.
    """

    places_N: Tensor
    ends_R1: Tensor
    parents_R: Tensor | None
    children: Tensor  # how many of them start from each run of the level above
    by_parent: Tensor | None  # these runs by the run they start from; None: as they are
    kept: bool
    batches: tuple[_Batch, ...]
    order_R: Tensor  # the level's runs among those of its batches
    order_N: Tensor  # the level's tokens among those of its batches, padding included


class TreeStates:
    """The delta nets of one flat row [1, T] that holds trees. The runs have their places in the row."""

    def __init__(self, runs: Sequence[TokenRun], device: torch.device) -> None:
        self._runs = [run for run in runs if run.length]
        self._device = device
        self._windows: dict[int, _Window] = {}
        self._everywhere: dict[int, Windows] = {}
        by_depth: dict[int, list[TokenRun]] = {}
        depths: dict[TokenRun, int] = {}
        for run in self._runs:
            by_depth.setdefault(_depth(run, depths), []).append(run)
        below = {nearest_above(run) for run in self._runs}
        self._levels: list[_Level] = []
        above: list[TokenRun] = []
        for _, level in sorted(by_depth.items()):
            self._levels.append(_level(level, above, below, device))
            above = level
        places_T = torch.cat([level.places_N for level in self._levels])
        # Level by level, as the row itself may be: then nothing is moved.
        moved = not torch.equal(places_T, torch.arange(len(places_T), device=device))
        self._back_T = torch.argsort(places_T) if moved else None

    def __call__(self, net: Any, tokens: DeltaTokens) -> Tensor:
        """[1, T, G, V]."""
        query, key, value = self._heads(net, tokens.mixed_BTC)  # rows are squeezed: the gradient of an index is a copy
        flat = (query, key, value, tokens.decay_BTG.squeeze(0), tokens.beta_BTG.squeeze(0))
        fast = usable(value.device, query.dtype, query.shape[1], *value.shape[1:], query.shape[2])
        states_RGKV: Tensor | None = None
        outs = []
        for level, own in zip(self._levels, self._by_level(flat), strict=True):
            before = None
            if level.parents_R is not None:
                assert states_RGKV is not None, "a run below another starts from its state"
                before = _Before.apply(states_RGKV, level)
            out_NGV, states_RGKV = (_in_one_call if fast else _in_batches)(level, own, before)
            outs.append(out_NGV)
        out_TGV = torch.cat(outs)
        return (out_TGV if self._back_T is None else out_TGV.index_select(0, self._back_T))[None]

    def _by_level(self, flat: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Tensors [T, …] as those of each level's tokens."""
        if self._back_T is None:
            return list(zip(*(x.split([len(level.places_N) for level in self._levels]) for x in flat), strict=True))
        return [[x.index_select(0, level.places_N) for x in flat] for level in self._levels]

    def _heads(self, net: Any, mixed_1TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys [T, H, K] and values [T, G, V]."""
        if not has_kernel(net, mixed_1TC):
            query, key, value = (x.squeeze(0) for x in heads_of(net, self._convolved(net, mixed_1TC)))
            return query, key, value
        width = window_size(net)
        if width not in self._everywhere:
            window, count = self._window(width), mixed_1TC.shape[1]
            places_TS = torch.arange(count, device=self._device)[:, None] + torch.arange(-width, 1, device=self._device)
            places_TS[window.places_M] = torch.where(window.known_MW1[..., 0], window.columns_MW, -1)
            self._everywhere[width] = Windows(places_TS.int(), count)
        return convolved_at(net, mixed_1TC.squeeze(0), self._everywhere[width])

    def _window(self, width: int) -> _Window:
        if width not in self._windows:
            self._windows[width] = _window(self._runs, width, self._device)
        return self._windows[width]

    def _convolved(self, net: Any, mixed_1TC: Tensor) -> Tensor:
        """[1, T, C]: a convolution over the row, and the first tokens of each run by their own columns."""
        width = window_size(net)
        window = self._window(width)
        row = torch.cat([mixed_1TC.new_zeros(1, width, mixed_1TC.shape[2]), mixed_1TC], dim=1)
        columns_MWC = take(mixed_1TC.squeeze(0), window.columns_MW) * window.known_MW1.to(mixed_1TC.dtype)
        first_MC = by_torch(net, columns_MWC)[:, 0]
        return by_torch(net, row).squeeze(0).index_copy(0, window.places_M, first_MC)[None]


class _Before(torch.autograd.Function):
    """States by the run that each starts from. The gradient is summed run by run: an index_add would sort on CUDA."""

    @staticmethod
    def forward(ctx: Any, states_RGKV: Tensor, level: _Level) -> Tensor:
        assert level.parents_R is not None, "the first level starts from nothing"
        ctx.level = level
        return states_RGKV.index_select(0, level.parents_R)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        shape, level = gradients[0].shape, ctx.level
        rows = gradients[0].flatten(1)
        rows = rows if level.by_parent is None else rows.index_select(0, level.by_parent)
        summed = torch.segment_reduce(rows.contiguous(), "sum", lengths=level.children, axis=0, unsafe=True, initial=0)
        return summed.view(-1, *shape[1:]), None


def _in_one_call(level: _Level, tokens: Sequence[Tensor], before: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Runs end to end, by the kernels."""
    query, key, value, decay, beta = (x[None] for x in tokens)
    out, after = fla_chunks(query, key, value, decay, beta, before, level.ends_R1, final=level.kept)
    return out.squeeze(0), after


def _in_batches(level: _Level, tokens: Sequence[Tensor], before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Runs of like length as the rows of a batch, by the reference; padding is inert."""
    outs, states = [], []
    for batch in level.batches:
        query, key, value, decay, beta = (take(x, batch.tokens_RQ) for x in tokens)
        if batch.real_RQ1 is not None:
            decay, beta = decay * batch.real_RQ1, beta * batch.real_RQ1
        start = None if before is None else before.index_select(0, batch.runs_R)
        out_RQGV, state = torch_chunks(query, key, value, decay, beta, start)
        outs.append(out_RQGV.flatten(0, 1))
        states.append(state)
    return torch.cat(outs).index_select(0, level.order_N), torch.cat(states).index_select(0, level.order_R)


def _depth(run: TokenRun, known: dict[TokenRun, int]) -> int:
    path = []
    above: TokenRun | None = run
    while above is not None and above not in known:
        path.append(above)
        above = nearest_above(above)
    depth = -1 if above is None else known[above]
    for i, each in enumerate(reversed(path), start=1):
        known[each] = depth + i
    return known[run]


def _level(runs: list[TokenRun], above: list[TokenRun], below: set[TokenRun | None], device: torch.device) -> _Level:
    places_N = np.concatenate([np.arange(run.start, run.start + run.length) for run in runs])
    ends = np.cumsum([0, *(run.length for run in runs)])
    number = {run: i for i, run in enumerate(above)}
    parents = [number[parent] for run in runs if (parent := nearest_above(run)) is not None]

    def chunks(i: int) -> int:
        return -(-runs[i].length // CHUNK)

    batches, order_N, done = [], np.empty(len(places_N), dtype=np.int64), 0
    for _, several in groupby(sorted(range(len(runs)), key=chunks), key=chunks):
        rows = np.array(list(several))
        lengths_R = ends[rows + 1] - ends[rows]
        steps_Q = np.arange(lengths_R.max())
        real_RQ = steps_Q < lengths_R[:, None]
        tokens_RQ = ends[rows][:, None] + np.minimum(steps_Q, lengths_R[:, None] - 1)
        order_N[tokens_RQ[real_RQ]] = done + np.flatnonzero(real_RQ)
        done += real_RQ.size
        padded = None if real_RQ.all() else torch.from_numpy(real_RQ)[..., None].to(device)
        batches.append(_Batch(torch.from_numpy(rows).to(device), torch.from_numpy(tokens_RQ).to(device), padded))
    return _Level(
        places_N=torch.from_numpy(places_N).to(device),
        ends_R1=torch.from_numpy(ends).to(device),
        parents_R=torch.tensor(parents, device=device) if above else None,
        children=torch.from_numpy(np.bincount(parents, minlength=len(above)) if above else np.zeros(0, int)).to(device),
        by_parent=None if parents == sorted(parents) else torch.from_numpy(np.argsort(parents, kind="stable")).to(device),
        kept=any(run in below for run in runs),
        batches=tuple(batches),
        order_R=torch.cat([batch.runs_R for batch in batches]).argsort(),
        order_N=torch.from_numpy(order_N).to(device),
    )


def _window(runs: Sequence[TokenRun], width: int, device: torch.device) -> _Window:
    places, columns = [], []
    for run in runs:
        before: list[int] = []  # the last columns above, nearest first
        above = nearest_above(run)
        while above is not None and len(before) < width:
            before += range(above.start + above.length - 1, max(above.start, above.start + above.length - width) - 1, -1)
            above = nearest_above(above)
        own = range(run.start, run.start + min(run.length, width))
        path = [*([-1] * width), *reversed(before[:width]), *own]
        for i, place in enumerate(own, start=len(path) - len(own)):
            places.append(place)
            columns.append(path[i - width : i + 1])
    columns_MW = torch.tensor(columns, device=device)
    return _Window(torch.tensor(places, device=device), columns_MW.clamp(min=0), (columns_MW >= 0)[..., None])

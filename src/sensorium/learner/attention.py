"""Attention over trees laid out flat: every run of tokens sees its ancestors' keys and values, and itself causally.

The mask of a tree is block-sparse: a dense one costs (P + G·R)² for a prompt of P and G responses of R tokens. Here runs
are batched into rectangles instead, queries [R, Q] against keys [R, P + Q], with the shared prefix gathered for each run.
So sharing a prefix never costs more than repeating it, and no group need be split for the mask's sake.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

import numpy as np
import torch
from torch import Tensor

from sensorium.models.attention import masked_attention

# A rectangle may hold this share of padding, and this many padded cells whatever the share: a call costs something too.
PADDING_SHARE = 0.25
FREE_CELLS = 8192


@dataclass(frozen=True)
class Run:
    """Tokens ``start … start + length`` of a flat row, unbranched, and the runs (start, length) above them, root first."""

    start: int
    length: int
    above: tuple[tuple[int, int], ...] = ()

    @property
    def prefix(self) -> int:
        """How many tokens stand above."""
        return sum(length for _, length in self.above)


@dataclass(frozen=True)
class _Rectangle:
    """R runs padded to Q queries and S keys. ``mask`` None: causal."""

    queries_RQ: Tensor
    keys_RS: Tensor
    mask: Tensor | None


class TreeAttention:
    """Attention of one flat row [1, T] that holds one or more trees."""

    def __init__(self, runs: Sequence[Run], tokens: int, device: torch.device) -> None:
        self._rectangles = []
        places_T = np.zeros(tokens, dtype=np.int64)
        offset = 0
        for several in _batches([run for run in runs if run.length]):
            width = max(run.length for run in several)
            self._rectangles.append(_rectangle(several, width, device))
            for row, run in enumerate(several):
                first = offset + row * width
                places_T[run.start : run.start + run.length] = np.arange(first, first + run.length)
            offset += len(several) * width
        self._places_T = torch.from_numpy(places_T).to(device)

    def __call__(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float) -> Tensor:
        """Attend; [1, T, H, D]."""
        kinds = key_BKTD.shape[1]
        query_THD = query_BHTD[0].transpose(0, 1)
        both_TKD = torch.cat([key_BKTD[0], value_BKTD[0]]).transpose(0, 1)
        outs = []
        for part in self._rectangles:
            query_RHQD = _take(query_THD, part.queries_RQ).transpose(1, 2)
            both_RKSD = _take(both_TKD, part.keys_RS).transpose(1, 2)
            key_RKSD, value_RKSD = both_RKSD[:, :kinds], both_RKSD[:, kinds:]
            outs.append(masked_attention(query_RHQD, key_RKSD, value_RKSD, scaling, part.mask).flatten(0, 1))
        return torch.cat(outs).index_select(0, self._places_T)[None]


class _Gather(torch.autograd.Function):
    """Rows by index, whose gradient is summed in float32: a prefix's gradient is a sum over all that share it."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, rows_TKD: Tensor, index_N: Tensor) -> Tensor:
        ctx.save_for_backward(index_N)
        ctx.length = len(rows_TKD)  # type: ignore[attr-defined]
        return rows_TKD.index_select(0, index_N)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        (index_N,) = ctx.saved_tensors  # type: ignore[attr-defined]
        gradient_NKD = gradients[0]
        sums_TKD = gradient_NKD.new_zeros((ctx.length, *gradient_NKD.shape[1:]), dtype=torch.float32)  # type: ignore[attr-defined]
        return sums_TKD.index_add_(0, index_N, gradient_NKD.float()).to(gradient_NKD.dtype), None


def _take(rows_TKD: Tensor, index_RS: Tensor) -> Tensor:
    """[R, S, K, D] of flat rows."""
    flat_N = index_RS.reshape(-1)
    taken = rows_TKD.index_select(0, flat_N) if rows_TKD.dtype == torch.float32 else _Gather.apply(rows_TKD, flat_N)
    return taken.view(*index_RS.shape, *rows_TKD.shape[1:])


def _batches(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs of like shape together, so that little of a rectangle is padding."""
    batches: list[list[Run]] = []
    needed = rows = width = above = 0
    for run in sorted(runs, key=lambda run: (round(4 * log2(1 + run.prefix)), run.length, run.prefix)):
        needed += run.length * (run.prefix + run.length)
        rows, width, above = rows + 1, max(width, run.length), max(above, run.prefix)
        if batches and rows * width * (above + width) <= needed * (1 + PADDING_SHARE) + FREE_CELLS:
            batches[-1].append(run)
        else:
            batches.append([run])
            needed, rows, width, above = run.length * (run.prefix + run.length), 1, run.length, run.prefix
    return batches


def _rectangle(runs: Sequence[Run], width: int, device: torch.device) -> _Rectangle:
    lengths_R = np.array([run.length for run in runs])
    starts_R = np.array([run.start for run in runs])
    steps_Q = np.arange(width)
    # Padding repeats a run's last token: as a query its result is dropped, as a key nobody before it sees it.
    queries_RQ = starts_R[:, None] + np.minimum(steps_Q, lengths_R[:, None] - 1)
    prefixes_R = np.array([run.prefix for run in runs])
    above = int(prefixes_R.max())
    if not above:
        index_RQ = torch.from_numpy(queries_RQ).to(device)
        return _Rectangle(index_RQ, index_RQ, None)
    above_RP = np.zeros((len(runs), above), dtype=np.int64)
    known: dict[tuple[tuple[int, int], ...], np.ndarray] = {(): np.zeros(0, dtype=np.int64)}
    for row, run in enumerate(runs):
        if run.above not in known:
            known[run.above] = np.concatenate([np.arange(start, start + length) for start, length in run.above])
        above_RP[row, : run.prefix] = known[run.above]
    shown_R = np.unique(prefixes_R) if (prefixes_R == above).all() else prefixes_R
    seen_R1P = np.arange(above) < shown_R[:, None, None]
    mask_RQS = np.concatenate(
        [
            np.broadcast_to(seen_R1P, (len(shown_R), width, above)),
            np.broadcast_to(steps_Q <= steps_Q[:, None], (len(shown_R), width, width)),
        ],
        axis=2,
    )
    return _Rectangle(
        torch.from_numpy(queries_RQ).to(device),
        torch.from_numpy(np.concatenate([above_RP, queries_RQ], axis=1)).to(device),
        torch.from_numpy(mask_RQS)[:, None].to(device),
    )

"""Attention over trees laid out flat: every run of tokens sees its ancestors' keys and values, and itself causally.

The mask of a tree is block-sparse: a dense one costs (P + G·R)² for a prompt of P and G responses of R tokens. Here runs
are batched into rectangles instead, queries [R, Q] against keys [R, P + Q], with the shared prefix gathered for each run.
So sharing a prefix never costs more than repeating it, and no group need be split for the mask's sake.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sensorium.models.attention import masked_attention, one_row

# A rectangle may hold this share of padding, and this many padded cells whatever the share: a call costs something too.
PADDING_SHARE = 0.25
FREE_CELLS = 8192


@dataclass(eq=False)
class TokenRun:
    """Unbranched tokens of a tree, below the run they branch off from. ``start`` is their place in the flat row."""

    length: int
    above: "TokenRun | None"
    prefix: int = 0
    start: int = 0

    def ancestors(self) -> np.ndarray:
        """Places of all tokens above, root first."""
        if self.above is None:
            return np.zeros(0, dtype=np.int64)
        own = np.arange(self.above.start, self.above.start + self.above.length)
        return np.concatenate([self.above.ancestors(), own])


def nearest_above(run: TokenRun) -> TokenRun | None:
    """The nearest run above that has tokens."""
    above = run.above
    while above is not None and not above.length:
        above = above.above
    return above


def arrange(runs: Sequence[TokenRun]) -> list[list[TokenRun]]:
    """Batch runs of like shape, so that little of a rectangle is padding, and give each its place in the flat row."""
    batches: list[list[TokenRun]] = []
    needed = rows = width = above = start = 0
    for run in runs:
        run.prefix = 0 if run.above is None else run.above.prefix + run.above.length
    filled = [run for run in runs if run.length]
    for run in sorted(filled, key=lambda run: (round(4 * log2(1 + run.prefix)), run.length, run.prefix)):
        run.start, start = start, start + run.length
        cells = run.length * (run.prefix + run.length)
        needed, rows, width, above = needed + cells, rows + 1, max(width, run.length), max(above, run.prefix)
        if batches and rows * width * (above + width) <= needed * (1 + PADDING_SHARE) + FREE_CELLS:
            batches[-1].append(run)
        else:
            batches.append([run])
            needed, rows, width, above = cells, 1, run.length, run.prefix
    return batches


class TreeAttention:
    """Attention of one flat row [1, T] that holds trees, their runs arranged in batches."""

    def __init__(self, batches: Sequence[Sequence[TokenRun]], device: torch.device) -> None:
        self._rectangles = [_rectangle(runs, device) for runs in batches]
        self._sizes = [sum(run.length for run in runs) for runs in batches]

    def __call__(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float) -> Tensor:
        """Attend; [1, T, H, D]."""
        query_THD, key_TKD, value_TKD = (one_row(x) for x in (query_BHTD, key_BKTD, value_BKTD))
        return self.attend(query_THD, key_TKD, value_TKD, key_TKD, value_TKD, scaling)[None]

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
        own_RQHD = own_NHD.unflatten(0, (self.rows, -1)) if self.own_RQ is None else _take(own_NHD, self.own_RQ)
        if all_THD is not None and self.above_RP is not None:
            own_RQHD = torch.cat([_take(all_THD, self.above_RP), own_RQHD], dim=1)
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


class _Gather(torch.autograd.Function):
    """Rows by index, whose gradient is summed in float32: a prefix's gradient is a sum over all that share it."""

    @staticmethod
    def forward(ctx: Any, rows_THD: Tensor, index_N: Tensor) -> Tensor:
        ctx.save_for_backward(index_N)
        ctx.length = len(rows_THD)
        return rows_THD.index_select(0, index_N)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (index_N,) = ctx.saved_tensors
        gradient_NHD = gradients[0]
        sums_THD = gradient_NHD.new_zeros((ctx.length, *gradient_NHD.shape[1:]), dtype=torch.float32)
        return sums_THD.index_add_(0, index_N, gradient_NHD.float()).to(gradient_NHD.dtype), None


def _take(rows_THD: Tensor, index_RS: Tensor) -> Tensor:
    """[R, S, H, D] of flat rows."""
    flat_N = index_RS.reshape(-1)
    taken = rows_THD.index_select(0, flat_N) if rows_THD.dtype == torch.float32 else _Gather.apply(rows_THD, flat_N)
    return taken.unflatten(0, index_RS.shape)

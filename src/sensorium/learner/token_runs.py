"""Trees of token runs, and where they are laid out in a flat row: batched by shape, or level by level.

A run is unbranched: ``prompt, (response, response)`` are three runs, the last two below the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import Any

import numpy as np
import torch
from torch import Tensor

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


Levels = list[list[TokenRun]]


def arrange_levels(runs: Sequence[TokenRun]) -> Levels:
    """Runs by how many stand above them, children of one run together; gives each its place in the flat row."""
    filled = [run for run in runs if run.length]
    heights: dict[TokenRun, int] = dict.fromkeys(filled, 0)
    parents = {run: nearest_above(run) for run in filled}
    for run in filled:
        height, above = 0, parents[run]
        while above is not None:
            height += 1
            heights[above] = max(heights[above], height)
            above = parents[above]
    # The lowest trees first: those that nothing hangs below are then no gap between the keys of a level.
    level = sorted((run for run in filled if parents[run] is None), key=heights.__getitem__)
    children: dict[TokenRun | None, list[TokenRun]] = {}
    for run in filled:
        children.setdefault(parents[run], []).append(run)
    levels, start = [], 0
    while level:
        levels.append(level)
        for run in level:
            run.start, start = start, start + run.length
        level = [child for run in level for child in sorted(children.get(run, ()), key=heights.__getitem__)]
    for run in runs:
        run.prefix = 0 if run.above is None else run.above.prefix + run.above.length
    return levels


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


def take(rows_THD: Tensor, index_RS: Tensor) -> Tensor:
    """[R, S, H, D] of flat rows."""
    flat_N = index_RS.reshape(-1)
    narrow = rows_THD.element_size() < 4
    taken = _Gather.apply(rows_THD, flat_N) if narrow else rows_THD.index_select(0, flat_N)
    return taken.unflatten(0, index_RS.shape)

"""Positions of text and media on the three axes of rotary embedding: time, height and width.

Worked example: 3 text tokens and a start mark, a video of 4 temporal steps of 2 x 2 tokens, 1 s a step, 2 positions a
second, then an end mark and text:

    text 0-3 | time 4, 6, 8, 10; height 4-5; width 4-5 | text from 11 on

A block begins one after the largest position so far. What follows it begins one after the largest position of the block,
on whichever axis that is. The published weights were trained with this rule; docs/families.md names the libraries that
have another one.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def three_axis_positions(ids_T: Tensor, placeholders: Iterable[int], blocks: Sequence[Tensor]) -> Tensor:
    """Positions [3, T] of tokens from 0 on; ``blocks`` are the offsets [3, N] of each run of placeholders, in order."""
    places = torch.isin(ids_T, torch.tensor(list(placeholders))).nonzero()[:, 0].tolist()
    sizes = [block.shape[1] for block in blocks]
    assert sum(sizes) == len(places), f"{len(places)} placeholders for {sum(sizes)} tokens of media"
    positions_3T = torch.empty(3, len(ids_T), dtype=torch.long)
    written = start = used = 0
    for block_3N, size in zip(blocks, sizes, strict=True):
        first = places[used]
        positions_3T[:, written:first] = torch.arange(start, start + first - written)
        start += first - written
        positions_3T[:, first : first + size] = start + block_3N
        start += int(block_3N.max()) + 1
        written, used = first + size, used + size
    positions_3T[:, written:] = torch.arange(start, start + len(ids_T) - written)
    return positions_3T


def timed_steps(count: int, seconds: float, a_second: float) -> Tensor:
    """Where temporal steps of so many seconds stand. The product is taken in float32 and cut, as it was in training."""
    return (torch.arange(count, dtype=torch.float32) * torch.tensor(seconds, dtype=torch.float32) * a_second).long()


def grid_offsets(times_K: Tensor, height: int, width: int) -> Tensor:
    """Offsets [3, K * height * width] of a grid of tokens: its temporal steps at ``times_K``, rows and columns from 0."""
    rows, columns = torch.arange(height), torch.arange(width)
    axes = torch.meshgrid(times_K, rows, columns, indexing="ij")
    return torch.stack([axis.flatten() for axis in axes])


def line_offsets(count: int) -> Tensor:
    """Offsets [3, count] of tokens in a row, as those of text and of sound are."""
    return torch.arange(count).expand(3, -1)


def one_axis_positions(ids_T: Tensor) -> Tensor:
    """Positions [3, T] of a family that counts media as it counts text: the three axes are equal."""
    return torch.arange(len(ids_T)).expand(3, -1)

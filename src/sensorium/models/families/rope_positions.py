"""Positions of text and media on the three axes of rotary embedding: time, height and width.

Worked example: 3 text tokens and a start mark, a video of 4 temporal steps of 2 x 2 tokens, 1 s a step, 2 positions a
second, then an end mark and text:

    text 0-3 | time 4, 6, 8, 10; height 4-5; width 4-5 | text from 11 on

A block begins one after the largest position so far. What follows it begins one after the largest position of the block,
on whichever axis that is. The published weights were trained with this rule; docs/guides/families.md names the libraries
that have another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sensorium.recipe.family_facts import DeferredModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = DeferredModule("torch")


@dataclass(frozen=True)
class MarkedBlock:
    """A run of placeholders between two marks of its own, whose offsets are the first and the last of ``offsets_3N``.

    What follows begins at ``advance``, wherever the largest offset is.
    """

    offsets_3N: Tensor
    advance: int


def three_axis_positions(ids_T: Tensor, placeholders: Iterable[int], blocks: Sequence[Tensor | MarkedBlock]) -> Tensor:
    """Positions [3, T] of tokens from 0 on; ``blocks`` are the offsets [3, N] of each run of placeholders, in order."""
    places = torch.isin(ids_T, torch.tensor(list(placeholders))).nonzero()[:, 0].tolist()
    positions_3T = torch.empty(3, len(ids_T), dtype=torch.long)
    written = start = used = 0
    for block in blocks:
        marks = 1 if isinstance(block, MarkedBlock) else 0
        offsets_3N = block.offsets_3N if isinstance(block, MarkedBlock) else block
        size = offsets_3N.shape[1]
        assert used + size - 2 * marks <= len(places), f"{len(places)} placeholders for blocks of more tokens"
        first = places[used] - marks
        positions_3T[:, written:first] = torch.arange(start, start + first - written)
        start += first - written
        positions_3T[:, first : first + size] = start + offsets_3N
        start += block.advance if isinstance(block, MarkedBlock) else int(offsets_3N.max()) + 1
        written, used = first + size, used + size - 2 * marks
    assert used == len(places), f"{len(places)} placeholders for {used} tokens of media"
    positions_3T[:, written:] = torch.arange(start, start + len(ids_T) - written)
    return positions_3T


def chunk_order(video_3N: Tensor, sound_3M: Tensor, chunk: int) -> Tensor:
    """The order [N + M] in which a video and its sound are written: by chunks of time, in each of them the video first.

    With chunks of 50 positions, a step of 4 tokens every 25 and 70 tokens of sound: 8 of the video, 50 of the sound, the
    rest of the video, 20 of the sound. Numbers from N on mean the sound.
    """
    return torch.argsort(torch.cat([video_3N[0] // chunk * 2, sound_3M[0] // chunk * 2 + 1]), stable=True)


def interleaved_block(video_3N: Tensor, sound_3M: Tensor, order_N: Tensor, *, shared_marks: bool) -> MarkedBlock:
    """The block of a video and its sound, written in some order, between the marks of the sound.

    What comes last begins after the last stretch of one kind, even where something before it reaches further. With
    ``shared_marks`` the two marks before the block share a position, and so do the two after it.
    """
    apart = 0 if shared_marks else 1
    both_3N = torch.cat([video_3N, sound_3M], dim=1)[:, order_N] + apart
    is_sound_N = order_N >= video_3N.shape[1]
    others = (is_sound_N != is_sound_N[-1]).nonzero()
    end = int(both_3N[:, int(others[-1]) + 1 if len(others) else 0 :].max()) + 1
    marks = [torch.full((3, 1), value) for value in (apart - 1, end)]
    return MarkedBlock(torch.cat([marks[0], both_3N, marks[1]], dim=1), end + apart)


def timed_steps(count: int, seconds: float, a_second: float) -> Tensor:
    """Positions of temporal steps of ``seconds`` each. The product is taken in float32 and cut, as it was in training."""
    return (torch.arange(count, dtype=torch.float32) * torch.tensor(seconds, dtype=torch.float32) * a_second).long()


def grid_offsets(times_K: Tensor, height: int, width: int) -> Tensor:
    """Offsets [3, K * height * width] of a grid of tokens: its temporal steps at ``times_K``, rows and columns from 0."""
    rows, columns = torch.arange(height), torch.arange(width)
    axes = torch.meshgrid(times_K, rows, columns, indexing="ij")
    return torch.stack([axis.flatten() for axis in axes])


def line_offsets(count: int) -> Tensor:
    """Offsets [3, count] of tokens in a row, as those of text and of sound are."""
    return torch.arange(count).expand(3, -1)

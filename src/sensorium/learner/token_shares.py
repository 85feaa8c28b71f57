"""Which rank of a token group computes which tokens of a micro-batch (``cluster.sequence_parallel``).

Tokens are put in the order of how much they see, and every rank takes one chunk from the front and one from the back, so
that ranks have equally many tokens and equally much to attend to. Example, a prompt P of 12 tokens with responses A and B
of 2 tokens each, two ranks:

    order          P P P P P P P P P P P P A A B B
    tokens seen    1 2 3 4 5 6 7 8 9 …       13   13
    rank           0 0 0 0 1 1 1 1 1 1 1 1 0 0 0 0     8 tokens each, seeing 64 and 68

A rank's tokens are pieces of runs. A piece hangs below the piece before it, as a run hangs below the run that it branches
off from. So what it sees is still its ancestors and itself, and ancestors may be another rank's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sensorium.learner.tree_attention import TokenRun, nearest_above
from sensorium.models.segment_layout import Features, Placement, Runs, Slot
from sensorium.vocabulary.content import Media


class TokenGroup(Protocol):
    """The ranks that share the tokens of a micro-batch, as one of them sees them."""

    rank: int
    size: int

    def gather(self, own: Tensor, width: int) -> Tensor:
        """[size · width, …] of every rank's rows, padded to ``width`` each."""
        ...

    def sum_own(self, rows: Tensor) -> Tensor:
        """[width, …]: the sum over all ranks of the rows [size · width, …] that are this rank's."""
        ...


@dataclass(frozen=True)
class TokenShares:
    """The pieces of each rank, in its order, and the places that their tokens have in the whole row.

    A piece's ``start`` is its place among all ranks' tokens, as ``TokenGroup.gather`` lays them out: ``width`` a rank.
    """

    pieces: tuple[tuple[TokenRun, ...], ...]
    places: tuple[np.ndarray, ...]
    width: int


def share_tokens(runs: Sequence[TokenRun], ranks: int) -> TokenShares:
    """Divide the tokens of runs that have their places in a row; every rank has one, if there are as many."""
    ordered = sorted((run for run in runs if run.length), key=lambda run: (run.prefix, run.start))
    seen_T = np.concatenate([np.arange(run.prefix + 1, run.prefix + run.length + 1) for run in ordered])
    chunks = _chunks(seen_T, ranks)
    pieces: list[list[TokenRun]] = [[] for _ in range(ranks)]
    places: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    last: dict[TokenRun, TokenRun] = {}
    start = 0
    for run in ordered:
        parent = nearest_above(run)
        piece = None if parent is None else last[parent]
        for first, end, rank in chunks:
            low, high = max(first, start), min(end, start + run.length)
            if low < high:
                piece = TokenRun(high - low, piece, run.prefix + low - start)
                pieces[rank].append(piece)
                places[rank].append(np.arange(run.start + low - start, run.start + high - start))
        assert piece is not None, "a run with tokens has pieces"
        last[run] = piece
        start += run.length
    width = max(1, *(sum(piece.length for piece in several) for several in pieces))
    for rank in range(ranks):
        _order_by_parent(pieces[rank], places[rank], rank * width)
    joined = tuple(np.concatenate([np.zeros(0, dtype=np.int64), *several]) for several in places)
    return TokenShares(tuple(map(tuple, pieces)), joined, width)


def _order_by_parent(pieces: list[TokenRun], places: list[np.ndarray], start: int) -> None:
    """Put pieces below the same one together, those without any first, and give each its start."""
    parents = {id(parent): i for i, parent in enumerate(dict.fromkeys(piece.above for piece in pieces), start=1)}
    order = sorted(range(len(pieces)), key=lambda i: 0 if pieces[i].above is None else parents[id(pieces[i].above)])
    pieces[:], places[:] = [pieces[i] for i in order], [places[i] for i in order]
    for piece in pieces:
        piece.start, start = start, start + piece.length


def _chunks(seen_T: np.ndarray, ranks: int) -> list[tuple[int, int, int]]:
    """(first, end, rank) of the chunks, in order. The outermost two are a rank's, then the next two, and so on.

    How many tokens a rank takes from the front is chosen so that its tokens see as much as the others' on average.
    """
    costs = np.concatenate([[0], np.cumsum(seen_T)])
    front: list[tuple[int, int, int]] = []
    back: list[tuple[int, int, int]] = []
    low, high = 0, len(seen_T)
    for rank in range(ranks):
        size, left = -(-(high - low) // (ranks - rank)), ranks - rank
        fair = (costs[high] - costs[low]) / left
        taken = np.arange(size + 1)  # from the front; the others from the back
        cost = costs[low + taken] - costs[low] + costs[high] - costs[high - size + taken]
        most = int(np.abs(cost - fair).argmin())
        front.append((low, low + most, rank))
        back.append((high - size + most, high, rank))
        low, high = low + most, high - size + most
    return [*front, *reversed(back)]


@dataclass(frozen=True)
class SlotShare:
    """The tokens of a slot that are computed here: they take the features ``rows_N`` of the medium. There may be none."""

    media: Media
    runs: Runs
    rows_N: Tensor

    def place(self, features: Features, taken_K: Tensor) -> Placement:
        """These of the medium's features in their places; ``features`` are those ``taken_K``, in order."""
        return Placement(0, self.runs, features.rows(torch.searchsorted(taken_K, self.rows_N)))


def slot_share(slot: Slot, own_T: np.ndarray, device: torch.device) -> SlotShare:
    """What of a slot in the whole row is computed here, where row place p stands at ``own_T[p]``, or nowhere (-1)."""
    stands_N = np.concatenate([own_T[start : start + count] for start, count in slot.runs])
    rows_N = np.flatnonzero(stands_N >= 0)
    stands_N = stands_N[rows_N]
    firsts = np.flatnonzero(np.diff(stands_N, prepend=-2) != 1)
    counts = np.diff(np.append(firsts, len(stands_N)))
    runs = tuple((int(stands_N[first]), int(count)) for first, count in zip(firsts, counts, strict=True))
    return SlotShare(slot.media, runs, torch.from_numpy(rows_N).to(device))

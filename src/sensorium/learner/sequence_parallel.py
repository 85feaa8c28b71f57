"""``cluster.sequence_parallel``: which rank computes which tokens of a micro-batch, and attention over all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sensorium.learner.token_runs import TokenRun, arrange, nearest_above
from sensorium.learner.tree_attention import Flash, Part, TreeAttention, merge, segment_ends, usable
from sensorium.models.attention import finer, one_row
from sensorium.models.segment_layout import Features, Placement, Runs, Slot
from sensorium.vocabulary.content import Media

# Tokens are put in the order of how much they see, and every rank takes one chunk from the front and one from the back, so
# that ranks have equally many tokens and equally much to attend to. Example, a prompt P of 12 tokens with responses A and B
# of 2 tokens each, two ranks:
#
#     order          P P P P P P P P P P P P A A B B
#     tokens seen    1 2 3 4 5 6 7 8 9 …       13   13
#     rank           0 0 0 0 1 1 1 1 1 1 1 1 0 0 0 0     8 tokens each, seeing 64 and 68
#
# A rank's tokens are pieces of runs. A piece hangs below the piece before it, as a run hangs below the run that it branches
# off from. So what it sees is still its ancestors and itself, and ancestors may be another rank's.


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


# A rank has queries, keys and values of its own tokens. The keys and values of all are gathered, used and given up: in the
# backward pass they are gathered again, and their gradients are summed and go back to the ranks whose tokens they are. So
# what a rank keeps of a micro-batch is its own tokens' alone.
#
# In 16 bits on CUDA a rank makes two calls of flash attention: each of its pieces sees itself causally, and pieces below
# the same ancestors see those whole; both results are merged (``learner/tree_attention.py``). Otherwise by rectangles.


class SharedAttention:
    """Attention of one flat row [1, T] that holds this rank's tokens of a micro-batch."""

    def __init__(self, shares: TokenShares, group: TokenGroup, device: torch.device, flash: Flash | None = None) -> None:
        self.group, self.width = group, shares.width
        self._flash, self._device = flash, device
        self._pieces = shares.pieces[group.rank]
        self._length = sum(piece.length for piece in self._pieces)
        self._rectangles: tuple[TreeAttention, Tensor, Tensor] | None = None
        self._parts: tuple[Part, Part | None] | None = None

    def __call__(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float) -> Tensor:
        """Attend; [1, T, H, D]. All ranks of the group call it together."""
        flash = self._flash
        if flash is None:
            flash = usable(query_BHTD.device, query_BHTD.dtype, query_BHTD.shape[1], *key_BKTD.shape[1::2])
        own = (one_row(x).contiguous() for x in (query_BHTD, key_BKTD, value_BKTD))
        out_THD: Tensor = _Attended.apply(*own, self, flash, scaling)
        return out_THD[None]

    def gathered(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [size · width, K, D] of all ranks; of a rank without tokens, what stands for them is left out."""
        own = torch.stack([key, value], 1)[: self._length]
        both = self.group.gather(own, self.width)
        return both[:, 0], both[:, 1]

    def returned(self, key: Tensor, value: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the own keys and values, from those that every rank has of all; summed in float32."""
        both = self.group.sum_own(at_least_float32(torch.stack([key, value], 1)))[: self._length].to(like.dtype)
        padded = both.new_zeros(len(like) - self._length, *both.shape[1:])
        own = torch.cat([both, padded]) if len(padded) else both
        return own[:, 0], own[:, 1]

    def by_rectangles(self, own: Sequence[Tensor], whole: Sequence[Tensor], scaling: float) -> Tensor:
        """Attention [T, H, D] of own queries, keys and values, with the keys and values of all."""
        if not self._pieces:  # a token that stands for none sees itself
            return own[2].repeat_interleave(own[0].shape[1] // own[2].shape[1], dim=1)
        if self._rectangles is None:
            self._rectangles = _as_rectangles(self._pieces, self._device)
        attention, order_T, back_T = self._rectangles
        query, key, value = (x.index_select(0, order_T) for x in own)
        return attention.attend(query, key, value, whole[0], whole[1], scaling).index_select(0, back_T)

    @property
    def empty(self) -> bool:
        """True if this rank has no tokens of the micro-batch, but one that stands for them."""
        return not self._pieces

    @property
    def parts(self) -> tuple[Part, Part | None]:
        """The two calls of flash attention: pieces by themselves, and what they see above them, if anything."""
        if self._parts is None:
            self._parts = _parts(self._pieces, self.group.rank * self.width, self._device)
        return self._parts


def at_least_float32(x: Tensor) -> Tensor:
    """Numbers to be summed, where they have 16 bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Attended(torch.autograd.Function):
    """(own queries [T, H, D], keys [T, K, D], values) → attention over the tokens of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, row: SharedAttention, flash: Flash | None, scaling: float
    ) -> Tensor:
        ctx.row, ctx.flash, ctx.scaling = row, flash, scaling
        whole = row.gathered(key, value)
        if flash is None or row.empty:
            ctx.save_for_backward(query, key, value)
            return row.by_rectangles((query, key, value), whole, scaling)
        own, seen = row.parts
        fine_query, fine = finer(query), [finer(x) for x in whole]
        out, lse = flash.forward(fine_query, fine[0][own.keys], fine[1][own.keys], own, scaling)
        if seen is not None:
            more, more_lse = flash.forward(fine_query[seen.queries], fine[0][seen.keys], fine[1][seen.keys], seen, scaling)
            merge(out[seen.queries], lse, more, more_lse, seen.queries.start)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *result = ctx.saved_tensors
        row, flash, gradient = ctx.row, ctx.flash, gradients[0].contiguous()
        whole = row.gathered(key, value)
        if not result:
            taken = [x.detach().requires_grad_() for x in (query, key, value, *whole)]
            with torch.enable_grad():
                out = row.by_rectangles(taken[:3], taken[3:], ctx.scaling)
            found = torch.autograd.grad(out, taken, gradient, allow_unused=True)
            of_query, *of_own, of_key, of_value = (
                torch.zeros_like(x) if one is None else one for x, one in zip(taken, found, strict=True)
            )
            back = row.returned(of_key, of_value, key)
            return of_query, of_own[0] + back[0], of_own[1] + back[1], None, None, None
        out, lse = result
        sums = [torch.zeros_like(at_least_float32(x)) for x in (query, *whole)]
        for part in row.parts:
            if part is not None:
                rows = part.queries
                saved = (query[rows], whole[0][part.keys], whole[1][part.keys], out[rows], lse[:, rows].contiguous())
                found = flash.backward(saved, gradient[rows], part, ctx.scaling)
                for summed, more, places in zip(sums, found, (rows, part.keys, part.keys), strict=True):
                    if isinstance(places, slice):
                        summed[places].add_(more)
                    else:
                        summed.index_add_(0, places, more.to(summed.dtype))
        return sums[0].to(query.dtype), *row.returned(sums[1], sums[2], key), None, None, None


def _as_rectangles(pieces: Sequence[TokenRun], device: torch.device) -> tuple[TreeAttention, Tensor, Tensor]:
    """Rectangles of the pieces, the order in which they stand there, and the way back."""
    copies = [replace(piece) for piece in pieces]  # to be arranged anew; what they hang below stays where it is
    starts = np.cumsum([0, *(piece.length for piece in pieces)])
    batches = arrange(copies)
    order_T = np.empty(starts[-1], dtype=np.int64)
    for start, copy in zip(starts[:-1], copies, strict=True):
        order_T[copy.start : copy.start + copy.length] = np.arange(start, start + copy.length)
    back_T = np.argsort(order_T)
    return TreeAttention(batches, device), torch.from_numpy(order_T).to(device), torch.from_numpy(back_T).to(device)


def _parts(pieces: Sequence[TokenRun], start: int, device: torch.device) -> tuple[Part, Part | None]:
    lengths = [piece.length for piece in pieces]
    ends, longest, total = segment_ends(lengths, device), max(2, *lengths), sum(lengths)
    own = Part(slice(0, total), slice(start, start + total), ends, ends, longest, longest, True)
    stretches: dict[TokenRun, int] = {}
    for piece in pieces:
        if piece.above is not None:
            stretches[piece.above] = stretches.get(piece.above, 0) + piece.length
    if not stretches:
        return own, None
    below = list(stretches.values())
    keys = [
        np.concatenate([parent.ancestors(), np.arange(parent.start, parent.start + parent.length)]) for parent in stretches
    ]
    sizes = [len(places) for places in keys]
    key_places = torch.from_numpy(np.concatenate(keys)).to(device)
    seen = Part(
        slice(total - sum(below), total),
        key_places,
        segment_ends(below, device),
        segment_ends(sizes, device),
        max(2, *below),
        max(2, *sizes),
        False,
    )
    return own, seen

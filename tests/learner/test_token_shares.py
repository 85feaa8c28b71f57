"""Tokens of a micro-batch that several ranks share: each is computed once, evenly, and attends as it does in one process.

Ranks are threads here; ``tests/learner/sharded`` has processes.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sensorium.learner.forward import rows_taken
from sensorium.learner.packing import MicroBatch
from sensorium.learner.sequence_parallel import SharedAttention, share_tokens, slot_share
from sensorium.learner.sharding import divide_media
from sensorium.learner.token_runs import TokenRun, arrange
from sensorium.learner.tree_attention import TreeAttention
from sensorium.models.prepared_media import Extent, TowerInput
from sensorium.models.segment_layout import Features, Slot
from sensorium.models.tower import VisionTower
from sensorium.vocabulary import Media

from .test_packing import forests
from .test_tree_levels import PlainFlash

CPU = torch.device("cpu")
EMPTY: dict[str, Any] = {
    field.name: torch.zeros(0, dtype=torch.long) for field in fields(MicroBatch) if field.name != "slots"
}


class ThreadGroup:
    """Ranks that are threads of one process."""

    def __init__(self, rank: int, size: int, meeting: Barrier, board: list[Any]) -> None:
        self.rank, self.size = rank, size
        self._meeting, self._board = meeting, board

    def gather(self, own: Tensor, width: int) -> Tensor:
        return torch.cat(self._told(torch.cat([own, own.new_zeros(width - len(own), *own.shape[1:])])))

    def sum_own(self, rows: Tensor) -> Tensor:
        return sum(part.unflatten(0, (self.size, -1))[self.rank] for part in self._told(rows))  # type: ignore[return-value]

    def _told(self, given: Tensor) -> list[Tensor]:
        self._board[self.rank] = given
        self._meeting.wait(60)
        found = list(self._board)
        self._meeting.wait(60)
        return found


def together(size: int, work: Callable[[ThreadGroup], Any]) -> list[Any]:
    """What the ranks of a group return."""
    meeting, board = Barrier(size), [None] * size
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(ThreadGroup(rank, size, meeting, board)), range(size)))


def test_the_example() -> None:
    prompt = TokenRun(12, None)
    runs = [prompt, TokenRun(2, prompt), TokenRun(2, prompt)]
    arrange(runs)
    shares = share_tokens(runs, 2)
    assert [sorted(places.tolist()) for places in shares.places] == [[0, 1, 2, 3, 12, 13, 14, 15], [*range(4, 12)]]


@settings(deadline=None)
@given(forests(), st.integers(1, 5))
def test_every_token_is_one_ranks_and_all_have_as_many(runs: list[TokenRun], ranks: int) -> None:
    arrange(runs)
    count = sum(run.length for run in runs)
    if not count:
        return
    shares = share_tokens(runs, ranks)
    assert sorted(np.concatenate(shares.places).tolist()) == list(range(count))
    sizes = [len(places) for places in shares.places]
    assert max(sizes) - min(sizes) <= 1
    assert shares.width == max(sizes)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_long_prompt_and_its_responses_are_shared_evenly(ranks: int) -> None:
    """What a rank's tokens see together differs by less than a hundredth, with two pieces of the prompt at most each."""
    prompt = TokenRun(4000, None)
    runs = [prompt, *(TokenRun(250, prompt) for _ in range(8))]
    arrange(runs)
    shares = share_tokens(runs, ranks)
    seen = [sum(piece.length * (piece.prefix + piece.length / 2) for piece in pieces) for pieces in shares.pieces]
    assert max(seen) / min(seen) < 1.01
    assert all(sum(piece.prefix < 4000 for piece in pieces) <= 2 for pieces in shares.pieces)


@settings(deadline=None, max_examples=30)
@given(forests(), st.integers(2, 3), st.booleans())
def test_ranks_attend_as_one_process_does(runs: list[TokenRun], ranks: int, flash: bool) -> None:
    """By rectangles and by flash attention, with the gradients of queries, keys and values; ranks may be without tokens."""
    batches = arrange(runs)
    if not batches:
        return
    count = sum(run.length for run in runs)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, count, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    key, value = (
        torch.randn(1, 2, count, 8, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    gradient = torch.randn(1, count, 4, 8, generator=generator, dtype=torch.float64)
    expected = TreeAttention(batches, CPU)(0, query, key, value, 0.3)
    gradients = torch.autograd.grad(expected, [query, key, value], gradient)
    shares = share_tokens(runs, ranks)

    def rank(group: ThreadGroup) -> None:
        own = torch.from_numpy(shares.places[group.rank])
        standing = own if len(own) else torch.zeros(1, dtype=torch.long)
        row = SharedAttention(shares, group, CPU, PlainFlash() if flash else None)
        taken = [x.detach()[:, :, standing].requires_grad_() for x in (query, key, value)]
        out = row(0, *taken, 0.3)
        found = torch.autograd.grad(out, taken, gradient[:, standing] * bool(len(own)))
        torch.testing.assert_close(out[:, : len(own)], expected[:, own], rtol=1e-6, atol=1e-6)
        for one, whole in zip(found, gradients, strict=True):
            torch.testing.assert_close(one[:, :, : len(own)], whole[:, :, own], rtol=1e-6, atol=1e-6)

    together(ranks, rank)


def test_features_go_where_their_tokens_are() -> None:
    """Those of another rank's tokens are not held."""
    media = Media("video", "hash")
    own_T = np.array([-1, 4, 5, -1, 0, 1, 9, -1])
    share = slot_share(Slot(media, ((1, 3), (5, 2))), own_T, CPU)
    again = slot_share(Slot(media, ((2, 5),)), own_T, CPU)
    nowhere = slot_share(Slot(media, ((0, 1),)), own_T, CPU)
    (taken_K,) = rows_taken([MicroBatch(slots=(again, share), **EMPTY), MicroBatch(slots=(nowhere,), **EMPTY)]).values()
    assert taken_K.tolist() == [0, 1, 2, 3, 4]
    (taken_K,) = rows_taken([MicroBatch(slots=(share,), **EMPTY)]).values()
    assert taken_K.tolist() == [0, 1, 3, 4]
    held = Features(torch.arange(5.0)[:, None], (torch.arange(5.0)[:, None] + 10,)).rows(taken_K)
    placed = share.place(held, taken_K)
    assert placed.runs == ((4, 2), (1, 1), (9, 1))
    assert placed.features.embeds_NH[:, 0].tolist() == [0, 1, 3, 4]
    assert placed.features.deepstack_NH[0][:, 0].tolist() == [10, 11, 13, 14]
    assert not nowhere.runs


def test_a_video_is_cut_between_steps_of_time_and_a_picture_stays_whole() -> None:
    media = [Media("video", "film"), Media("picture", "photo")]
    extents = [Extent("video", (8, 10, 10)), Extent("picture", (1, 20, 15))]
    tower = VisionTower.__new__(VisionTower)
    pieces = divide_media(tower, media, extents, [200, 75], 2)
    assert [(piece.media.kind, piece.first, piece.end, piece.count, piece.rank) for piece in pieces] == [
        ("video", 0, 4, 100, 0),
        ("video", 4, 8, 100, 1),
        ("picture", 0, 1, 75, 0),
    ]
    cut = pieces[1].cut(TowerInput(torch.arange(800)[:, None], extents[0]))
    assert (cut.extent.grid, cut.patches_PC[0, 0], len(cut.patches_PC)) == ((4, 10, 10), 400, 400)

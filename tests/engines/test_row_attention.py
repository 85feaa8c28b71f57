"""Attention of few rows in one launch gives what placing and attending one after the other give."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sensorium.engines.native.decode_state import DecodeRows, DecodeState, RowLayout, TorchOps, Unplaced
from sensorium.engines.native.key_values import PAGE
from sensorium.engines.protocol import Sampling
from sensorium.kernels.layer_ops import LayerParts, NormWeights

kernels = pytest.importorskip("sensorium.engines.native.decode_kernels", reason="triton is not installed")
pytestmark = pytest.mark.gpu
SCALING = 0.09
# Heads, key heads, size of a head, biases, norms: Qwen2.5-VL-3B's, Qwen2.5-VL-7B's, Qwen3-VL's, and one of small heads.
SHAPES = [(16, 2, 128, True, False), (28, 4, 128, True, False), (32, 8, 128, False, True), (4, 2, 64, False, False)]
# Lengths of rows by group, and the pages that each group shares.
BATCHES: list[list[tuple[list[int], int]]] = [
    [([0], 0)],
    [([1300], 0)],
    [([63, 64], 0), ([127], 0)],
    [([130, 400, 191], 2), ([64], 0), ([900, 901], 14)],
    [([700 + 13 * i for i in range(8)], 10), ([0] * 3, 0), ([2047], 0)],
    [([300 + 40 * i for i in range(8)], 4)] * 3,
    [([70 + i] * 2, 1) for i in range(16)],
    [([5000, 5001], 70), ([1], 0)],
]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda()


def layer_of(size: int, normed: bool) -> LayerParts:
    norms = tuple(NormWeights((1 + 0.1 * normal(size, seed=i)).bfloat16(), 1e-6) for i in (5, 6))
    rest: Any = nn.Identity()
    gain = NormWeights(torch.ones(8, device="cuda", dtype=torch.bfloat16), 1e-6)
    both: Any = norms if normed else None
    return LayerParts(0, gain, rest, rest, rest, rest, both, size, SCALING, gain, rest)


def rows_of(batch: Sequence[tuple[list[int], int]]) -> DecodeRows:
    """Rows whose pages are all different but for those that a group shares."""
    laid: list[RowLayout] = []
    pages = 1
    for number, (lengths, shared) in enumerate(batch):
        common = list(range(pages, pages + shared))
        pages += shared
        for length in lengths:
            own = length // PAGE + 1 - shared
            mine = common + list(range(pages, pages + own))
            pages += own
            laid.append(RowLayout(0, length, length, 0, 0, Sampling(max_new_tokens=1), mine, shared, number))
    state = DecodeState(len(laid), max(len(row.pages) for row in laid), 100, torch.device("cuda"))
    state.lay_out(laid, len(laid), torch.zeros(1, dtype=torch.int64, device="cuda"))
    return state.view(len(laid))


def inputs(
    batch: Sequence[tuple[list[int], int]], shape: tuple[int, int, int, bool, bool], parts: int = 3
) -> tuple[Unplaced, DecodeRows, Tensor]:
    heads, kv_heads, size, biased, normed = shape
    rows = rows_of(batch)
    count, wide = len(rows.lengths_B), (heads + 2 * kv_heads) * size
    biases = [normal(width, seed=i).bfloat16() for i, width in enumerate((heads * size, kv_heads * size, kv_heads * size))]
    angles = normal(count, size // 2, seed=7).repeat(1, 2)
    rotary = (angles.cos().bfloat16(), angles.sin().bfloat16())
    given = Unplaced(layer_of(size, normed), normal(parts, count, wide, seed=8), biases if biased else [], rotary)
    pages = int(rows.table_BP.max()) + 1
    block = normal(2, pages, kv_heads, PAGE, size, seed=9).bfloat16()
    return given, rows, block


def exactly(given: Unplaced, rows: DecodeRows, block: Tensor) -> tuple[Tensor, Tensor]:
    """Placed by torch with its roundings, attention in float64; and the pages."""
    ops, size = TorchOps(), block.shape[-1]
    whole = given.parts_PBN.sum(0)
    kv_width = block.shape[2] * size
    split = list(whole.split([whole.shape[1] - 2 * kv_width, kv_width, kv_width], 1))
    for i, bias in enumerate(given.biases):
        split[i] = split[i] + bias.float()
    placed = block.clone()
    query, key, value = (x.bfloat16() for x in split)
    query_BHD = ops.place(query, key, value, given.rotary, given.layer.norms, rows, placed).double()
    found = []
    for row, length in enumerate(rows.lengths_B.tolist()):
        pages = rows.table_BP[row, : length // PAGE + 1].long()
        keys, values = (placed[i, pages].transpose(0, 1).flatten(1, 2)[:, : length + 1].double() for i in (0, 1))
        query_KSD = query_BHD[row].view(block.shape[2], -1, size)
        weights = (query_KSD @ keys.transpose(1, 2) * SCALING).softmax(-1)
        found.append((weights @ values).flatten())
    return torch.stack(found), placed


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", BATCHES)
def test_one_launch_places_and_attends(batch: list[tuple[list[int], int]], shape: tuple[int, int, int, bool, bool]) -> None:
    given, rows, block = inputs(batch, shape)
    expected, placed = exactly(given, rows, block)
    attention = kernels.RowAttention(pytest.fail, lambda *_: pytest.fail("no trial was asked for"))
    before = block.clone()
    found = attention.attend(given, rows, block)
    assert float((found.double() - expected).abs().max() / expected.abs().max()) < 0.008
    assert float((block.float() - placed.float()).abs().max()) <= (0.06 if shape[4] else 0.04)  # the last bit of a bfloat16
    assert int((block != before).any(-1).sum()) == 2 * len(rows.lengths_B) * shape[1]  # nothing but the new entries
    again = block.clone()
    assert torch.equal(attention.attend(given, rows, again), found)
    assert torch.equal(again, block)


def test_entries_that_nobody_wrote_do_not_count() -> None:
    given, rows, block = inputs(BATCHES[3], SHAPES[0])
    expected, _ = exactly(given, rows, block)
    for row, length in enumerate(rows.lengths_B.tolist()):
        block[:, rows.table_BP[row, length // PAGE].long(), :, length % PAGE :] = float("nan")
    found = kernels.RowAttention(pytest.fail, lambda *_: pytest.fail("no trial")).attend(given, rows, block)
    assert float((found.double() - expected).abs().max() / expected.abs().max()) < 0.008


def test_a_trial_decides() -> None:
    notes: list[str] = []
    given, rows, block = inputs(BATCHES[3], SHAPES[0])
    ops = kernels.TritonOps(notes.append)
    attention = ops._row_attention
    assert attention is not None
    assert attention.takes(given, block)
    assert not notes
    assert ops.reads_apart(6, kernels.READ_AGAIN)
    assert not ops.reads_apart(6, kernels.READ_AGAIN + 1)
    assert not ops.reads_apart(kernels.MOST_ROWS + 1, 0)
    assert not kernels.TritonOps().reads_apart(6, 0)
    found = ops.attend(given, rows, block.clone(), SCALING)
    one_by_one = ops._attended_one_by_one(given, rows, block.clone())
    assert float((found.float() - one_by_one.float()).abs().max() / one_by_one.abs().max()) < 0.01
    wrong = kernels.RowAttention(
        notes.append, lambda given, rows, block: 2 * one_by_one.new_ones(len(rows.lengths_B), 2048)
    )
    assert not wrong.takes(given, block)
    assert "takes several launches" in notes[0]
    assert "a trial of 6 rows was" in notes[0]
    assert not wrong.pays(6, 0)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_any_number_of_parts_is_summed(parts: int) -> None:
    given, rows, block = inputs(BATCHES[3], SHAPES[0], parts)
    expected, _ = exactly(given, rows, block)
    found = kernels.RowAttention(pytest.fail, lambda *_: pytest.fail("no trial")).attend(given, rows, block)
    assert float((found.double() - expected).abs().max() / expected.abs().max()) < 0.008


def test_sizes_that_the_kernel_does_not_know_are_left_to_others() -> None:
    attention = kernels.RowAttention(pytest.fail, lambda *_: pytest.fail("no trial"))
    for shape in ((16, 2, 32, True, False), (18, 2, 64, False, False)):
        given, _, block = inputs(BATCHES[0], shape)
        assert not attention.takes(given, block)
    given, _, block = inputs(BATCHES[0], SHAPES[0])
    assert not attention.takes(given, block.float())

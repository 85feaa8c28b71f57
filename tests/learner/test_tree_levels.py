"""Trees laid out level by level: their attention by flash attention is the attention over rectangles."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import sampled_from
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sensorium.learner import tree_attention
from sensorium.learner.token_runs import TokenRun, arrange_levels
from sensorium.learner.tree_attention import BLOCK, BOUND, LONG, LONGEST, LevelAttention, Part, TorchFlash, trial, usable

from .test_packing import forests

CPU = torch.device("cpu")


class PlainFlash:
    """What flash attention computes, segment by segment in plain torch, backward included."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, part: Part, scaling: float) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(query), query.new_empty(query.shape[1], len(query))
        for q, k in self._segments(part):
            scores, weights = self._scores(query[q], key[k], part, scaling)
            lse[:, q] = scores.logsumexp(-1)
            out[q] = (weights @ self._heads(value[k], query)).transpose(0, 1)
        return out, lse

    def backward(self, saved: Sequence[Tensor], gradient: Tensor, part: Part, scaling: float) -> Sequence[Tensor]:
        query, key, value, out, lse = saved
        found = [torch.zeros_like(x) for x in (query, key, value)]
        share = query.shape[1] // key.shape[1]
        for q, k in self._segments(part):
            scores, _ = self._scores(query[q], key[k], part, scaling)
            weights = (scores - lse[:, q, None]).exp()
            given, seen = gradient[q].transpose(0, 1), self._heads(value[k], query)
            rest = (gradient[q] * out[q]).sum(-1).T[..., None]
            slopes = weights * (given @ seen.mT - rest) * scaling
            found[0][q] = (slopes @ self._heads(key[k], query)).transpose(0, 1)
            for place, per_head in ((1, slopes.mT @ query[q].transpose(0, 1)), (2, weights.mT @ given)):
                found[place][k] = per_head.unflatten(0, (-1, share)).sum(1).transpose(0, 1)
        return found

    def _segments(self, part: Part) -> list[tuple[slice, slice]]:
        ends = [[slice(*pair) for pair in pairwise(x.tolist())] for x in (part.query_ends, part.key_ends)]
        lengths = [[x.stop - x.start for x in several] for several in ends]
        assert all(all(several) for several in lengths), "no segment is empty: kernels differ in what they make of one"
        assert max(lengths[0]) <= part.longest_query
        assert max(lengths[1]) <= part.longest_key
        return list(zip(*ends, strict=True))

    def _heads(self, x: Tensor, query: Tensor) -> Tensor:
        return x.repeat_interleave(query.shape[1] // x.shape[1], 1).transpose(0, 1)

    def _scores(self, query: Tensor, key: Tensor, part: Part, scaling: float) -> tuple[Tensor, Tensor]:
        scores = query.transpose(0, 1) @ self._heads(key, query).mT * scaling
        if part.causal:
            seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
            scores = scores.masked_fill(~seen, float("-inf"))
        return scores, scores.softmax(-1)


@settings(deadline=None, max_examples=60)
@given(forests(), sampled_from([1, 2, BLOCK]))
def test_levels_attend_as_rectangles_do(runs: list[TokenRun], block: int) -> None:
    levels = arrange_levels(runs)
    if not levels:
        return
    count = sum(run.length for run in runs)
    places = sorted(place for run in runs for place in range(run.start, run.start + run.length))
    assert places == list(range(count))
    row = LevelAttention(levels, CPU, PlainFlash(), block)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, count, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 1, 2, count, 8, generator=generator, dtype=torch.float64)
    gradient = torch.randn(1, count, 4, 8, generator=generator, dtype=torch.float64)
    results = []
    for flash in (True, False):
        inputs = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        out = row(0, *inputs, 0.3) if flash else row.rectangles(*inputs, 0.3)
        out.backward(gradient)
        results.append([out, *(tensor.grad for tensor in inputs)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_siblings_are_one_stretch_over_their_prompt() -> None:
    alone, prompt = TokenRun(3, None), TokenRun(5, None)
    runs = [prompt, alone, TokenRun(2, prompt), TokenRun(4, prompt)]
    row = LevelAttention(arrange_levels(runs), CPU)
    (above,) = row.above
    assert (alone.start, prompt.start) == (0, 3)  # a run that nothing hangs below is no gap between the keys
    assert (above.queries, above.keys) == (slice(8, 14), slice(3, 8))
    assert (above.query_ends.tolist(), above.key_ends.tolist()) == ([0, 6], [0, 5])
    assert row.own.query_ends.tolist() == [0, 3, 8, 10, 14]


def test_long_responses_over_long_prompts_are_cut_into_blocks() -> None:
    prompts = [TokenRun(length, None) for length in (40, 2 * BLOCK + 7, 30, 50, BLOCK)]
    lengths = (LONGEST * BLOCK, LONGEST * BLOCK + BLOCK + 9, 50, 5, BLOCK)
    row = LevelAttention(arrange_levels([*prompts, *map(TokenRun, lengths, prompts)]), CPU)
    sizes = [(part.query_ends.diff().tolist(), part.key_ends.diff().tolist(), part.block) for part in row.above]
    assert sizes == [
        ([LONGEST * BLOCK], [40], 0),
        ([LONGEST * BLOCK], [2 * BLOCK + 7], LONGEST * BLOCK), ([BLOCK + 9], [2 * BLOCK + 7], 2 * BLOCK),
        ([50, 5], [30, 50], 0), ([BLOCK], [BLOCK], BLOCK),
    ]  # fmt: skip
    assert [part.queries.stop for part in row.above][:-1] == [part.queries.start for part in row.above][1:]


def test_long_prompts_have_gradients_of_their_own() -> None:
    lengths = (30, LONG * BLOCK, LONG * BLOCK + 5, 7, 9)
    prompts = [TokenRun(length, None) for length in lengths]
    row = LevelAttention(arrange_levels([*prompts, TokenRun(LONG * BLOCK, prompts[-1])]), CPU)
    sizes = [(part.query_ends.diff().tolist(), part.block) for part in row.own_apart]
    long = LONG * BLOCK
    assert sizes == [([30], 0), ([long], long), ([long + 5], long + 5), ([7, 9], 0), ([long], long)]
    assert [part.queries.stop for part in row.own_apart][:-1] == [part.queries.start for part in row.own_apart][1:]
    assert len(row.own.query_ends) == 1 + len(lengths) + 1, "forward all in one call"


def test_cudnn_plans_for_blocks_that_come_again() -> None:
    prompt = TokenRun(BLOCK, None)
    blocks = [
        LevelAttention(arrange_levels([prompt, TokenRun(length, prompt)]), CPU).above[0]
        for length in (2 * BLOCK, 2 * BLOCK - 7, BLOCK + 1)
    ]
    block, flash = blocks[0], TorchFlash(often=2)
    assert [flash.leaves_to_cudnn(each) for each in (*blocks, block)] == [False, False, True, True]  # filled up to one size
    assert not flash.leaves_to_cudnn(replace(block, longest_key=BLOCK + 1))
    assert not flash.leaves_to_cudnn(block, back=True)  # forward and backward have a plan each
    assert not any(flash.leaves_to_cudnn(replace(block, block=0)) for _ in range(4))
    assert not any(TorchFlash().leaves_to_cudnn(block) for _ in range(4))


def test_the_trial_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trial(PlainFlash(), CPU, torch.float32, 4, 2, 16) <= 1e-5
    monkeypatch.setattr(tree_attention, "merge", lambda *given: None)
    assert trial(PlainFlash(), CPU, torch.float32, 4, 2, 16) > BOUND


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(16, 2, 128), (4, 4, 64), (4, 2, 16), (28, 4, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_attention_on_the_gpu(heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda", 0)
    for often in (None, 0):
        assert trial(TorchFlash(often), device, dtype, heads, kv_heads, size) <= BOUND
    flash = usable(device, dtype, heads, kv_heads, size)
    assert isinstance(flash, TorchFlash)
    assert flash.often
    assert usable(device, torch.float32, heads, kv_heads, size) is None  # float32: over rectangles


@pytest.mark.gpu
def test_a_wrong_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_attention, "BOUND", 1e-9)
    tree_attention.usable.cache_clear()
    with pytest.warns(UserWarning, match="rectangles.*off"):
        assert usable(torch.device("cuda", 0), torch.bfloat16, 16, 2, 128) is None
    tree_attention.usable.cache_clear()


@pytest.mark.gpu
def test_without_cudnn_all_is_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise RuntimeError("no plan")

    monkeypatch.setattr(tree_attention, "block_gradients", refuses)
    tree_attention.usable.cache_clear()
    with pytest.warns(UserWarning, match="not computed by cuDNN.*no plan"):
        flash = usable(torch.device("cuda", 0), torch.bfloat16, 16, 2, 128)
    assert isinstance(flash, TorchFlash)
    assert flash.often is None
    tree_attention.usable.cache_clear()


@pytest.mark.gpu
def test_the_first_use_may_be_inside_a_recomputed_layer() -> None:
    device = torch.device("cuda", 0)
    tree_attention.usable.cache_clear()
    prompt = TokenRun(40, None)
    row = LevelAttention(arrange_levels([prompt, TokenRun(9, prompt), TokenRun(30, prompt)]), device)
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, heads, 79, 64, generator=generator) for heads in (14, 2, 2)]
    results = []
    for recomputed in (True, False):
        query, key, value = (x.to(device, torch.bfloat16).requires_grad_() for x in drawn)
        given_ = (0, query, key, value, 0.1)
        out = checkpoint(row, *given_, use_reentrant=False) if recomputed else row(*given_)
        results.append([out, *torch.autograd.grad(out.square().sum(), [query, key, value])])
    assert usable(device, torch.bfloat16, 14, 2, 64) is not None
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)

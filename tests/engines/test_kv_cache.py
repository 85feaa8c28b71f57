"""Attention over cached keys and values equals attention over the whole sequence."""

import torch
from torch import Tensor

from sensorium.engines.native.key_values import CachedAttention, FreshAttention, KVCache, causal_bias, write_places
from sensorium.models.attention import masked_attention

LAYERS, HEADS, KV_HEADS, SIZE, SCALE = 2, 4, 2, 8, 0.3


def tensors(rows: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    q, k, v = (torch.randn(LAYERS, rows, n, length, SIZE, generator=generator) for n in heads)
    return q, k, v


def make_cache(rows: int, length: int) -> KVCache:
    cache = KVCache(LAYERS, KV_HEADS, SIZE, torch.float32, torch.device("cpu"))
    cache.reserve(rows, length)
    return cache


def after(cache: KVCache, first: int, lengths: list[int], new: int) -> CachedAttention:
    held = torch.tensor(lengths)
    bias = causal_bias(cache, held, new, max(lengths) + new)
    return CachedAttention(cache.block, write_places(cache, first, held, new), bias, first)


def test_prefill_extension_and_decode_equal_one_causal_pass() -> None:
    q, k, v = tensors(3, 40)
    cache = make_cache(5, 40)
    whole = [masked_attention(q[i], k[i], v[i], SCALE, None) for i in range(LAYERS)]
    fresh = FreshAttention(cache, 1, [20] * 3)
    for i in range(LAYERS):
        out = fresh(i, q[i, :, :, :20], k[i, :, :, :20], v[i, :, :, :20], SCALE)
        assert torch.allclose(out, whole[i][:, :20], atol=1e-6)
    more = after(cache, 1, [20, 20, 20], 15)
    for _ in range(2):  # a layer may be recomputed: the same call gives the same
        for i in range(LAYERS):
            out = more(i, q[i, :, :, 20:35], k[i, :, :, 20:35], v[i, :, :, 20:35], SCALE)
            assert torch.allclose(out, whole[i][:, 20:35], atol=1e-6)
    for t in range(35, 40):
        step = after(cache, 1, [t, t, t], 1)
        for i in range(LAYERS):
            out = step(i, q[i, :, :, t : t + 1], k[i, :, :, t : t + 1], v[i, :, :, t : t + 1], SCALE)
            assert torch.allclose(out, whole[i][:, t : t + 1], atol=1e-6)


def test_rows_of_different_lengths_see_only_their_own_past() -> None:
    q, k, v = tensors(2, 12)
    cache = make_cache(2, 12)
    cache.block.fill_(100.0)  # stale numbers that must not be seen
    lengths = [3, 9]
    for row, length in enumerate(lengths):
        fresh = FreshAttention(cache, row, [length])
        for i in range(LAYERS):
            one = slice(row, row + 1)
            fresh(i, q[i, one, :, :length], k[i, one, :, :length], v[i, one, :, :length], SCALE)
    step = after(cache, 0, lengths, 1)
    for i in range(LAYERS):
        here = [torch.stack([x[i, row, :, length] for row, length in enumerate(lengths)])[:, :, None] for x in (q, k, v)]
        out = step(i, *here, SCALE)
        for row, length in enumerate(lengths):
            one = slice(row, row + 1)
            alone = masked_attention(*(x[i, one, :, : length + 1] for x in (q, k, v)), SCALE, None)[:, -1:]
            assert torch.allclose(out[one], alone, atol=1e-6)


def test_a_padded_chunk_may_reach_further_than_its_longest_row() -> None:
    """A long row with one new token beside a short one with many: padding of the first lies behind the reserved end."""
    held, new = [60, 10], [1, 20]
    q, k, v = tensors(2, 61)
    cache = make_cache(2, 61)
    for row, length in enumerate(held):
        one, fresh = slice(row, row + 1), FreshAttention(cache, row, [length])
        for i in range(LAYERS):
            fresh(i, q[i, one, :, :length], k[i, one, :, :length], v[i, one, :, :length], SCALE)
    assert cache.capacity < max(held) + max(new)
    more = cache.attention(0, held, new)
    for i in range(LAYERS):
        parts = [torch.zeros(2, x.shape[2], max(new), SIZE) for x in (q, k, v)]
        for part, x in zip(parts, (q, k, v), strict=True):
            for row, (length, count) in enumerate(zip(held, new, strict=True)):
                part[row, :, :count] = x[i, row, :, length : length + count]
        out = more(i, *parts, SCALE)
        for row, (length, count) in enumerate(zip(held, new, strict=True)):
            one = slice(row, row + 1)
            alone = masked_attention(*(x[i, one, :, : length + count] for x in (q, k, v)), SCALE, None)[:, length:]
            assert torch.allclose(out[one, :count], alone, atol=1e-6)


def test_growing_and_moving_keep_what_rows_hold() -> None:
    cache = make_cache(2, 10)
    cache.block.normal_()
    before = cache.block.clone()
    assert cache.reserve(3, 100)
    assert cache.rows >= 3
    assert cache.capacity >= 100
    assert not cache.reserve(3, 100)
    assert torch.equal(cache.block[:, :, :2, :, : before.shape[4]], before)
    cache.copy([0, 1], [1, 0], 10)
    assert torch.equal(cache.block[:, :, 0, :, :10], before[:, :, 1, :, :10])
    assert torch.equal(cache.block[:, :, 1, :, :10], before[:, :, 0, :, :10])
    kept = cache.take(0, 6)
    cache.put(2, kept, 4)
    assert torch.equal(cache.block[:, :, 2, :, :4], kept[:, :, :, :4])
    assert not cache.block[:, :, 2, :, 4:].any()

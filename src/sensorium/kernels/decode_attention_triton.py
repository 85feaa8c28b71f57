"""Triton kernels of attention in a decode step: write and copy pages, attend to shared and own ones in splits, merge these.

And how a kernel of a decode step is launched before the last one has ended (``launch_ahead``).
"""

# mypy: disable-error-code="no-untyped-def"
import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# A kernel of the chain says at its start that the next may be launched, and waits for the one before it before it reads
# or writes anything. All of them wait, so what an earlier one wrote is there as well.


def launch_ahead(x: Tensor) -> dict[str, Any]:
    """Options of a launch whose kernel calls ``after_previous`` first."""
    return {"AHEAD": True, "launch_pdl": True} if x.is_cuda and _possible(x.get_device()) else {"AHEAD": False}


@cache
def _possible(device: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit
def after_previous(AHEAD: tl.constexpr):
    """Let the next kernel be launched, and wait until those before this one are done."""
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


_COPIED = 4096  # entries that a program of ``copy_pages`` copies


def write_entries(new_NKD: Tensor, pages_NKPD: Tensor, page_N: Tensor, offset_N: Tensor) -> None:
    """Write the keys or values of N tokens, contiguous, to their pages and places there."""
    _, kv_heads, page, size = pages_NKPD.shape
    _write_entries[(len(new_NKD),)](
        new_NKD, pages_NKPD, page_N, offset_N,
        KV=kv_heads, K=triton.next_power_of_2(kv_heads), PAGE=page, SIZE=size, D=triton.next_power_of_2(size), num_warps=1,
    )  # fmt: skip


@triton.jit
def _write_entries(
    new, pages, page_of, offset_of,
    KV: tl.constexpr, K: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, K)[:, None]
    d = tl.arange(0, D)[None, :]
    inside = (k < KV) & (d < SIZE)
    value = tl.load(new + (token * KV + k) * SIZE + d, mask=inside, other=0.0)
    place = (tl.load(page_of + token) * KV + k) * PAGE + tl.load(offset_of + token)
    tl.store(pages + place * SIZE + d, value, mask=inside)


def copy_pages(source: Tensor, from_N: Tensor, target: Tensor, to_N: Tensor) -> None:
    """Copy pages between blocks [layers, 2, pages, K, PAGE, D], contiguous; no page is both read and written."""
    layers, two, pages, *entry = source.shape
    size = math.prod(entry)
    grid = (len(from_N), layers * two, triton.cdiv(size, _COPIED))
    _copy_pages[grid](source, from_N, pages, target, to_N, target.shape[2], SIZE=size, STEP=_COPIED, num_warps=4)


@triton.jit
def _copy_pages(
    source, from_pages, source_pages, target, to_pages, target_pages, SIZE: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    place = tl.program_id(2) * STEP + tl.arange(0, STEP)
    inside = place < SIZE
    taken = tl.load(source + (layer * source_pages + tl.load(from_pages + i)) * SIZE + place, mask=inside)
    tl.store(target + (layer * target_pages + tl.load(to_pages + i)) * SIZE + place, taken, mask=inside)


@triton.jit
def _over_pages(
    q, key_pages, value_pages, pages, k, low, high, seen, factor,
    KV: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of M queries over pages low … high of a table, entries below ``seen``: sum, weight, largest score."""
    d = tl.arange(0, D)
    t = tl.arange(0, PAGE)
    inside = d < SIZE
    largest = tl.full((M,), float("-inf"), tl.float32)
    weight = tl.zeros((M,), tl.float32)
    summed = tl.zeros((M, D), tl.float32)
    for p in range(low, high):
        page = tl.load(pages + p).to(tl.int64)
        base = (page * KV + k) * PAGE * SIZE
        there = p * PAGE + t < seen
        keys = tl.load(key_pages + base + t[None, :] * SIZE + d[:, None], mask=inside[:, None], other=0.0)
        scores = tl.dot(q, keys, input_precision=PRECISION) * factor
        scores = tl.where(there[None, :], scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        part = tl.exp2(scores - larger[:, None])
        kept = tl.exp2(largest - larger)
        # What is behind the end may be no number, left by another row: nothing times that is no number.
        used = there[:, None] & inside[None, :]
        values = tl.load(value_pages + base + t[:, None] * SIZE + d[None, :], mask=used, other=0.0)
        if values.dtype == tl.bfloat16:
            values = values.to(tl.float16)  # the same numbers from 2^-14 to 65504, and weights to 11 bits; as the learner
        weight = weight * kept + tl.sum(part, 1)
        summed = summed * kept[:, None] + tl.dot(part.to(values.dtype), values, input_precision=PRECISION)
        largest = larger
    return summed, weight, largest


@triton.jit
def _shared_split(common, splits, least, PAGE: tl.constexpr):
    """Of a tile's shared pages: how many a split takes, at least ``least``, and how many splits that makes."""
    each = tl.maximum(tl.cdiv(common // PAGE, splits), least)
    return each, tl.cdiv(common // PAGE, each)


@triton.jit(do_not_specialize=["splits", "own_splits", "least"])
def attend_shared(
    query, key_pages, value_pages, table, lengths, shared, partial, weights, width, factor, splits, own_splits, least,
    tile_first, tile_rows,
    M: tl.constexpr, KV: tl.constexpr, SHARE: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    k = tl.program_id(1)
    split = tl.program_id(2)
    count = tl.load(tile_rows + tile)
    first = tl.load(tile_first + tile)
    if count < 2:
        return
    common = tl.load(shared + first).to(tl.int32)
    each, used_splits = _shared_split(common, splits, least, PAGE)
    if split >= used_splits:
        return
    m = tl.arange(0, M)
    d = tl.arange(0, D)
    row = first + m // SHARE
    head = k * SHARE + m % SHARE
    real = m < count * SHARE
    at = (row * (KV * SHARE) + head).to(tl.int64)
    used = real[:, None] & (d < SIZE)[None, :]
    q = tl.load(query + at[:, None] * SIZE + d[None, :], mask=used, other=0.0)
    low = split * each
    high = tl.minimum(low + each, common // PAGE)
    summed, weight, largest = _over_pages(
        q, key_pages, value_pages, table + first * width, k, low, high, common, factor, KV, SIZE, D, PAGE, M, PRECISION
    )
    place = at * (splits + own_splits) + split
    tl.store(partial + place[:, None] * SIZE + d[None, :], summed / weight[:, None], mask=used)
    tl.store(weights + place, largest + tl.log2(weight), mask=real)


@triton.jit(do_not_specialize=["splits", "own_splits", "least"])
def attend_own(
    query, key_pages, value_pages, table, lengths, shared, partial, weights, width, factor, splits, own_splits, least,
    M: tl.constexpr, KV: tl.constexpr, SHARE: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    PRECISION: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    k = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    # Lengths and what is shared do not change within a step: they are read while the kernel before this one ends.
    seen = tl.minimum(tl.load(lengths + row) + 1, width * PAGE).to(tl.int32)
    begin = (tl.load(shared + row) // PAGE).to(tl.int32)
    end = tl.cdiv(seen, PAGE)
    each = tl.cdiv(end - begin, own_splits)
    low = begin + split * each
    high = tl.minimum(low + each, end)
    m = tl.arange(0, M)
    d = tl.arange(0, D)
    real = m < SHARE
    at = row * (KV * SHARE) + k * SHARE + m
    used = real[:, None] & (d < SIZE)[None, :]
    after_previous(AHEAD)
    q = tl.load(query + at[:, None] * SIZE + d[None, :], mask=used, other=0.0)
    summed, weight, largest = _over_pages(
        q, key_pages, value_pages, table + row * width, k, low, high, seen, factor, KV, SIZE, D, PAGE, M, PRECISION
    )
    divisor = tl.where(weight > 0, weight, 1.0)
    place = at * (splits + own_splits) + splits + split
    tl.store(partial + place[:, None] * SIZE + d[None, :], summed / divisor[:, None], mask=used)
    tl.store(weights + place, tl.where(weight > 0, largest + tl.log2(divisor), float("-inf")), mask=real)


@triton.jit(do_not_specialize=["splits", "own_splits", "least"])
def merge(
    partial, weights, shared, gates, out, splits, own_splits, least,
    GATED: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, S: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = row * HEADS + tl.program_id(1)
    s = tl.arange(0, S)
    d = tl.arange(0, D)
    # The shared kernel writes no split that has no pages, and nothing where a row shares nothing.
    _, used_splits = _shared_split(tl.load(shared + row).to(tl.int32), splits, least, PAGE)
    total = splits + own_splits
    given = (s < used_splits) | ((s >= splits) & (s < total))
    after_previous(AHEAD)
    weight = tl.load(weights + at * total + s, mask=given, other=float("-inf"))
    factor = tl.exp2(weight - tl.max(weight, 0))
    used = (given & (factor > 0))[:, None] & (d < SIZE)[None, :]
    part = tl.load(partial + (at * total + s)[:, None] * SIZE + d[None, :], mask=used, other=0.0)
    merged = (tl.sum(part * factor[:, None], 0) / tl.sum(factor, 0)).to(out.dtype.element_ty)
    if GATED:
        gate = tl.load(gates + at * SIZE + d, mask=d < SIZE, other=0.0).to(tl.float32)
        merged = (merged.to(tl.float32) * gate).to(out.dtype.element_ty)
    tl.store(out + at * SIZE + d, merged, mask=d < SIZE)


BLOCK = 4096

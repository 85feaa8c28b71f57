"""Attention within short segments of a vision tower as Triton kernels: one program for a segment and a head.

A window of Qwen2.5's towers has at most 64 patches, so its scores fit in a multiprocessor. Forward and backward read every
value once and leave the gradients of queries, keys and values side by side, as the layer before them wants them. Axes:
P patches, H heads, D head size.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST = 64
LOG2_E = math.log2(math.e)


def attend_windows(rotated: Tensor, ends: Tensor, heads: int, scaling: float) -> tuple[Tensor, Tensor]:
    """[P, H, D], and the logarithm (base 2) of the weights' sum, of [P, 3 · H · D] and the ends of its segments."""
    patches, size = len(rotated), rotated.shape[1] // 3 // heads
    out_PHD = rotated.new_empty(patches, heads, size)
    logs_PH = torch.empty(patches, heads, dtype=torch.float32, device=rotated.device)
    _forward[(len(ends) - 1, heads)](
        rotated, ends, out_PHD, logs_PH, scaling * LOG2_E, **_sizes(rotated, heads, size), num_warps=4
    )
    return out_PHD, logs_PH


def window_gradients(
    given_PHD: Tensor, rotated: Tensor, seen_PHD: Tensor, logs_PH: Tensor, ends: Tensor, scaling: float
) -> Tensor:
    """The gradient of ``rotated`` where that of the result is given."""
    _, heads, size = seen_PHD.shape
    out = torch.empty_like(rotated)
    _backward[(len(ends) - 1, heads)](
        given_PHD.contiguous(), rotated, seen_PHD, logs_PH, ends, out, scaling * LOG2_E, scaling,
        **_sizes(rotated, heads, size), num_warps=4,
    )  # fmt: skip
    return out


def _sizes(rotated: Tensor, heads: int, size: int) -> dict[str, object]:
    precision = "ieee" if rotated.dtype == torch.float32 else "tf32"
    return {
        "HEADS": heads, "SIZE": size, "D": max(16, triton.next_power_of_2(size)), "M": LONGEST, "PRECISION": precision,
    }  # fmt: skip


@triton.jit
def _forward(
    rotated, ends, out, logs, factor,
    HEADS: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    start = tl.load(ends + tl.program_id(0))
    count = tl.load(ends + tl.program_id(0) + 1) - start
    head = tl.program_id(1)
    t = tl.arange(0, M)
    d = tl.arange(0, D)
    real = t < count
    used = real[:, None] & (d < SIZE)[None, :]
    row = (start + t).to(tl.int64)
    place = (row * (3 * HEADS) + head)[:, None] * SIZE + d[None, :]
    query = tl.load(rotated + place, mask=used, other=0.0)
    key = tl.load(rotated + HEADS * SIZE + place, mask=used, other=0.0)
    value = tl.load(rotated + 2 * HEADS * SIZE + place, mask=used, other=0.0)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * factor
    scores = tl.where(real[None, :], scores, float("-inf"))
    largest = tl.max(scores, 1)
    weights = tl.exp2(scores - largest[:, None])
    total = tl.sum(weights, 1)
    seen = tl.dot(weights.to(value.dtype), value, input_precision=PRECISION) / total[:, None]
    at = row * HEADS + head
    tl.store(out + at[:, None] * SIZE + d[None, :], seen.to(out.dtype.element_ty), mask=used)
    tl.store(logs + at, largest + tl.log2(total), mask=real)


@triton.jit
def _backward(
    given, rotated, seen, logs, ends, out, factor, scaling,
    HEADS: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    start = tl.load(ends + tl.program_id(0))
    count = tl.load(ends + tl.program_id(0) + 1) - start
    head = tl.program_id(1)
    t = tl.arange(0, M)
    d = tl.arange(0, D)
    real = t < count
    used = real[:, None] & (d < SIZE)[None, :]
    row = (start + t).to(tl.int64)
    place = (row * (3 * HEADS) + head)[:, None] * SIZE + d[None, :]
    at = row * HEADS + head
    query = tl.load(rotated + place, mask=used, other=0.0)
    key = tl.load(rotated + HEADS * SIZE + place, mask=used, other=0.0)
    value = tl.load(rotated + 2 * HEADS * SIZE + place, mask=used, other=0.0)
    gradient = tl.load(given + at[:, None] * SIZE + d[None, :], mask=used, other=0.0)
    result = tl.load(seen + at[:, None] * SIZE + d[None, :], mask=used, other=0.0)
    kind = query.dtype
    inner = tl.sum(gradient.to(tl.float32) * result.to(tl.float32), 1)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * factor
    log = tl.load(logs + at, mask=real, other=0.0)
    weights = tl.where(real[None, :] & real[:, None], tl.exp2(scores - log[:, None]), 0.0)
    value_gradient = tl.dot(tl.trans(weights).to(kind), gradient, input_precision=PRECISION)
    tl.store(out + 2 * HEADS * SIZE + place, value_gradient.to(kind), mask=used)
    pulled = tl.dot(gradient, tl.trans(value), input_precision=PRECISION)
    slope = (weights * (pulled - inner[:, None]) * scaling).to(kind)
    tl.store(out + place, tl.dot(slope, key, input_precision=PRECISION).to(kind), mask=used)
    key_gradient = tl.dot(tl.trans(slope), query, input_precision=PRECISION)
    tl.store(out + HEADS * SIZE + place, key_gradient.to(kind), mask=used)

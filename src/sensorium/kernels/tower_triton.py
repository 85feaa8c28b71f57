"""Vision towers: the rotation of queries and keys, and attention within short segments, as Triton kernels."""

# mypy: disable-error-code="no-untyped-def"
# mypy: disable-error-code="no-untyped-def"
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# In float32, rounded once, as the stock towers do it. Axes: N patches, S slots (queries, keys, values), H heads, D head
# size.


class RotateSlots(torch.autograd.Function):
    """(x [N, S · H · D], cos [N, D], sin, S, count) → x with its first ``count`` of S slots rotated, in place."""

    @staticmethod
    def forward(ctx: Any, x_NW: Tensor, cos_ND: Tensor, sin_ND: Tensor, slots: int, count: int) -> Tensor:
        cos_ND, sin_ND = cos_ND.contiguous(), sin_ND.contiguous()
        ctx.save_for_backward(cos_ND, sin_ND)
        ctx.slots, ctx.count = slots, count
        ctx.mark_dirty(x_NW)
        rotate_into(x_NW, x_NW, cos_ND, sin_ND, slots, count, back=False)
        return x_NW

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos_ND, sin_ND = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        out_NW = torch.empty_like(gradient)
        rotate_into(gradient, out_NW, cos_ND, sin_ND, ctx.slots, ctx.count, back=True)
        return out_NW, None, None, None, None


def rotate_into(x_NW: Tensor, out_NW: Tensor, cos_ND: Tensor, sin_ND: Tensor, slots: int, count: int, back: bool) -> None:
    """Rotate contiguous rows; in place only what is rotated is touched."""
    assert x_NW.is_contiguous()
    rows, width = x_NW.shape
    size = cos_ND.shape[1]
    heads = width // slots // size
    _rotate_slots[(rows, count if out_NW is x_NW else slots)](
        x_NW, cos_ND, sin_ND, out_NW, count,
        BACK=back, SLOTS=slots, HEADS=heads, H=triton.next_power_of_2(heads), SIZE=size,
        D=triton.next_power_of_2(size), num_warps=4,
    )  # fmt: skip


@triton.jit
def _rotate_slots(
    x, cos, sin, out, count,
    BACK: tl.constexpr, SLOTS: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1)
    h = tl.arange(0, H)[:, None]
    d = tl.arange(0, D)[None, :]
    inside = (h < HEADS) & (d < SIZE)
    base = ((row * SLOTS + slot) * HEADS + h) * SIZE
    own = tl.load(x + base + d, mask=inside, other=0.0)
    if slot < count:
        other = (d + SIZE // 2) % SIZE
        turned = tl.load(x + base + other, mask=inside, other=0.0).to(tl.float32)
        c = tl.load(cos + row * SIZE + d, mask=d < SIZE, other=0.0).to(tl.float32)
        if BACK:
            s = tl.load(sin + row * SIZE + other, mask=d < SIZE, other=0.0).to(tl.float32)
            turned = tl.where(d < SIZE // 2, turned, -turned)
        else:
            s = tl.load(sin + row * SIZE + d, mask=d < SIZE, other=0.0).to(tl.float32)
            turned = tl.where(d < SIZE // 2, -turned, turned)
        own = (own.to(tl.float32) * c + turned * s).to(out.dtype.element_ty)
        tl.debug_barrier()  # in place: every value is read, by whichever thread, before one is written
    tl.store(out + base + d, own, mask=inside)


# A window of Qwen2.5's towers has at most 64 patches, so its scores fit in a multiprocessor. Forward and backward read
# every value once and leave the gradients of queries, keys and values side by side, as the layer before them wants
# them. Axes: P patches, H heads, D head size.


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

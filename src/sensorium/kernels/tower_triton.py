"""Vision towers: the rotation of queries and keys as a Triton kernel.

It computes in float32 and rounds once, as the stock towers do. Axes: N patches, S slots (queries, keys, values), H heads,
D head size.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


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

"""Numbers in another kind by one Triton kernel: torch's own moves a third of what the memory could."""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def cast(x: Tensor, kind: torch.dtype) -> Tensor:
    """A contiguous tensor in another kind of floating-point numbers, as ``Tensor.to`` gives it."""
    out, count = torch.empty_like(x, dtype=kind), x.numel()
    if count:
        _cast[(triton.cdiv(count, BLOCK),)](x, out, count, BLOCK=BLOCK, num_warps=8)
    return out


@triton.jit
def _cast(x, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    found = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, found.to(out.dtype.element_ty), mask=inside)

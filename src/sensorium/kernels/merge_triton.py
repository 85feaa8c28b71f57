"""Two parts of an attention merged by their log-sum-exp: one Triton kernel. Axes: N tokens, H heads, D head size."""

# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl
from torch import Tensor


def merge(out_NHD: Tensor, lse_HT: Tensor, more_NHD: Tensor, more_lse_HN: Tensor, start: int) -> None:
    """Add a part to contiguous rows in place; their log-sum-exp is that of the columns from ``start`` on."""
    count, heads, size = out_NHD.shape
    _merge[(count,)](
        out_NHD, lse_HT, more_NHD, more_lse_HN, start, lse_HT.stride(0), more_lse_HN.stride(0),
        HEADS=heads, H=triton.next_power_of_2(heads), SIZE=size, D=triton.next_power_of_2(size), num_warps=4,
    )  # fmt: skip


@triton.jit
def _merge(
    out, lse, more, more_lse, start, width, more_width,
    HEADS: tl.constexpr, H: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, H)
    d = tl.arange(0, D)[None, :]
    real = h < HEADS
    place = lse + h * width + start + token
    first = tl.load(place, mask=real, other=0.0)
    second = tl.load(more_lse + h * more_width + token, mask=real, other=0.0)
    top = tl.maximum(first, second)
    mass = tl.exp(first - top) + tl.exp(second - top)
    share = (tl.exp(second - top) / mass)[:, None]
    inside = real[:, None] & (d < SIZE)
    spot = (token * HEADS + h[:, None]) * SIZE + d
    own = tl.load(out + spot, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(more + spot, mask=inside, other=0.0).to(tl.float32)
    tl.debug_barrier()  # small tensors are loaded by several warps: none may read what another has already merged
    tl.store(place, top + tl.log(mass), mask=real)
    tl.store(out + spot, (own + share * (other - own)).to(out.dtype.element_ty), mask=inside)

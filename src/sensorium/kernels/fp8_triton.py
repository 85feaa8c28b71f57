"""What lies between the FP8 products of a decode step, as Triton kernels (``fp8`` is the reference)."""

# mypy: disable-error-code="no-untyped-def,assignment"
import torch
import triton
import triton.language as tl
from torch import Tensor

from sensorium.kernels.decode_attention_triton import after_previous, launch_ahead
from sensorium.kernels.decode_triton import Tiling, product_parts
from sensorium.kernels.fp8 import LARGEST_FP8, LEAST_LARGEST, Fp8Matrix, Fp8Rows

# As in ``decode_triton`` a product may come in parts along the inner size, which whoever takes it sums, and scales. Axes:
# B rows, F inner size of an MLP, W hidden size.

LARGEST = tl.constexpr(LARGEST_FP8)
LEAST = tl.constexpr(LEAST_LARGEST)
CHUNK = 4096  # numbers of a row that a program of ``_gate_rows`` reads at a time


def few_rows_product(x_BK: Fp8Rows, weight_NK: Fp8Matrix) -> Tensor:
    """Parts [P, B, N] of the product of values of up to 128 rows, without scales, in float32."""
    outputs, inner = weight_NK.values_NK.shape
    parts = max(1, min(8, inner // 512, 128 // max(1, outputs // 64)))
    return product_parts(x_BK.values_BK, [weight_NK.values_NK], Tiling(64, 128, parts, 4, 5))


def gated_rows(both_BN: Tensor, scales_B: Tensor, scale: Tensor) -> Fp8Rows:
    """silu(gate) · up of rows that hold gates, then ups, which ``scales_B`` and ``scale`` scale."""
    rows, width = both_BN.shape[0], both_BN.shape[1] // 2
    out, chunk = Fp8Rows.empty(rows, width, both_BN.device), min(CHUNK, triton.next_power_of_2(width))
    _gate_rows[(rows,)](
        both_BN, scales_B, scale, out.values_BK, out.scales_B, width,
        CHUNKS=triton.cdiv(width, chunk), C=chunk, num_warps=max(1, chunk // 256), **launch_ahead(both_BN),
    )  # fmt: skip
    return out


def add_norm(
    parts_PBW: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    bias_W: Tensor | None,
    residual_BW: Tensor,
    weight_W: Tensor,
    eps: float,
    out: Fp8Rows | Tensor,
) -> Tensor:
    """The sum of a residual and a product in parts, which ``scales`` of rows and weight scale; ``out`` gets its RMSNorm."""
    parts, rows, width = parts_PBW.shape
    summed_BW = torch.empty_like(residual_BW)
    values_BW, out_scales_B = (out, residual_BW) if isinstance(out, Tensor) else (out.values_BK, out.scales_B)
    _add_norm[(rows,)](
        parts_PBW, *(scales or (residual_BW, residual_BW)), weight_W if bias_W is None else bias_W, residual_BW, weight_W,
        values_BW, out_scales_B, summed_BW, rows, width, eps,
        PARTS=parts, SCALED=scales is not None, BIAS=bias_W is not None, NARROW=not isinstance(out, Tensor),
        W=triton.next_power_of_2(width), num_warps=8, **launch_ahead(parts_PBW),
    )  # fmt: skip
    return summed_BW


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _scale_of(largest):
    """What numbers are divided by to fit; no number if the largest of them is none."""
    return _larger(largest, LEAST) / LARGEST


@triton.jit
def _gate_rows(both, scales, scale, out, out_scales, width, CHUNKS: tl.constexpr, C: tl.constexpr, AHEAD: tl.constexpr):
    after_previous(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(scales + row) * tl.load(scale)
    gates = both + row * 2 * width
    ups = gates + width
    place = tl.arange(0, C)
    largest = tl.zeros((C,), tl.float32)
    found = ()
    for i in tl.static_range(CHUNKS):
        inside = i * C + place < width
        gate = tl.load(gates + i * C + place, mask=inside, other=0.0).to(tl.float32) * factor
        up = tl.load(ups + i * C + place, mask=inside, other=0.0).to(tl.float32) * factor
        value = gate / (1.0 + tl.exp(-gate)) * up
        largest = _larger(largest, tl.abs(value))
        found = found + (value,)  # noqa: RUF005 - Triton has no starred items
    narrow = _scale_of(tl.reduce(largest, 0, _larger))
    tl.store(out_scales + row, narrow)
    inverse = 1.0 / narrow
    for i in tl.static_range(CHUNKS):
        inside = i * C + place < width
        tl.store(out + row * width + i * C + place, (found[i] * inverse).to(tl.float8e4nv), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _add_norm(
    parts, scales, scale, bias, residual, weight, out, out_scales, summed, rows, width, eps,
    PARTS: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, NARROW: tl.constexpr, W: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    after_previous(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, W)
    inside = place < width
    value = tl.zeros((W,), tl.float32)
    for part in tl.static_range(PARTS):
        value += tl.load(parts + (part * rows + row) * width + place, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        value *= tl.load(scales + row) * tl.load(scale)
    if BIAS:
        value += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(residual + row * width + place, mask=inside, other=0.0)
    tl.store(summed + row * width + place, value, mask=inside)
    gain = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    found = value * (1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)) * gain
    if NARROW:
        narrow = _scale_of(tl.reduce(tl.abs(found), 0, _larger))
        tl.store(out_scales + row, narrow)
        found *= 1.0 / narrow
    tl.store(out + row * width + place, found.to(out.dtype.element_ty), mask=inside)

"""Products of FP8 weights in a decode step as Triton kernels, and what makes their inputs (``fp8`` is the reference)."""

# mypy: disable-error-code="no-untyped-def"
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sensorium.kernels.decode_attention_triton import after_previous, launch_ahead
from sensorium.kernels.decode_triton import Tiling
from sensorium.kernels.fp8 import LARGEST_FP8, LEAST_LARGEST, Fp8Rows

# As in ``decode_triton`` a product may leave in parts along the inner size, which whoever takes it sums. Axes: B rows, K
# inner size, N outputs, G groups of a row that have a scale each, F inner size of an MLP, W hidden size.

LARGEST = tl.constexpr(LARGEST_FP8)
LEAST = tl.constexpr(LEAST_LARGEST)
GROUP = 128  # numbers of a row of inner values that share a scale, where one program has no more of them
ROW_TILE = 128  # rows of a tile at most


def narrow_tiling(rows: int, outputs: int, inner: int) -> Tiling:
    """For a product whose parts are summed by whoever takes it."""
    tiles = max(1, outputs // 64) * triton.cdiv(rows, ROW_TILE)
    return Tiling(64, 128, max(1, min(8, inner // 512, 128 // tiles)), 4, 5)


WIDE = Tiling(GROUP, 128, 1, 4, 4)  # for gate and up of few rows
WIDE_MANY = Tiling(GROUP, 128, 1, 8, 4)  # of more than 64


def quantise(x_BK: Tensor) -> Fp8Rows:
    """Rows with one scale each."""
    out = Fp8Rows.empty(x_BK.shape[0], x_BK.shape[1], x_BK.device)
    _launch_quantise(x_BK, out, launch_ahead(x_BK))
    return out


def quantise_into(x_BK: Tensor, out: Fp8Rows) -> None:
    """Rows with one scale each, into memory that is there."""
    _launch_quantise(x_BK, out, {"AHEAD": False})


def _launch_quantise(x_BK: Tensor, out: Fp8Rows, ahead: dict[str, Any]) -> None:
    assert x_BK.is_contiguous()
    rows, width = x_BK.shape
    block = triton.next_power_of_2(width)
    _quantise[(rows,)](x_BK, out.values_BK, out.scales_BG, width, W=block, num_warps=_warps(block), **ahead)


def _warps(block: int) -> int:
    return 16 if block > 8192 else 8 if block >= 1024 else 1


def product_parts(x: Fp8Rows | Tensor, weight_NK: Fp8Rows, tiling: Tiling | None = None) -> Tensor:
    """Parts [P, B, N] in float32, whose sum is the product. Rows that are not in FP8 multiply weights widened to theirs."""
    x_BK, scales_BG = (x, weight_NK.scales_BG) if isinstance(x, Tensor) else (x.values_BK, x.scales_BG)
    groups = 0 if isinstance(x, Tensor) else scales_BG.shape[1]
    (rows, inner), total = x_BK.shape, weight_NK.values_BK.shape[0]
    tiling = tiling or narrow_tiling(rows, total, inner)
    assert (inner % tiling.inner, total % tiling.outputs) == (0, 0)
    assert groups < 2 or (inner // groups) % tiling.inner == 0, "the numbers of a tile share a scale"
    parts_PBN = torch.empty(tiling.parts, rows, total, dtype=torch.float32, device=x_BK.device)
    tile = min(ROW_TILE, max(16, triton.next_power_of_2(rows)))
    _parts[(total // tiling.outputs, tiling.parts, triton.cdiv(rows, tile))](
        x_BK, scales_BG, weight_NK.values_BK, weight_NK.scales_BG, parts_PBN, rows, total,
        INNER=inner, PARTS=tiling.parts, N=tiling.outputs, K=tiling.inner, B=tile, GROUPS=groups,
        num_warps=tiling.warps, num_stages=tiling.stages, **launch_ahead(x_BK),
    )  # fmt: skip
    return parts_PBN


def gated_product(x: Fp8Rows, both_NK: Fp8Rows, tiling: Tiling | None = None) -> Fp8Rows:
    """silu(x · gateᵀ) · (x · upᵀ), where gates stand before ups in ``both_NK``; each tile of a row has a scale."""
    (rows, inner), size = x.values_BK.shape, both_NK.values_BK.shape[0] // 2
    tiling = tiling or (WIDE if rows <= 64 else WIDE_MANY)
    assert (inner % tiling.inner, size % tiling.outputs, x.scales_BG.shape[1]) == (0, 0, 1)
    out = Fp8Rows.empty(rows, size, x.values_BK.device, size // tiling.outputs)
    tile = min(ROW_TILE, max(16, triton.next_power_of_2(rows)))
    _gated[(size // tiling.outputs, triton.cdiv(rows, tile))](
        x.values_BK, x.scales_BG, both_NK.values_BK, both_NK.scales_BG, out.values_BK, out.scales_BG, rows, size,
        INNER=inner, N=tiling.outputs, K=tiling.inner, B=tile,
        num_warps=tiling.warps, num_stages=tiling.stages, **launch_ahead(x.values_BK),
    )  # fmt: skip
    return out


def gated_rows(both_BN: Tensor) -> Fp8Rows:
    """silu(gate) · up of rows that hold gates, then ups; one scale each."""
    rows, width = both_BN.shape
    out, block = Fp8Rows.empty(rows, width // 2, both_BN.device), triton.next_power_of_2(width // 2)
    _gate_rows[(rows,)](
        both_BN, out.values_BK, out.scales_BG, width // 2, W=block, num_warps=_warps(block), **launch_ahead(both_BN)
    )
    return out


def add_norm(
    parts_PBW: Tensor, bias_W: Tensor | None, residual_BW: Tensor, weight_W: Tensor, eps: float
) -> tuple[Fp8Rows, Tensor]:
    """The RMSNorm of a residual and a product that comes in parts, and their sum."""
    parts, rows, width = parts_PBW.shape
    out, summed_BW = Fp8Rows.empty(rows, width, parts_PBW.device), torch.empty_like(residual_BW)
    _add_norm[(rows,)](
        parts_PBW, weight_W if bias_W is None else bias_W, residual_BW, weight_W, out.values_BK, out.scales_BG, summed_BW,
        rows, width, eps,
        PARTS=parts, BIAS=bias_W is not None, W=triton.next_power_of_2(width), num_warps=8, **launch_ahead(parts_PBW),
    )  # fmt: skip
    return out, summed_BW


@triton.jit
def _scale(x, axis: tl.constexpr):
    """What numbers are divided by to fit; no number if one of them is none, which ``tl.max`` would pass over."""
    return tl.maximum(tl.max(tl.abs(x), axis), LEAST) / LARGEST + tl.sum(x * 0.0, axis)


@triton.jit
def _narrow(x, inverse):
    return tl.minimum(tl.maximum(x * inverse, -LARGEST), LARGEST).to(tl.float8e4nv)


@triton.jit
def _store_row(x, row, place, inside, width, out, scales):
    scale = _scale(x, 0)
    tl.store(scales + row, scale)
    tl.store(out + row * width + place, _narrow(x, 1.0 / scale), mask=inside)


@triton.jit
def _quantise(x, out, scales, width, W: tl.constexpr, AHEAD: tl.constexpr):
    after_previous(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, W)
    inside = place < width
    value = tl.load(x + row * width + place, mask=inside, other=0.0).to(tl.float32)
    _store_row(value, row, place, inside, width, out, scales)


@triton.jit
def _gate_rows(both, out, scales, width, W: tl.constexpr, AHEAD: tl.constexpr):
    after_previous(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, W)
    inside = place < width
    gate = tl.load(both + row * 2 * width + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + place, mask=inside, other=0.0).to(tl.float32)
    _store_row(gate / (1.0 + tl.exp(-gate)) * up, row, place, inside, width, out, scales)


@triton.jit(do_not_specialize=["rows"])
def _add_norm(
    parts, bias, residual, weight, out, scales, summed, rows, width, eps,
    PARTS: tl.constexpr, BIAS: tl.constexpr, W: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    after_previous(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, W)
    inside = place < width
    value = tl.zeros((W,), tl.float32)
    for part in tl.static_range(PARTS):
        value += tl.load(parts + (part * rows + row) * width + place, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(residual + row * width + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(summed + row * width + place, value, mask=inside)
    gain = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    found = value * (1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)) * gain
    _store_row(found, row, place, inside, width, out, scales)


@triton.jit(do_not_specialize=["rows"])
def _parts(
    x, x_scales, weight, scales, out, rows, total,
    INNER: tl.constexpr, PARTS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, B: tl.constexpr, GROUPS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * N + tl.arange(0, N)
    part = tl.program_id(1)
    b = tl.program_id(2) * B + tl.arange(0, B)
    k = tl.arange(0, K)
    real = b < rows
    steps: tl.constexpr = (INNER // K + PARTS - 1) // PARTS
    low = part * steps
    high = tl.minimum(low + steps, INNER // K)
    weights = weight + n.to(tl.int64)[:, None] * INNER + k[None, :]
    given = x + b[:, None] * INNER + k[None, :]
    summed = tl.zeros((N, B), tl.float32)
    after_previous(AHEAD)
    for i in range(low, high):
        w = tl.load(weights + i * K).to(x.dtype.element_ty)
        taken = tl.load(given + i * K, mask=real[:, None], other=0.0)
        if GROUPS > 1:
            factor = tl.load(x_scales + b * GROUPS + i * K // (INNER // GROUPS), mask=real, other=0.0)
            summed += tl.dot(w, tl.trans(taken)) * factor[None, :]
        else:
            summed = tl.dot(w, tl.trans(taken), summed)
    summed *= tl.load(scales + n)[:, None]
    if GROUPS == 1:
        summed *= tl.load(x_scales + b, mask=real, other=0.0)[None, :]
    place = (part * rows + b).to(tl.int64) * total
    tl.store(out + place[:, None] + n[None, :], tl.trans(summed), mask=real[:, None])


@triton.jit(do_not_specialize=["rows"])
def _gated(
    x, x_scales, both, scales, out, out_scales, rows, size,
    INNER: tl.constexpr, N: tl.constexpr, K: tl.constexpr, B: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * N + tl.arange(0, N)
    b = tl.program_id(1) * B + tl.arange(0, B)
    k = tl.arange(0, K)
    real = b < rows
    gates = both + n.to(tl.int64)[:, None] * INNER + k[None, :]
    ups = gates + size.to(tl.int64) * INNER
    given = x + b[:, None] * INNER + k[None, :]
    gate = tl.zeros((N, B), tl.float32)
    up = tl.zeros((N, B), tl.float32)
    after_previous(AHEAD)
    for i in range(INNER // K):
        first = tl.load(gates + i * K)
        second = tl.load(ups + i * K)
        taken = tl.trans(tl.load(given + i * K, mask=real[:, None], other=0.0))
        gate = tl.dot(first, taken, gate)
        up = tl.dot(second, taken, up)
    factor = tl.load(x_scales + b, mask=real, other=0.0)[None, :]
    gate *= tl.load(scales + n)[:, None] * factor
    up *= tl.load(scales + size + n)[:, None] * factor
    found = gate / (1.0 + tl.exp(-gate)) * up
    scale = _scale(found, 0)
    tl.store(out_scales + b * (size // N) + tl.program_id(0), scale, mask=real)
    narrow = _narrow(found, (1.0 / scale)[None, :])
    tl.store(out + b.to(tl.int64)[:, None] * size + n[None, :], tl.trans(narrow), mask=real[:, None])

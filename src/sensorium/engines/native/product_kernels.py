"""Matrix products of a decode step as Triton kernels: few rows, so that reading the weights is what takes the time.

A product whose output is narrow is cut along the inner size into parts, so that all multiprocessors read; whoever takes the
result sums the parts (``parts_PBN``, float32). Gate and up are read side by side and leave as one. Axes: B rows, N outputs.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from sensorium.engines.native.launch_ahead import after_previous, ask_for, launch_ahead, next_may_start

# Rows; above, the library's products are as fast. Measured on an H200 with Qwen2.5-VL-3B's shapes, µs at 32 and 128 rows:
# queries, keys and values 5.6 and 8.1 (library, as one product 6.6 and 7.1), out 4.7 and 6.1 (6.3 and 6.8), down 14 and 19
# (17 and 20), gate and up 25 at 32 rows (29). Gate, up and what follows them at 96 and 128 rows: 29.6 and 30.0 (33.9 and
# 34.0). Other numbers of rows were not timed.
LARGEST, LARGEST_GATED = 128, 128
ASKED = 4  # tiles of a weight that are asked for while the kernel before still runs
LINE: tl.constexpr = tl.constexpr(64)  # numbers of 16 bits in a line of the L2 cache


@dataclass(frozen=True)
class Tiling:
    """How a product is cut: ``outputs`` × ``inner`` of a weight at a time, the inner size in ``parts``."""

    outputs: int
    inner: int
    parts: int
    warps: int
    stages: int


def fits(layers: Sequence[nn.Module], x_BK: Tensor, largest: int = LARGEST) -> bool:
    """Whether kernels can take these linear layers together: plain weights of shapes that divide into tiles."""
    if x_BK.shape[0] > largest or x_BK.shape[1] % 128 or not x_BK.is_contiguous():
        return False
    return all(
        type(layer) is nn.Linear and not layer.out_features % 128 and layer.weight.dtype == x_BK.dtype for layer in layers
    )


def narrow_tiling(rows: int, outputs: int, inner: int) -> Tiling:
    """For a product whose parts are summed by whoever takes it."""
    tiles = max(1, outputs // 64)
    parts = max(1, min(8, inner // 512, 1 << (max(1, 128 // tiles).bit_length() - 1)))
    return Tiling(64, 128 if rows <= 64 else 64, parts, 4, 5)


WIDE = Tiling(128, 64, 1, 4, 4)  # for gate and up
WIDE_MANY = Tiling(128, 64, 1, 8, 4)  # the same for more than 64 rows: the fastest of seven


def product_parts(x_BK: Tensor, weights: Sequence[Tensor], tiling: Tiling | None = None) -> Tensor:
    """Parts [P, B, N] of x times up to three weights [·, K], one after the other; their sum is the product."""
    rows, inner = x_BK.shape
    sizes = [weight.shape[0] for weight in weights]
    total = sum(sizes)
    tiling = _fitted(tiling or narrow_tiling(rows, total, inner), x_BK)
    first, second, third = [*weights, weights[0], weights[0]][:3]
    second_from, third_from = sizes[0], sum(sizes[:2]) if len(sizes) > 1 else sizes[0]
    parts_PBN = x_BK.new_empty(tiling.parts, rows, total, dtype=torch.float32)
    _parts[(total // tiling.outputs, tiling.parts)](
        x_BK, first, second, third, parts_PBN, rows, second_from, third_from, total,
        INNER=inner, PARTS=tiling.parts, N=tiling.outputs, K=tiling.inner, B=max(16, triton.next_power_of_2(rows)),
        ASKED=ASKED, PRECISION=_precision(x_BK), num_warps=tiling.warps, num_stages=tiling.stages, **launch_ahead(x_BK),
    )  # fmt: skip
    return parts_PBN


def gated_products(x_BK: Tensor, gate_FK: Tensor, up_FK: Tensor, tiling: Tiling | None = None) -> Tensor:
    """silu(x · gate) · (x · up), with the roundings that separate products and ``layer_kernels.gated`` have."""
    rows, inner = x_BK.shape
    tiling = _fitted(tiling or (WIDE if rows <= 64 else WIDE_MANY), x_BK)
    out_BF = x_BK.new_empty(rows, gate_FK.shape[0])
    _gated[(gate_FK.shape[0] // tiling.outputs,)](
        x_BK, gate_FK, up_FK, out_BF, rows, gate_FK.shape[0],
        INNER=inner, N=tiling.outputs, K=tiling.inner, B=max(16, triton.next_power_of_2(rows)),
        ASKED=ASKED, PRECISION=_precision(x_BK), num_warps=tiling.warps, num_stages=tiling.stages, **launch_ahead(x_BK),
    )  # fmt: skip
    return out_BF


def _fitted(tiling: Tiling, x: Tensor) -> Tiling:
    """A tiling for 16 bits, with fewer stages in float32: a multiprocessor has 227 KiB for them."""
    return tiling if x.element_size() < 4 else replace(tiling, stages=min(2, tiling.stages))


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


@triton.jit
def _ask(rows, low, INNER: tl.constexpr, ASKED: tl.constexpr, K: tl.constexpr, AHEAD: tl.constexpr):
    """Ask for the first tiles of some rows [N, 1] of a weight, from tile ``low`` on."""
    column = low * K + tl.arange(0, ASKED * K // LINE) * LINE
    ask_for(rows + tl.minimum(column, INNER - 1)[None, :], AHEAD)


@triton.jit
def _parts(
    x, first, second, third, out, rows, second_from, third_from, total,
    INNER: tl.constexpr, PARTS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr,
    ASKED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    next_may_start(AHEAD)
    begin = tl.program_id(0) * N
    part = tl.program_id(1)
    weight = first
    start = 0
    if begin >= third_from:
        weight = third
        start = third_from
    elif begin >= second_from:
        weight = second
        start = second_from
    n = tl.arange(0, N)
    k = tl.arange(0, K)
    b = tl.arange(0, B)
    real = b < rows
    steps: tl.constexpr = (INNER // K + PARTS - 1) // PARTS
    low = part * steps
    high = tl.minimum(low + steps, INNER // K)
    local = (begin - start + n).to(tl.int64)
    summed = tl.zeros((N, B), tl.float32)
    if ASKED > 0:
        _ask(weight + local[:, None] * INNER, low, INNER, ASKED, K, AHEAD)
    after_previous(AHEAD)
    for i in range(low, high):
        w = tl.load(weight + local[:, None] * INNER + i * K + k[None, :])
        taken = tl.load(x + b[:, None] * INNER + i * K + k[None, :], mask=real[:, None], other=0.0)
        summed = tl.dot(w, tl.trans(taken), summed, input_precision=PRECISION)
    place = (part * rows + b).to(tl.int64) * total
    tl.store(out + place[:, None] + (begin + n)[None, :], tl.trans(summed), mask=real[:, None])


@triton.jit
def _gated(
    x, gate, up, out, rows, total,
    INNER: tl.constexpr, N: tl.constexpr, K: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr,
    ASKED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    next_may_start(AHEAD)
    n = tl.program_id(0) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    b = tl.arange(0, B)
    real = b < rows
    base = n.to(tl.int64)[:, None] * INNER + k[None, :]
    opened = tl.zeros((N, B), tl.float32)
    value = tl.zeros((N, B), tl.float32)
    if ASKED > 0:
        _ask(gate + n.to(tl.int64)[:, None] * INNER, 0, INNER, ASKED, K, AHEAD)
        _ask(up + n.to(tl.int64)[:, None] * INNER, 0, INNER, ASKED, K, AHEAD)
    after_previous(AHEAD)
    for i in range(INNER // K):
        first = tl.load(gate + base + i * K)
        second = tl.load(up + base + i * K)
        taken = tl.trans(tl.load(x + b[:, None] * INNER + i * K + k[None, :], mask=real[:, None], other=0.0))
        opened = tl.dot(first, taken, opened, input_precision=PRECISION)
        value = tl.dot(second, taken, value, input_precision=PRECISION)
    kind = out.dtype.element_ty
    wide = opened.to(kind).to(tl.float32)
    found = (wide / (1.0 + tl.exp(-wide)) * value.to(kind).to(tl.float32)).to(kind)
    tl.store(out + b.to(tl.int64)[:, None] * total + n[None, :], tl.trans(found), mask=real[:, None])

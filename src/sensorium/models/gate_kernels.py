"""silu(gate) · up where one product gives gate and up side by side, as Triton kernels. Axes: N rows, F inner size.

both     [gate_0 … gate_F-1  up_0 … up_F-1]   a row
inner    [silu(gate_0) · up_0 … ]
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, PROGRAMS = 8, 256, 2112


def gated_pair(both: Tensor) -> Tensor:
    """silu(gate) · up of contiguous [N, 2 · F]."""
    rows, width = both.shape
    out = both.new_empty(rows, width // 2)
    tiles = triton.cdiv(width // 2, COLUMNS)
    # In one dimension, since a second has room for 65,535 programs: 524,280 rows.
    _gate_pair[(tiles * triton.cdiv(rows, ROWS),)](both, out, rows, width // 2, tiles, R=ROWS, C=COLUMNS, num_warps=8)
    return out


def gate_pair_gradients(both: Tensor, given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of ``both`` where that of the inner values is given, its sum over rows, and the inner values again."""
    rows, width = both.shape
    size = width // 2
    gradient, inner = torch.empty_like(both), torch.empty_like(given)
    tiles = triton.cdiv(size, COLUMNS)
    chunks = max(1, min(triton.cdiv(rows, ROWS), PROGRAMS // tiles))
    each = triton.cdiv(triton.cdiv(rows, chunks), ROWS) * ROWS
    sums_CW = torch.empty(chunks, width, dtype=torch.float32, device=both.device)
    _gate_pair_gradients[(tiles, chunks)](
        both, given, gradient, inner, sums_CW, rows, size, each, R=ROWS, C=COLUMNS, num_warps=8
    )
    return gradient, sums_CW.sum(0).to(both.dtype), inner


@triton.jit
def _gate_pair(both, out, rows, size, tiles, R: tl.constexpr, C: tl.constexpr):
    column = (tl.program_id(0) % tiles * C + tl.arange(0, C))[None, :]
    row = (tl.program_id(0) // tiles * R + tl.arange(0, R)).to(tl.int64)[:, None]
    inside = (row < rows) & (column < size)
    gate = tl.load(both + row * (2 * size) + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    up = tl.load(both + row * (2 * size) + size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, (wide / (1.0 + tl.exp(-wide)) * up).to(gate.dtype), mask=inside)


@triton.jit
def _gate_pair_gradients(both, given, gradient, inner, sums, rows, size, each, R: tl.constexpr, C: tl.constexpr):
    place = tl.program_id(0) * C + tl.arange(0, C)
    column = place[None, :]
    chunk = tl.program_id(1)
    gate_sum = tl.zeros((R, C), tl.float32)
    up_sum = tl.zeros((R, C), tl.float32)
    for begin in range(chunk * each, tl.minimum(chunk * each + each, rows), R):
        row = (begin + tl.arange(0, R)).to(tl.int64)[:, None]
        inside = (row < rows) & (column < size)
        at = row * (2 * size) + column
        gate = tl.load(both + at, mask=inside, other=0.0)
        kind = gate.dtype
        wide = gate.to(tl.float32)
        up = tl.load(both + at + size, mask=inside, other=0.0).to(tl.float32)
        pull = tl.load(given + row * size + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-wide))
        silu = wide * sigmoid
        tl.store(inner + row * size + column, (wide / (1.0 + tl.exp(-wide)) * up).to(kind), mask=inside)
        up_given = pull * silu
        gate_given = pull * up * (sigmoid + silu * (1.0 - sigmoid))
        tl.store(gradient + at, gate_given.to(kind), mask=inside)
        tl.store(gradient + at + size, up_given.to(kind), mask=inside)
        gate_sum += gate_given
        up_sum += up_given
    row_sums = sums + chunk.to(tl.int64) * (2 * size)
    tl.store(row_sums + place, tl.sum(gate_sum, 0), mask=place < size)
    tl.store(row_sums + size + place, tl.sum(up_sum, 0), mask=place < size)

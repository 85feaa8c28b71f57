"""The parts of Qwen3.5's mixers between their products as Triton kernels with gradients.

Of gated delta nets the convolution, the gated norm and the decay's gradient; of gated attention the norms and the rotation
of heads, and the gate. Little is kept for the backward pass, where their results are computed again from their inputs.
Roundings are those of the stock modules, but for results of a mixer, which are added to the stream in float32.
Axes: N rows of a result, S columns that a convolution reads for each, C channels, H key heads, G value heads, K and V their
sizes; in attention D the size of a head.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sensorium.kernels.layer_ops import factor_gradients, wide_product

PROGRAMS = 264  # of a backward pass: each sums a weight's gradient over its rows
ROWS, COLUMNS = 16, 128  # of a block of the convolution


class Convolve(torch.autograd.Function):
    """(columns [M, C], weight [C, 1, S], windows, keys) → SiLU of the convolution: queries, keys [N, keys], and values."""

    @staticmethod
    def forward(ctx: Any, x_MC: Tensor, weight_C1S: Tensor, windows: Any, keys: int) -> tuple[Tensor, ...]:
        x_MC, weight_C1S = x_MC.contiguous(), weight_C1S.contiguous()
        rows, span = windows.places_NS.shape
        channels = x_MC.shape[1]
        parts = tuple(x_MC.new_empty(rows, size) for size in (keys, keys, channels - 2 * keys))
        _convolve[(triton.cdiv(rows, ROWS), triton.cdiv(channels, COLUMNS))](
            x_MC, weight_C1S, windows.places_NS, *parts, rows, channels, keys, SPAN=span, R=ROWS, C=COLUMNS, num_warps=4
        )
        ctx.save_for_backward(x_MC, weight_C1S)
        ctx.windows, ctx.keys = windows, keys
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_MC, weight_C1S = ctx.saved_tensors
        places_NS, (order_E, starts_M1) = ctx.windows.places_NS, ctx.windows.readers
        (rows, span), (inputs, channels) = places_NS.shape, x_MC.shape
        programs, wide = min(64, triton.cdiv(rows, ROWS)), triton.cdiv(channels, COLUMNS)
        inner_NC = x_MC.new_empty(rows, channels)
        sums_PCS = torch.empty(programs, channels, span, dtype=torch.float32, device=x_MC.device)
        _convolve_inner[(programs, wide)](
            x_MC, weight_C1S, places_NS, *(part.contiguous() for part in gradients), inner_NC, sums_PCS, rows, channels,
            ctx.keys, SPAN=span, R=ROWS // 2, C=COLUMNS, num_warps=4,
        )  # fmt: skip
        gradient_MC = None
        if ctx.needs_input_grad[0]:
            gradient_MC = torch.empty_like(x_MC)
            _convolve_back[(triton.cdiv(inputs, ROWS), wide)](
                inner_NC, weight_C1S[:, 0].T.contiguous(), order_E, starts_M1, gradient_MC, inputs, channels,
                SPAN=span, R=ROWS, C=COLUMNS, num_warps=4,
            )  # fmt: skip
        return gradient_MC, sums_PCS.sum(0).to(weight_C1S.dtype)[:, None], None, None


@triton.jit
def _columns_of(x, weight, places, row, there, c, inside, channels, SPAN: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """A block [R, C] of the convolution, in float32."""
    summed = tl.zeros((R, C), tl.float32)
    for i in tl.static_range(SPAN):
        place = tl.load(places + row * SPAN + i, mask=there, other=-1).to(tl.int64)
        seen = tl.load(x + place[:, None] * channels + c[None, :], mask=(place >= 0)[:, None] & inside[None, :], other=0.0)
        factor = tl.load(weight + c * SPAN + i, mask=inside, other=0.0).to(tl.float32)
        summed += seen.to(tl.float32) * factor[None, :]
    return summed


@triton.jit
def _convolve(
    x, weight, places, query, key, value, rows, channels, keys,
    SPAN: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * R + tl.arange(0, R)
    c = tl.program_id(1) * C + tl.arange(0, C)
    there, inside = row < rows, c < channels
    kind: tl.constexpr = query.dtype.element_ty
    summed = _columns_of(x, weight, places, row, there, c, inside, channels, SPAN, R, C)
    rounded = summed.to(kind).to(tl.float32)
    found = (rounded / (1.0 + tl.exp(-rounded))).to(kind)
    at, column = row.to(tl.int64)[:, None], c[None, :]
    real = there[:, None] & inside[None, :]
    tl.store(query + at * keys + column, found, mask=real & (column < keys))
    tl.store(key + at * keys + column - keys, found, mask=real & (column >= keys) & (column < 2 * keys))
    tl.store(value + at * (channels - 2 * keys) + column - 2 * keys, found, mask=real & (column >= 2 * keys))


@triton.jit
def _convolve_inner(
    x, weight, places, query, key, value, inner, sums, rows, channels, keys,
    SPAN: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The gradient before the SiLU, and the weight's summed over the rows of each program; of at most four columns."""
    chunk = tl.program_id(0)
    c = tl.program_id(1) * C + tl.arange(0, C)
    inside, column = c < channels, c[None, :]
    kind: tl.constexpr = inner.dtype.element_ty
    sum_0, sum_1 = tl.zeros((R, C), tl.float32), tl.zeros((R, C), tl.float32)
    sum_2, sum_3 = tl.zeros((R, C), tl.float32), tl.zeros((R, C), tl.float32)
    for begin in range(chunk * R, rows, tl.num_programs(0) * R):
        row = begin + tl.arange(0, R)
        there = row < rows
        at, real = row.to(tl.int64)[:, None], there[:, None] & inside[None, :]
        in_keys, in_values = real & (column >= keys) & (column < 2 * keys), real & (column >= 2 * keys)
        given = tl.load(query + at * keys + column, mask=real & (column < keys), other=0.0).to(tl.float32)
        given += tl.load(key + at * keys + column - keys, mask=in_keys, other=0.0).to(tl.float32)
        place = at * (channels - 2 * keys) + column - 2 * keys
        given += tl.load(value + place, mask=in_values, other=0.0).to(tl.float32)
        summed = _columns_of(x, weight, places, row, there, c, inside, channels, SPAN, R, C)
        rounded = summed.to(kind).to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-rounded))
        found = (given * sigmoid * (1.0 + rounded * (1.0 - sigmoid))).to(kind)
        tl.store(inner + at * channels + column, found, mask=real)
        wide = found.to(tl.float32)
        for i in tl.static_range(SPAN):
            place = tl.load(places + row * SPAN + i, mask=there, other=-1).to(tl.int64)
            seen = tl.load(x + place[:, None] * channels + column, mask=(place >= 0)[:, None] & inside[None, :], other=0.0)
            if i == 0:
                sum_0 += wide * seen.to(tl.float32)
            elif i == 1:
                sum_1 += wide * seen.to(tl.float32)
            elif i == 2:
                sum_2 += wide * seen.to(tl.float32)
            else:
                sum_3 += wide * seen.to(tl.float32)
    out = sums + (chunk * channels + c) * SPAN
    tl.store(out, tl.sum(sum_0, 0), mask=inside)
    if SPAN > 1:
        tl.store(out + 1, tl.sum(sum_1, 0), mask=inside)
    if SPAN > 2:
        tl.store(out + 2, tl.sum(sum_2, 0), mask=inside)
    if SPAN > 3:
        tl.store(out + 3, tl.sum(sum_3, 0), mask=inside)


@triton.jit
def _convolve_back(
    inner, weight, order, starts, gradient, inputs, channels,
    SPAN: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The gradient of columns, each summed over all rows that read it; weights are [S, C]."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    c = tl.program_id(1) * C + tl.arange(0, C)
    there, inside = row < inputs, (c < channels)[None, :]
    first = tl.load(starts + row, mask=there, other=0)
    count = tl.load(starts + row + 1, mask=there, other=0) - first
    summed = tl.zeros((R, C), tl.float32)
    for i in range(0, tl.max(count, 0)):
        reads = i < count
        entry = tl.load(order + first + i, mask=reads, other=0)
        place = (entry // SPAN).to(tl.int64)[:, None] * channels + c[None, :]
        given = tl.load(inner + place, mask=reads[:, None] & inside, other=0.0).to(tl.float32)
        factor = tl.load(weight + (entry % SPAN)[:, None] * channels + c[None, :], mask=reads[:, None] & inside, other=0.0)
        summed += given * factor.to(tl.float32)
    at = row.to(tl.int64)[:, None] * channels + c[None, :]
    tl.store(gradient + at, summed.to(gradient.dtype.element_ty), mask=there[:, None] & inside)


class GatedNormProduct(torch.autograd.Function):
    """(x [..., G, V], gate [..., G · V], gain [V], eps, factors of a layer [W, G · V]) → it, of norm(x) · silu(gate).

    In float32. What the linear layer takes is computed again in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, gain_V: Tensor, eps: float, *factors: Tensor | None) -> Tensor:
        x, gate, (weight, bias, a, b) = x.contiguous(), gate.contiguous(), factors
        ctx.save_for_backward(x, gate, gain_V, weight, a, b)
        ctx.eps = eps
        return _wide_linear(gated_norm(x, gate, gain_V, eps), weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, gain_V, weight, a, b = ctx.saved_tensors
        given = gradients[0].flatten(0, -2).to(weight.dtype)
        of_x, of_gate, of_gain, out = gated_norm_gradients(x, gate, gain_V, ctx.eps, given @ weight)
        return of_x, of_gate, of_gain, None, *factor_gradients(ctx.needs_input_grad[4:], given, out, a, b)


def _wide_linear(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    assert weight is not None
    found = wide_product(x, weight)
    return found if bias is None else found + bias


def gated_norm(x: Tensor, gate: Tensor, gain_V: Tensor, eps: float) -> Tensor:
    """norm(x) · silu(gate), shaped as the gate; both contiguous."""
    rows, width, out = x.numel() // x.shape[-1], x.shape[-1], torch.empty_like(gate)
    block, several = _norm_block(width)
    _gated_norm[(triton.cdiv(rows, several),)](x, gate, gain_V, out, rows, width, eps, R=several, W=block, num_warps=4)
    return out


def gated_norm_gradients(x: Tensor, gate: Tensor, gain_V: Tensor, eps: float, given: Tensor) -> tuple[Tensor, ...]:
    """Gradients of x, gate and gain, and what ``gated_norm`` gave, as the rows of ``given``."""
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    block, several = _norm_block(width)
    programs = min(8 * PROGRAMS, triton.cdiv(rows, several))
    of_x, of_gate, out = torch.empty_like(x), torch.empty_like(gate), torch.empty_like(given)
    sums_PV = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _gated_norm_gradients[(programs,)](
        x, gate, gain_V, given, of_x, of_gate, out, sums_PV, rows, width, eps, R=several, W=block, num_warps=2
    )
    return of_x, of_gate, sums_PV.sum(0).to(gain_V.dtype), out


def _norm_block(width: int, numbers: int = 1024) -> tuple[int, int]:
    """How wide a block of rows is, and how many rows it has, for so many numbers."""
    block = triton.next_power_of_2(width)
    return block, max(1, numbers // block)


@triton.jit
def _gated_norm(x, gate, gain, out, rows, width, eps, R: tl.constexpr, W: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    place = tl.arange(0, W)
    inside = (row < rows)[:, None] & (place < width)[None, :]
    at = row[:, None] * width + place[None, :]
    value = tl.load(x + at, mask=inside, other=0.0)
    kind = value.dtype
    wide = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) / width + eps)
    rounded = (wide * scale[:, None]).to(kind).to(tl.float32)
    factor = tl.load(gain + place, mask=place < width, other=0.0).to(tl.float32)
    weighted = (rounded * factor[None, :]).to(kind).to(tl.float32)
    opened = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (weighted * (opened / (1.0 + tl.exp(-opened)))).to(kind), mask=inside)


@triton.jit
def _gated_norm_gradients(
    x, gate, gain, given, of_x, of_gate, out, sums, rows, width, eps, R: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0)
    place = tl.arange(0, W)
    factor = tl.load(gain + place, mask=place < width, other=0.0).to(tl.float32)[None, :]
    summed = tl.zeros((R, W), tl.float32)
    for begin in range(program * R, rows, tl.num_programs(0) * R):
        row = (begin + tl.arange(0, R)).to(tl.int64)
        inside = (row < rows)[:, None] & (place < width)[None, :]
        at = row[:, None] * width + place[None, :]
        value = tl.load(x + at, mask=inside, other=0.0)
        kind = value.dtype
        wide = value.to(tl.float32)
        scale = (1.0 / tl.sqrt(tl.sum(wide * wide, 1) / width + eps))[:, None]
        normed = wide * scale
        rounded = normed.to(kind).to(tl.float32)
        weighted = (rounded * factor).to(kind).to(tl.float32)
        opened = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        pull = tl.load(given + at, mask=inside, other=0.0).to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-opened))
        silu = opened / (1.0 + tl.exp(-opened))
        tl.store(out + at, (weighted * silu).to(kind), mask=inside)
        tl.store(of_gate + at, (pull * weighted * (sigmoid + silu * (1.0 - sigmoid))).to(kind), mask=inside)
        pull *= silu
        summed += pull * rounded
        pull *= factor
        found = scale * (pull - normed * (tl.sum(pull * normed, 1) / width)[:, None])
        tl.store(of_x + at, found.to(kind), mask=inside)
    tl.store(sums + program.to(tl.int64) * width + place, tl.sum(summed, 0), mask=place < width)


class TurnedHeads(torch.autograd.Function):
    """(joint [..., H · 2 · D], key [..., K · D], two gains [D], eps, cos [..., R], sin) → queries, keys, the queries' gate.

    Of each head of ``joint`` the first D numbers are the query's, the others the gate's, which stays where it is. Queries
    and keys are normed, and their first R numbers rotated.
    """

    @staticmethod
    def forward(
        ctx: Any, joint: Tensor, key: Tensor, query_gain: Tensor, key_gain: Tensor, eps: float, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, ...]:
        joint, key, cos, sin = joint.contiguous(), key.contiguous(), cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(joint, key, query_gain, key_gain, cos, sin)
        ctx.eps, size = eps, len(query_gain)
        heads = joint.unflatten(-1, (-1, 2 * size))
        parts = ((heads, query_gain), (key.unflatten(-1, (-1, size)), key_gain))
        return *(_turn(x, gain, eps, cos, sin) for x, gain in parts), heads[..., size:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        joint, key, query_gain, key_gain, cos, sin = ctx.saved_tensors
        of_query, of_key, of_gate = (gradient.contiguous() for gradient in gradients)
        of_joint, of_query_gain = _turn_back(joint, query_gain, ctx.eps, cos, sin, of_query, of_gate)
        of_key, of_key_gain = _turn_back(key, key_gain, ctx.eps, cos, sin, of_key, None)
        return of_joint, of_key, of_query_gain, of_key_gain, None, None, None


def _turn(x: Tensor, gain_D: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """The first D numbers of each head [..., H, D or 2 · D], normed and rotated."""
    size, slot = len(gain_D), x.shape[-1]
    out, rows = x.new_empty(*x.shape[:-1], size), x.numel() // slot
    block, several = _norm_block(size)
    _turn_heads[(triton.cdiv(rows, several),)](
        x, gain_D, cos, sin, out, rows, eps,
        HEADS=x.shape[-2], SIZE=size, SLOT=slot, TURNED=cos.shape[-1], R=several, D=block, num_warps=4,
    )  # fmt: skip
    return out


def _turn_back(
    x: Tensor, gain_D: Tensor, eps: float, cos: Tensor, sin: Tensor, given: Tensor, of_gate: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of the input of ``_turn``, into which the gate's is written too, and of the gain."""
    size, out = len(gain_D), torch.empty_like(x)
    heads, rows = given.shape[-2], given.numel() // size
    block, several = _norm_block(size, 4096)
    programs = min(8 * PROGRAMS, triton.cdiv(rows, several))
    sums_PD = torch.empty(programs, size, dtype=torch.float32, device=x.device)
    _turn_heads_back[(programs,)](
        x, gain_D, cos, sin, given, given if of_gate is None else of_gate, out, sums_PD, rows, eps,
        GATE=of_gate is not None, HEADS=heads, SIZE=size, SLOT=size if of_gate is None else 2 * size,
        TURNED=cos.shape[-1], R=several, D=block, num_warps=4,
    )  # fmt: skip
    return out, sums_PD.sum(0).to(gain_D.dtype)


@triton.jit
def _turn_heads(
    x, gain, cos, sin, out, rows, eps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, SLOT: tl.constexpr, TURNED: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    d = tl.arange(0, D)
    other = tl.where(d < TURNED, (d + TURNED // 2) % TURNED, d)
    inside = (row < rows)[:, None] & (d < SIZE)[None, :]
    value = tl.load(x + row[:, None] * SLOT + d[None, :], mask=inside, other=0.0)
    kind = value.dtype
    wide = value.to(tl.float32)
    scale = (1.0 / tl.sqrt(tl.sum(wide * wide, 1) / SIZE + eps))[:, None]
    turned = tl.load(x + row[:, None] * SLOT + other[None, :], mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(gain + d, mask=d < SIZE, other=0.0).to(tl.float32)[None, :]
    other_factor = tl.load(gain + other, mask=d < SIZE, other=0.0).to(tl.float32)[None, :]
    normed = (wide * scale * factor).to(kind).to(tl.float32)
    turned = (turned * scale * other_factor).to(kind).to(tl.float32)
    turned = tl.where((d < TURNED // 2)[None, :], -turned, turned)
    rotates = (row < rows)[:, None] & (d < TURNED)[None, :]
    angle = (row // HEADS)[:, None] * TURNED + d[None, :]
    c = tl.load(cos + angle, mask=rotates, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=rotates, other=0.0).to(tl.float32)
    first = (normed * c).to(kind).to(tl.float32)
    second = (turned * s).to(kind).to(tl.float32)
    tl.store(out + row[:, None] * SIZE + d[None, :], (first + second).to(kind), mask=inside)


@triton.jit
def _turn_heads_back(
    x, gain, cos, sin, given, of_gate, gradient, sums, rows, eps,
    GATE: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, SLOT: tl.constexpr, TURNED: tl.constexpr,
    R: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    d = tl.arange(0, D)
    other = tl.where(d < TURNED, (d + TURNED // 2) % TURNED, d)
    factor = tl.load(gain + d, mask=d < SIZE, other=0.0).to(tl.float32)[None, :]
    summed = tl.zeros((R, D), tl.float32)
    for begin in range(program * R, rows, tl.num_programs(0) * R):
        row = (begin + tl.arange(0, R)).to(tl.int64)
        inside = (row < rows)[:, None] & (d < SIZE)[None, :]
        value = tl.load(x + row[:, None] * SLOT + d[None, :], mask=inside, other=0.0)
        kind = value.dtype
        wide = value.to(tl.float32)
        scale = (1.0 / tl.sqrt(tl.sum(wide * wide, 1) / SIZE + eps))[:, None]
        normed = wide * scale
        rotates = (row < rows)[:, None] & (d < TURNED)[None, :]
        angles = (row // HEADS)[:, None] * TURNED
        c = tl.load(cos + angles + d[None, :], mask=rotates, other=1.0).to(tl.float32)
        s = tl.load(sin + angles + other[None, :], mask=rotates, other=0.0).to(tl.float32)
        own = tl.load(given + row[:, None] * SIZE + d[None, :], mask=inside, other=0.0).to(tl.float32)
        turned = tl.load(given + row[:, None] * SIZE + other[None, :], mask=inside, other=0.0).to(tl.float32)
        pull = own * c + tl.where((d < TURNED // 2)[None, :], turned, -turned) * s
        summed += pull * normed
        pull *= factor
        found = scale * (pull - normed * (tl.sum(pull * normed, 1) / SIZE)[:, None])
        tl.store(gradient + row[:, None] * SLOT + d[None, :], found.to(kind), mask=inside)
        if GATE:
            opened = tl.load(of_gate + row[:, None] * SIZE + d[None, :], mask=inside, other=0.0)
            tl.store(gradient + row[:, None] * SLOT + SIZE + d[None, :], opened, mask=inside)
    tl.store(sums + program.to(tl.int64) * SIZE + d, tl.sum(summed, 0), mask=d < SIZE)


class GatedProduct(torch.autograd.Function):
    """(x [..., H, D], gate [..., H, D], factors of a layer [W, H · D]) → it, of x · sigmoid(gate).

    In float32. The gate is every other D numbers of a tensor. What the linear layer takes is computed again in the backward
    pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, *factors: Tensor | None) -> Tensor:
        x, (weight, bias, a, b) = x.contiguous(), factors
        assert gate.stride()[-2:] == (2 * gate.shape[-1], 1), "the gate's heads lie beside those of queries"
        ctx.save_for_backward(x, gate, weight, a, b)
        out, size = torch.empty_like(x), x.shape[-1]
        block, several = _norm_block(size)
        rows = x.numel() // size
        _open[(triton.cdiv(rows, several),)](x, gate, out, rows, SIZE=size, R=several, D=block, num_warps=4)
        return _wide_linear(out.flatten(-2), weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, a, b = ctx.saved_tensors
        flat = gradients[0].flatten(0, -2).to(weight.dtype)
        given, size = flat @ weight, x.shape[-1]
        of_x, of_gate, out = torch.empty_like(x), torch.empty_like(x), torch.empty_like(given)
        block, several = _norm_block(size)
        rows = x.numel() // size
        _open_back[(triton.cdiv(rows, several),)](
            x, gate, given, of_x, of_gate, out, rows, SIZE=size, R=several, D=block, num_warps=4
        )
        return of_x, of_gate, *factor_gradients(ctx.needs_input_grad[2:], flat, out, a, b)


@triton.jit
def _open(x, gate, out, rows, SIZE: tl.constexpr, R: tl.constexpr, D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    d = tl.arange(0, D)[None, :]
    inside = (row < rows) & (d < SIZE)
    value = tl.load(x + row * SIZE + d, mask=inside, other=0.0)
    opened = tl.load(gate + row * (2 * SIZE) + d, mask=inside, other=0.0).to(tl.float32)
    share = (1.0 / (1.0 + tl.exp(-opened))).to(value.dtype).to(tl.float32)
    tl.store(out + row * SIZE + d, (value.to(tl.float32) * share).to(value.dtype), mask=inside)


@triton.jit
def _open_back(x, gate, given, of_x, of_gate, out, rows, SIZE: tl.constexpr, R: tl.constexpr, D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    d = tl.arange(0, D)[None, :]
    inside = (row < rows) & (d < SIZE)
    value = tl.load(x + row * SIZE + d, mask=inside, other=0.0)
    kind = value.dtype
    wide = value.to(tl.float32)
    opened = tl.load(gate + row * (2 * SIZE) + d, mask=inside, other=0.0).to(tl.float32)
    pull = tl.load(given + row * SIZE + d, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-opened))
    share = sigmoid.to(kind).to(tl.float32)
    tl.store(out + row * SIZE + d, (wide * share).to(kind), mask=inside)
    tl.store(of_x + row * SIZE + d, (pull * share).to(kind), mask=inside)
    tl.store(of_gate + row * SIZE + d, (pull * wide * sigmoid * (1.0 - sigmoid)).to(kind), mask=inside)


def decay_gradient(
    query: tuple[Tensor, Tensor],
    key: tuple[Tensor, Tensor],
    value_BTGV: Tensor,
    summed_BTG: Tensor,
    states_BNGKV: Tensor,
    pulls_BNGKV: Tensor,
    value_first: bool,
    size: int,
    ends_R1: Tensor | None,
    chunks_N2: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``delta_rule.decay_gradient`` in one launch: a program for each chunk and key head."""
    (query_BTHK, of_query), (key_BTHK, of_key) = query, key
    batch, length, heads, key_size = key_BTHK.shape
    value_heads, value_size = value_BTGV.shape[2:]
    several = ends_R1 is not None and chunks_N2 is not None
    count = len(chunks_N2) if several and chunks_N2 is not None else batch * triton.cdiv(length, size)
    gradient_BTG = torch.empty_like(summed_BTG, dtype=torch.float32)
    summed = torch.empty_like(query_BTHK), torch.empty_like(key_BTHK)
    unused = summed_BTG
    _decay_gradient[(count, heads)](
        *(x.contiguous() for x in (query_BTHK, of_query, key_BTHK, of_key, value_BTGV, summed_BTG)),
        states_BNGKV.contiguous(), pulls_BNGKV.contiguous(),
        *((ends_R1, chunks_N2) if several else (unused, unused)), *summed, gradient_BTG, length,
        HEADS=heads, SHARE=value_heads // heads, KEY=key_size, VALUE=value_size, SIZE=size, RUNS=several,
        VALUE_FIRST=value_first, C=max(16, triton.next_power_of_2(size)), K=max(16, triton.next_power_of_2(key_size)),
        V=max(16, triton.next_power_of_2(value_size)), num_warps=8, num_stages=1,
    )  # fmt: skip
    return gradient_BTG, *summed


@triton.jit
def _decay_gradient(
    query, of_query, key, of_key, value, sums, states, pulls, ends, chunks, all_query, all_key, gradient, length,
    HEADS: tl.constexpr, SHARE: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, SIZE: tl.constexpr,
    RUNS: tl.constexpr, VALUE_FIRST: tl.constexpr, C: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if RUNS:
        run = tl.load(chunks + 2 * chunk).to(tl.int64)
        start = tl.load(ends + run).to(tl.int64) + tl.load(chunks + 2 * chunk + 1).to(tl.int64) * SIZE
        stop = tl.minimum(start + SIZE, tl.load(ends + run + 1).to(tl.int64))
    else:
        each = (length + SIZE - 1) // SIZE
        start = chunk // each * length + chunk % each * SIZE
        stop = tl.minimum(start + SIZE, (chunk // each + 1) * length)
    c, k, v = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    token = start + c
    real = token < stop
    of_keys, of_values = real[:, None] & (k < KEY)[None, :], real[:, None] & (v < VALUE)[None, :]
    in_state = (k < KEY)[:, None] & (v < VALUE)[None, :]
    if VALUE_FIRST:
        in_place = k[:, None] + v[None, :] * KEY
    else:
        in_place = k[:, None] * VALUE + v[None, :]
    at = (token * HEADS + head)[:, None] * KEY + k[None, :]
    own_query = tl.load(query + at, mask=of_keys, other=0.0).to(tl.float32)
    own_key = tl.load(key + at, mask=of_keys, other=0.0)
    summed_query, summed_key = tl.zeros((C, K), tl.float32), tl.zeros((C, K), tl.float32)
    for i in range(SHARE):
        group = head * SHARE + i
        wide = (token * (HEADS * SHARE) + group)[:, None] * KEY + k[None, :]
        pull_query = tl.load(of_query + wide, mask=of_keys, other=0.0).to(tl.float32)
        pull_key = tl.load(of_key + wide, mask=of_keys, other=0.0).to(tl.float32)
        summed_query += pull_query
        summed_key += pull_key
        found = tl.sum(own_query * pull_query, 1) - tl.sum(own_key.to(tl.float32) * pull_key, 1)
        state = (chunk * (HEADS * SHARE) + group) * KEY * VALUE + in_place
        pull = tl.load(pulls + state, mask=in_state, other=0.0)
        kept = tl.sum(tl.sum(tl.load(states + state, mask=in_state, other=0.0).to(tl.float32) * pull.to(tl.float32), 1), 0)
        pulled = tl.dot(own_key, pull.to(own_key.dtype), input_precision="ieee")
        corrected = (token * (HEADS * SHARE) + group)[:, None] * VALUE + v[None, :]
        added = tl.sum(pulled * tl.load(value + corrected, mask=of_values, other=0.0).to(tl.float32), 1)
        last = tl.load(sums + (stop - 1) * (HEADS * SHARE) + group).to(tl.float32)
        own = tl.load(sums + token * (HEADS * SHARE) + group, mask=real, other=0.0).to(tl.float32)
        weighted = tl.sum(tl.where(real, added * tl.exp2(last - own), 0.0), 0)
        found += tl.where(token == stop - 1, tl.exp2(last) * kept + weighted, 0.0)
        tl.store(gradient + token * (HEADS * SHARE) + group, found, mask=real)
    tl.store(all_query + at, summed_query.to(all_query.dtype.element_ty), mask=of_keys)
    tl.store(all_key + at, summed_key.to(all_key.dtype.element_ty), mask=of_keys)

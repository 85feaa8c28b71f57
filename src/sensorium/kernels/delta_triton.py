"""What lies around the gated delta rule as Triton kernels with gradients: convolution, gated norm, the decay's gradient.

Little is kept for the backward pass: the convolution and the norm are computed again there, from their inputs. Roundings
are those of the stock modules. Axes: N rows of a result, S columns that a convolution reads for each, C channels, H key
heads, G value heads, K and V their sizes.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

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
        programs, wide = min(32, triton.cdiv(rows, ROWS)), triton.cdiv(channels, COLUMNS)
        inner_NC = x_MC.new_empty(rows, channels)
        sums_PCS = torch.empty(programs, channels, span, dtype=torch.float32, device=x_MC.device)
        _convolve_inner[(programs, wide)](
            x_MC, weight_C1S, places_NS, *(part.contiguous() for part in gradients), inner_NC, sums_PCS, rows, channels,
            ctx.keys, SPAN=span, S=triton.next_power_of_2(span), R=ROWS, C=COLUMNS, num_warps=4,
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
    SPAN: tl.constexpr, S: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The gradient before the SiLU, and the weight's summed over the rows of each program."""
    chunk = tl.program_id(0)
    c = tl.program_id(1) * C + tl.arange(0, C)
    inside, column = c < channels, c[None, :]
    span = tl.arange(0, S)[:, None]
    kind: tl.constexpr = inner.dtype.element_ty
    of_weight = tl.zeros((S, C), tl.float32)
    for begin in range(chunk * R, rows, tl.num_programs(0) * R):
        row = begin + tl.arange(0, R)
        there = row < rows
        at, real = row.to(tl.int64)[:, None], there[:, None] & inside[None, :]
        summed = _columns_of(x, weight, places, row, there, c, inside, channels, SPAN, R, C)
        rounded = summed.to(kind).to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-rounded))
        given = tl.load(query + at * keys + column, mask=real & (column < keys), other=0.0).to(tl.float32)
        in_keys = real & (column >= keys) & (column < 2 * keys)
        given += tl.load(key + at * keys + column - keys, mask=in_keys, other=0.0).to(tl.float32)
        in_values = real & (column >= 2 * keys)
        place = at * (channels - 2 * keys) + column - 2 * keys
        given += tl.load(value + place, mask=in_values, other=0.0).to(tl.float32)
        found = (given * sigmoid * (1.0 + rounded * (1.0 - sigmoid))).to(kind)
        tl.store(inner + at * channels + column, found, mask=real)
        for i in tl.static_range(SPAN):
            place = tl.load(places + row * SPAN + i, mask=there, other=-1).to(tl.int64)
            seen = tl.load(x + place[:, None] * channels + column, mask=(place >= 0)[:, None] & inside[None, :], other=0.0)
            part = tl.sum(found.to(tl.float32) * seen.to(tl.float32), 0)
            of_weight += tl.where(span == i, part[None, :], 0.0)
    tl.store(sums + (chunk * channels + column) * SPAN + span, of_weight, mask=(span < SPAN) & inside[None, :])


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
    """(x [..., G, V], gate [..., G · V], gain [V], eps, weight [W, G · V]) → the linear layer of norm(x) · silu(gate).

    What the linear layer takes is computed again in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, gain_V: Tensor, eps: float, weight: Tensor) -> Tensor:
        x, gate = x.contiguous(), gate.contiguous()
        ctx.save_for_backward(x, gate, gain_V, weight)
        ctx.eps = eps
        return torch.nn.functional.linear(gated_norm(x, gate, gain_V, eps), weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, gain_V, weight = ctx.saved_tensors
        given = gradients[0].flatten(0, -2)
        of_x, of_gate, of_gain, out = gated_norm_gradients(x, gate, gain_V, ctx.eps, given @ weight)
        of_weight = given.T @ out if ctx.needs_input_grad[4] else None
        return of_x, of_gate, of_gain, None, of_weight


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
        x, gate, gain_V, given, of_x, of_gate, out, sums_PV, rows, width, eps, R=several, W=block, num_warps=4
    )
    return of_x, of_gate, sums_PV.sum(0).to(gain_V.dtype), out


def _norm_block(width: int) -> tuple[int, int]:
    block = triton.next_power_of_2(width)
    return block, max(1, 1024 // block)


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
    summed = tl.zeros((W,), tl.float32)
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
        summed += tl.sum(pull * rounded, 0)
        pull *= factor
        found = scale * (pull - normed * (tl.sum(pull * normed, 1) / width)[:, None])
        tl.store(of_x + at, found.to(kind), mask=inside)
    tl.store(sums + program.to(tl.int64) * width + place, summed, mask=place < width)


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
        pulled = tl.dot(own_key, pull.to(own_key.dtype))
        corrected = (token * (HEADS * SHARE) + group)[:, None] * VALUE + v[None, :]
        added = tl.sum(pulled * tl.load(value + corrected, mask=of_values, other=0.0).to(tl.float32), 1)
        last = tl.load(sums + (stop - 1) * (HEADS * SHARE) + group).to(tl.float32)
        own = tl.load(sums + token * (HEADS * SHARE) + group, mask=real, other=0.0).to(tl.float32)
        weighted = tl.sum(tl.where(real, added * tl.exp2(last - own), 0.0), 0)
        found += tl.where(token == stop - 1, tl.exp2(last) * kept + weighted, 0.0)
        tl.store(gradient + token * (HEADS * SHARE) + group, found, mask=real)
    tl.store(all_query + at, summed_query.to(all_query.dtype.element_ty), mask=of_keys)
    tl.store(all_key + at, summed_key.to(all_key.dtype.element_ty), mask=of_keys)

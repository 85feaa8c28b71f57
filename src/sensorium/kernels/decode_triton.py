"""A decode step as Triton kernels: products over few rows, norms and rotation of their parts, the draw of a token."""

# mypy: disable-error-code="no-untyped-def"
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from sensorium.kernels.decode_attention_triton import after_previous, launch_ahead
from sensorium.kernels.layer_ops import is_plain
from sensorium.kernels.layer_torch import FINE_SCALE
from sensorium.kernels.layer_triton import fitted, scaled

# A product whose output is narrow is cut along the inner size into parts, so that all multiprocessors read; whoever takes
# the result sums the parts (``parts_PBN``, float32). Gate and up are read side by side and leave as one. Axes: B rows, N
# outputs.


# Rows; above, the library's products are as fast. Measured on an H200 with Qwen2.5-VL-3B's shapes, µs at 32 and 128 rows:
# queries, keys and values 5.6 and 8.1 (library, as one product 6.6 and 7.1), out 4.7 and 6.1 (6.3 and 6.8), down 14 and 19
# (17 and 20), gate and up 25 at 32 rows (29). Gate, up and what follows them at 96 and 128 rows: 29.6 and 30.0 (33.9 and
# 34.0). Of 330 other tilings at 24, 64, 128 and 256 rows none gained more than 1 µs below 129 rows; at 256 those for gate
# and up, down and out were slower than the library.
# At 128 rows of Qwen3.5 4B's shape: channels and gates of a delta net 22.2 (library 23.9), queries with gates, keys and
# values 19.9 (27.8), with tiles of 128 outputs, as 160 or 192 tiles of 64 are more than run at once; out 9.2 (10.4).
LARGEST, LARGEST_GATED = 128, 128
MULTIPROCESSORS = 132  # of an H200


@dataclass(frozen=True)
class Tiling:
    """How a product is cut: ``outputs`` × ``inner`` of a weight at a time, the inner size in ``parts``."""

    outputs: int
    inner: int
    parts: int
    warps: int
    stages: int


def fits(layers: Sequence[nn.Module], x_BK: Tensor, largest: int = LARGEST, outputs: int = 128) -> bool:
    """Whether kernels can take these linear layers together: plain weights of shapes that divide into tiles."""
    if x_BK.shape[0] > largest or x_BK.shape[1] % 128 or not x_BK.is_contiguous():
        return False
    return all(is_plain(layer) and not layer.out_features % outputs and _meets(layer.weight, x_BK) for layer in layers)


def _meets(weight: Tensor, x: Tensor) -> bool:
    """Of one kind, or float16 activations and bfloat16 weights, which are read as float16."""
    return weight.dtype == x.dtype or (weight.dtype == torch.bfloat16 and x.dtype == torch.float16)


def narrow_tiling(rows: int, outputs: int, inner: int) -> Tiling:
    """For a product whose parts are summed by whoever takes it."""
    tiles = max(1, outputs // 64)
    parts = max(1, min(8, inner // 512, 128 // tiles))
    if rows <= 64:
        parts = 1 << (parts.bit_length() - 1)  # queries, keys and values of 2,560 in 3 parts gain from 65 rows on
    if rows > 64 and tiles > MULTIPROCESSORS:
        return Tiling(128, 64, 1, 8, 5)
    return Tiling(64, 128 if rows <= 64 else 64, parts, 4, 5)


def few_outputs(inner: int) -> Tiling:
    """For a product of 64 outputs or so, which runs beside a large one: 3.6 µs at 128 rows of 2,560 (library 11.5)."""
    return Tiling(16, 128, max(1, inner // 512), 4, 3)


WIDE = Tiling(128, 64, 1, 4, 4)  # for gate and up
WIDE_MANY = Tiling(128, 64, 1, 8, 4)  # the same for more than 64 rows: the fastest of seven


def product_parts(x_BK: Tensor, weights: Sequence[Tensor], tiling: Tiling | None = None, ahead: bool = True) -> Tensor:
    """Parts [P, B, N] of x times up to three weights [·, K], one after the other; their sum is the product.

    Not ``ahead``: on a stream of its own, launched when all before it is done.
    """
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
        PRECISION=_precision(x_BK), num_warps=tiling.warps, num_stages=tiling.stages,
        **(launch_ahead(x_BK) if ahead else {"AHEAD": False}),
    )  # fmt: skip
    return parts_PBN


def gated_products(x_BK: Tensor, gate_FK: Tensor, up_FK: Tensor, tiling: Tiling | None = None) -> Tensor:
    """silu(x · gate) · (x · up), with the roundings that separate products and ``layer_triton.gated`` have.

    Of float16 x it is what ``gated_finely`` gives of unrounded products.
    """
    rows, inner = x_BK.shape
    tiling = _fitted(tiling or (WIDE if rows <= 64 else WIDE_MANY), x_BK)
    out_BF = x_BK.new_empty(rows, gate_FK.shape[0])
    _gated[(gate_FK.shape[0] // tiling.outputs,)](
        x_BK, gate_FK, up_FK, out_BF, rows, gate_FK.shape[0],
        INNER=inner, N=tiling.outputs, K=tiling.inner, B=max(16, triton.next_power_of_2(rows)),
        SCALE=1.0 if x_BK.dtype == gate_FK.dtype else 1 / FINE_SCALE,
        PRECISION=_precision(x_BK), num_warps=tiling.warps, num_stages=tiling.stages, **launch_ahead(x_BK),
    )  # fmt: skip
    return out_BF


def _fitted(tiling: Tiling, x: Tensor) -> Tiling:
    """A tiling for 16 bits, with fewer stages in float32: a multiprocessor has 227 KiB for them."""
    return tiling if x.element_size() < 4 else replace(tiling, stages=min(2, tiling.stages))


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


@triton.jit(do_not_specialize=["rows"])
def _parts(
    x, first, second, third, out, rows, second_from, third_from, total,
    INNER: tl.constexpr, PARTS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
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
    after_previous(AHEAD)
    for i in range(low, high):
        w = tl.load(weight + local[:, None] * INNER + i * K + k[None, :]).to(x.dtype.element_ty)
        taken = tl.load(x + b[:, None] * INNER + i * K + k[None, :], mask=real[:, None], other=0.0)
        summed = tl.dot(w, tl.trans(taken), summed, input_precision=PRECISION)
    place = (part * rows + b).to(tl.int64) * total
    tl.store(out + place[:, None] + (begin + n)[None, :], tl.trans(summed), mask=real[:, None])


@triton.jit(do_not_specialize=["rows"])
def _gated(
    x, gate, up, out, rows, total,
    INNER: tl.constexpr, N: tl.constexpr, K: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr, SCALE: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    b = tl.arange(0, B)
    real = b < rows
    base = n.to(tl.int64)[:, None] * INNER + k[None, :]
    opened = tl.zeros((N, B), tl.float32)
    value = tl.zeros((N, B), tl.float32)
    after_previous(AHEAD)
    for i in range(INNER // K):
        first = tl.load(gate + base + i * K).to(x.dtype.element_ty)
        second = tl.load(up + base + i * K).to(x.dtype.element_ty)
        taken = tl.trans(tl.load(x + b[:, None] * INNER + i * K + k[None, :], mask=real[:, None], other=0.0))
        opened = tl.dot(first, taken, opened, input_precision=PRECISION)
        value = tl.dot(second, taken, value, input_precision=PRECISION)
    kind = out.dtype.element_ty
    if SCALE == 1.0:
        opened = opened.to(kind).to(tl.float32)
        value = value.to(kind).to(tl.float32)
    found = opened / (1.0 + tl.exp(-opened)) * value
    if SCALE == 1.0:
        found = found.to(kind)
    else:
        found = fitted(found, SCALE)
    tl.store(out + b.to(tl.int64)[:, None] * total + n[None, :], tl.trans(found), mask=real[:, None])


# The first finds the largest logit of each chunk of a row, the second the integer mass of each chunk, the third the chunk
# in which the row's uniform lands, and the token within it.


@triton.jit
def _policy_logits(logits, blocked, temperature, stop_masked, row, place, VOCAB: tl.constexpr):
    """Logits of the policy at places of a row: divided by the temperature, what may not be drawn at -inf."""
    inside = place < VOCAB
    x = tl.load(logits + row * VOCAB + place, mask=inside, other=float("-inf")).to(tl.float32)
    x = x / tl.load(temperature + row).to(tl.float32)
    kind = tl.load(blocked + place, mask=inside, other=1)
    gone = (kind == 1) | ((kind == 2) & (tl.load(stop_masked + row) > 0)) | (place >= VOCAB)
    return tl.where(gone, float("-inf"), x)


@triton.jit
def largest_logits(
    logits, blocked, temperature, stop_masked, largest, where,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _policy_logits(logits, blocked, temperature, stop_masked, row, place, VOCAB)
    # A logit that is not finite spoils its row: the log-prob must say so.
    spoiled = tl.sum(((x != x) | (x == float("inf"))).to(tl.int32), 0) > 0
    tl.store(largest + row * CHUNKS + chunk, tl.where(spoiled, float("nan"), tl.max(x, 0)))
    tl.store(where + row * CHUNKS + chunk, (chunk * CHUNK + tl.argmax(x, 0)).to(tl.int64))


@triton.jit
def _row_largest(largest, row, CHUNKS: tl.constexpr, C: tl.constexpr):
    c = tl.arange(0, C)
    found = tl.load(largest + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
    spoiled = tl.sum((found != found).to(tl.int32), 0) > 0
    return tl.where(spoiled, float("nan"), tl.max(tl.where(found != found, float("-inf"), found), 0))


@triton.jit
def _integer_weights(x, top, SCALE: tl.constexpr):
    shifted = x - top
    return tl.where(shifted == shifted, tl.exp(shifted) * SCALE, 0.0).to(tl.int64)


@triton.jit
def chunk_mass(
    logits, blocked, temperature, stop_masked, largest, mass,
    SCALE: tl.constexpr, LOG_SCALE: tl.constexpr, VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    top = _row_largest(largest, row, CHUNKS, C)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _policy_logits(logits, blocked, temperature, stop_masked, row, place, VOCAB)
    tl.store(mass + row * CHUNKS + chunk, tl.sum(_integer_weights(x, top, SCALE), 0))


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def draw_tokens(
    logits, blocked, temperature, stop_masked, largest, where, mass, keys, greedy, tokens, positions, lengths, counts,
    packed, stride,
    SCALE: tl.constexpr, LOG_SCALE: tl.constexpr, VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """The draw of ``sampler.sample`` and ``randomness.uniforms``, then the row moves on."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, C)
    sums = tl.load(mass + row * CHUNKS + c, mask=c < CHUNKS, other=0)
    total = tl.sum(sums, 0)
    count = tl.load(counts + row)
    golden: tl.constexpr = 0x9E3779B97F4A7C15
    state = _mix(tl.load(keys + row).to(tl.uint64)) + (count + 1).to(tl.uint64) * golden
    uniform = ((_mix(state) >> 12).to(tl.float64) + 0.5) * (2.0**-52)
    target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    running = tl.cumsum(sums, 0)
    chunk = tl.minimum(tl.sum((running <= target).to(tl.int32), 0), CHUNKS - 1)
    before = tl.sum(tl.where(c < chunk, sums, 0), 0)
    top = _row_largest(largest, row, CHUNKS, C)
    place = tl.arange(0, CHUNK)
    x = _policy_logits(logits, blocked, temperature, stop_masked, row, chunk * CHUNK + place, VOCAB)
    within = tl.cumsum(_integer_weights(x, top, SCALE), 0)
    drawn = chunk * CHUNK + tl.sum((within <= target - before).to(tl.int32), 0)
    best = tl.load(largest + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
    best_chunk = tl.argmax(tl.where(best != best, float("-inf"), best), 0)
    is_greedy = tl.load(greedy + row) > 0
    token = tl.where(is_greedy, tl.load(where + row * CHUNKS + best_chunk), drawn.to(tl.int64))
    token = tl.minimum(token, VOCAB - 1)
    chosen = tl.load(logits + row * VOCAB + token).to(tl.float32) / tl.load(temperature + row).to(tl.float32)
    logprob = (chosen - top).to(tl.float64) + LOG_SCALE - tl.log(total.to(tl.float64))
    tl.store(packed + row, token.to(tl.float64))
    tl.store(packed + stride + row, logprob)
    tl.store(packed + 2 * stride + row, tl.where(is_greedy, 0.0, logprob))
    tl.store(tokens + row, token)
    tl.store(positions + row, tl.load(positions + row) + 1)
    tl.store(lengths + row, tl.load(lengths + row) + 1)
    tl.store(counts + row, count + 1)


@triton.jit(do_not_specialize=["rows"])
def add_parts_norm(
    parts, bias, residual, weight, out, summed, rows, width, eps,
    PARTS: tl.constexpr, BIAS: tl.constexpr, CENTRED: tl.constexpr, W: tl.constexpr, SCALE: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """The RMSNorm of a residual and a product that comes in parts, and their sum."""
    after_previous(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, W)
    inside = place < width
    kind = out.dtype.element_ty
    value = tl.zeros((W,), tl.float32)
    for part in tl.static_range(PARTS):
        value += tl.load(parts + (part * rows + row) * width + place, mask=inside, other=0.0)
    value *= SCALE
    if BIAS:
        value += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(residual + row * width + place, mask=inside, other=0.0)
    total = (other.to(tl.float32) + value).to(other.dtype)
    tl.store(summed + row * width + place, total, mask=inside)
    wide = total.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    found = scaled(wide, scale, weight, place, inside, other.dtype, CENTRED)
    tl.store(out + row * width + place, found.to(kind), mask=inside)


@triton.jit
def _taken(
    projected, bias, row, rows, begin, width, place, inside, kind: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """Values at places of one head: as they are, or summed from parts and rounded."""
    if PARTS == 0:
        return tl.load(projected + row * width + begin + place, mask=inside, other=0.0).to(tl.float32)
    value = tl.zeros(place.shape, tl.float32)
    for part in tl.static_range(PARTS):
        value += tl.load(projected + (part * rows + row) * width + begin + place, mask=inside, other=0.0)
    if BIAS:
        value += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
    return value.to(kind).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def place(
    query, key, value, query_bias, key_bias, value_bias, cos, sin, query_gain, key_gain, query_out, key_pages, value_pages,
    table, lengths, width, rows, eps,
    PARTS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, CENTRED: tl.constexpr, GATED: tl.constexpr,
    HEADS: tl.constexpr, KV: tl.constexpr, SIZE: tl.constexpr, ROTARY: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """The first ``ROTARY`` numbers of a head are rotated. ``GATED``: a query has its gate behind it, whose sigmoid goes
    behind all queries."""
    after_previous(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, D)
    inside = d < SIZE
    turns = d < ROTARY
    other = tl.where(turns, (d + ROTARY // 2) % ROTARY, d)
    kind: tl.constexpr = query_out.dtype.element_ty
    entry = tl.minimum(tl.load(lengths + row), width * PAGE - 1)
    page = tl.load(table + row * width + entry // PAGE).to(tl.int64)
    # Three tensors, or one that holds queries, keys and values side by side.
    each: tl.constexpr = 2 * SIZE if GATED else SIZE
    whole: tl.constexpr = HEADS * each + 2 * KV * SIZE
    query_width: tl.constexpr = HEADS * each if PARTS == 0 else whole
    key_width: tl.constexpr = KV * SIZE if PARTS == 0 else whole
    key_from: tl.constexpr = 0 if PARTS == 0 else HEADS * each
    value_from: tl.constexpr = 0 if PARTS == 0 else HEADS * each + KV * SIZE
    if head >= HEADS + KV:
        v = head - HEADS - KV
        copied = _taken(
            value, value_bias + v * SIZE, row, rows, value_from + v * SIZE, key_width, d, inside, kind, PARTS, BIAS
        )
        tl.store(value_pages + ((page * KV + v) * PAGE + entry % PAGE) * SIZE + d, copied.to(kind), mask=inside)
    else:
        is_key = head >= HEADS
        k = head - HEADS
        if is_key:
            begin = key_from + k * SIZE
            x = _taken(key, key_bias + k * SIZE, row, rows, begin, key_width, d, inside, kind, PARTS, BIAS)
            turned = _taken(key, key_bias + k * SIZE, row, rows, begin, key_width, other, inside, kind, PARTS, BIAS)
            gain = key_gain
        else:
            begin = head * each
            x = _taken(query, query_bias + begin, row, rows, begin, query_width, d, inside, kind, PARTS, BIAS)
            turned = _taken(query, query_bias + begin, row, rows, begin, query_width, other, inside, kind, PARTS, BIAS)
            gain = query_gain
            if GATED:
                behind = begin + SIZE
                gate = _taken(query, query_bias + behind, row, rows, behind, query_width, d, inside, kind, PARTS, BIAS)
                gate_out = query_out + ((rows + row) * HEADS + head) * SIZE
                tl.store(gate_out + d, (1.0 / (1.0 + tl.exp(-gate))).to(kind), mask=inside)
        if NORM:
            scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)
            x = scaled(x, scale, gain, d, inside, kind, CENTRED).to(kind).to(tl.float32)
            turned = scaled(turned, scale, gain, other, inside, kind, CENTRED).to(kind).to(tl.float32)
        turned = tl.where(d < ROTARY // 2, -turned, turned)
        c = tl.load(cos + row * ROTARY + d, mask=turns, other=1.0).to(tl.float32)
        s = tl.load(sin + row * ROTARY + d, mask=turns, other=0.0).to(tl.float32)
        rotated = ((x * c).to(kind).to(tl.float32) + (turned * s).to(kind).to(tl.float32)).to(kind)
        if is_key:
            tl.store(key_pages + ((page * KV + k) * PAGE + entry % PAGE) * SIZE + d, rotated, mask=inside)
        else:
            tl.store(query_out + (row * HEADS + head) * SIZE + d, rotated, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def convolve_next(
    mixed, windows, weight, bias, slots, out, rows, width, channels,
    PARTS: tl.constexpr, BIAS: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """A delta net's convolution and SiLU for one new column per row, whose window of ``WIDTH`` columns moves on.

    The columns are the first ``channels`` numbers of rows of ``width``.
    """
    after_previous(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < channels
    kind: tl.constexpr = out.dtype.element_ty
    window = windows + tl.load(slots + row) * WIDTH * channels + c[:, None]
    new = _taken(mixed, bias, row, rows, 0, width, c, inside, kind, PARTS, False)
    i = tl.arange(0, W)[None, :]
    old = tl.load(window + i * channels, mask=inside[:, None] & (i < WIDTH), other=0.0).to(tl.float32)
    columns = tl.where(i == WIDTH, new[:, None], old)
    used = inside[:, None] & (i <= WIDTH)
    factor = tl.load(weight + c[:, None] * (WIDTH + 1) + i, mask=used, other=0.0).to(tl.float32)
    tl.debug_barrier()  # every column is read, by whichever thread, before one is written
    tl.store(window + (i - 1) * channels, columns.to(windows.dtype.element_ty), mask=used & (i > 0))
    summed = tl.sum(columns * factor, 1)
    if BIAS:
        summed += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    rounded = summed.to(kind).to(tl.float32)
    tl.store(out + row * channels + c, (rounded / (1.0 + tl.exp(-rounded))).to(kind), mask=inside)


@triton.jit
def _number(projected, at, step, kind: tl.constexpr, PARTS: tl.constexpr):
    """One number as it is, or summed from parts and rounded."""
    value = tl.load(projected + at).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        value += tl.load(projected + part * step + at)
    return value.to(kind).to(tl.float32)


def settle_states(states: Tensor, updates: Tensor, decays: Tensor, counts: Tensor, slots_B: Tensor) -> None:
    """Apply the updates that wait beside the states of some slots (``StateSlots``); their counts are left."""
    _, groups, size, value = states.shape
    narrow = min(32, triton.next_power_of_2(value))
    _settle[(len(slots_B), groups, triton.cdiv(value, narrow))](
        states, updates, decays, counts, slots_B,
        MOST=updates.shape[1], GROUPS=groups, SIZE=size, VALUE=value, K=triton.next_power_of_2(size), V=narrow, num_warps=1,
        num_stages=1,
    )  # fmt: skip


@triton.jit
def _settle(
    states, updates, decays, counts, slots,
    MOST: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, VALUE: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    slot = tl.load(slots + tl.program_id(0))
    group = tl.program_id(1)
    k = tl.arange(0, K)
    v = tl.program_id(2) * V + tl.arange(0, V)
    both = (k < SIZE)[:, None] & (v < VALUE)[None, :]
    place = states + (slot * GROUPS + group) * SIZE * VALUE + k[:, None] * VALUE + v[None, :]
    count = tl.load(counts + slot)
    if count > 0:
        held = tl.load(place, mask=both, other=0.0)
        held = _updated(held, updates, decays, slot, group, count, k, v, MOST, GROUPS, SIZE, VALUE)
        tl.store(place, held, mask=both)


@triton.jit
def _updated(
    state, updates, decays, slot, group, count, k, v,
    MOST: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """A state after the updates that wait beside it."""
    for i in range(count):
        at = (slot * MOST + i) * GROUPS + group
        key = tl.load(updates + at * (SIZE + VALUE) + k, mask=k < SIZE, other=0.0)
        added = tl.load(updates + at * (SIZE + VALUE) + SIZE + v, mask=v < VALUE, other=0.0)
        state = state * tl.load(decays + at) + key[:, None] * added[None, :]
    return state


@triton.jit(do_not_specialize=["rows"])
def delta_next(
    columns, beta, decay, states, updates, decays, counts, slots, rate, shift, out, rows, scale,
    PARTS: tl.constexpr, MOST: tl.constexpr, HEADS: tl.constexpr, SHARE: tl.constexpr, SIZE: tl.constexpr,
    VALUE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The gated delta rule (``delta_rule``) for one token per row; beta and decay before their activations.

    Each state is read once, in its slot, by programs for some of its values: of one warp, they need no sums over warps. It
    is written where ``MOST`` updates wait beside it; else the token's update joins them. A step ends with launches that
    wait for all before them, so what the step before wrote is there before this step's last launch is done.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    groups: tl.constexpr = HEADS * SHARE
    keys: tl.constexpr = HEADS * SIZE
    k = tl.arange(0, K)
    v = tl.program_id(2) * V + tl.arange(0, V)
    key_inside = k < SIZE
    inside = v < VALUE
    both = key_inside[:, None] & inside[None, :]
    slot = tl.load(slots + row)
    place = states + (slot * groups + group) * SIZE * VALUE + k[:, None] * VALUE + v[None, :]
    state = tl.load(place, mask=both, other=0.0, eviction_policy="evict_first").to(tl.float32)
    count = 0
    if MOST > 0:
        count = tl.load(counts + slot)
        state = _updated(state, updates, decays, slot, group, count, k, v, MOST, groups, SIZE, VALUE)
    after_previous(AHEAD)
    kind: tl.constexpr = out.dtype.element_ty
    begin = columns + row * (2 * keys + groups * VALUE)
    query = tl.load(begin + (group // SHARE) * SIZE + k, mask=key_inside, other=0.0).to(tl.float32)
    key = tl.load(begin + keys + (group // SHARE) * SIZE + k, mask=key_inside, other=0.0).to(tl.float32)
    value = tl.load(begin + 2 * keys + group * VALUE + v, mask=inside, other=0.0).to(tl.float32)
    query = query * (scale / tl.sqrt(tl.sum(query * query, 0) + 1e-6))
    key = key / tl.sqrt(tl.sum(key * key, 0) + 1e-6)
    # Beta and decay have tensors of their own, or one side by side.
    width: tl.constexpr = groups if PARTS == 0 else 2 * groups
    decay_from: tl.constexpr = 0 if PARTS == 0 else groups
    opened = _number(beta, row * width + group, rows * width, kind, PARTS)
    opened = (1.0 / (1.0 + tl.exp(-opened))).to(kind).to(tl.float32)
    fall = _number(decay, row * width + decay_from + group, rows * width, kind, PARTS)
    fall += tl.load(shift + group).to(tl.float32)
    fall = tl.where(fall > 20.0, fall, tl.log(1.0 + tl.exp(fall))) * tl.exp(tl.load(rate + group).to(tl.float32))
    fall = tl.exp(-fall)
    held = state * fall
    added = (value - tl.sum(held * key[:, None], 0)) * opened
    held += key[:, None] * added[None, :]
    if MOST > 0:
        at = (slot * MOST + count) * groups + group
        waits = count < MOST
        first = waits & (tl.program_id(2) == 0)
        tl.store(updates + at * (SIZE + VALUE) + k, key, mask=key_inside & first)
        tl.store(updates + at * (SIZE + VALUE) + SIZE + v, added, mask=inside & waits)
        tl.store(decays + at, fall, mask=first)
        both = both & (count >= MOST)
    tl.store(place, held.to(states.dtype.element_ty), mask=both, eviction_policy="evict_first")
    seen = tl.sum(held * query[:, None], 0)
    tl.store(out + (row * groups + group) * VALUE + v, seen.to(kind), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def gated_norm_next(
    seen, gates, gain, out, rows, eps,
    PARTS: tl.constexpr, FROM: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, VALUE: tl.constexpr,
    R: tl.constexpr, V: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The gated norm of a delta net's result, with ``delta_triton.gated_norm``'s roundings.

    Gates are in rows of ``WIDTH`` numbers, from number ``FROM`` on.
    """
    after_previous(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * R + tl.arange(0, R)
    v = tl.arange(0, V)
    inside = (group < GROUPS)[:, None] & (v < VALUE)[None, :]
    place = group[:, None] * VALUE + v[None, :]
    kind: tl.constexpr = out.dtype.element_ty
    x = tl.load(seen + row * GROUPS * VALUE + place, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / VALUE + eps)
    factor = tl.load(gain + v, mask=v < VALUE, other=0.0).to(tl.float32)
    x = ((x * scale[:, None]).to(kind).to(tl.float32) * factor[None, :]).to(gain.dtype.element_ty).to(tl.float32)
    gate = _taken(gates, gain, row, rows, FROM, WIDTH, place, inside, kind, PARTS, False)
    found = x * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out + row * GROUPS * VALUE + place, found.to(kind), mask=inside)

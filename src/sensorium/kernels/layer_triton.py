"""Norm, rotation, gate and the split of joined projections as Triton kernels, and their gradients: one launch each."""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from sensorium.kernels.layer_torch import FINE_SCALE, NormGradients

# joined [query_0 … query_H-1 key_0 … key_K-1 value_0 … value_K-1] a token, each D numbers. Roundings are those of
# ``layer_ops.Rotate``. Axes: N tokens, H query heads, K key heads, D head size.


def split_rotated(joined_NW: Tensor, cos_ND: Tensor, sin_ND: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries [N, H, D], rotated keys [N, K, D], and values."""
    tokens, size = cos_ND.shape
    kv_heads = (joined_NW.shape[1] // size - heads) // 2
    query = joined_NW.new_empty(tokens, heads, size)
    key, value = joined_NW.new_empty(2, tokens, kv_heads, size).unbind()
    _split[(tokens,)](joined_NW, cos_ND, sin_ND, query, key, value, **_sizes(heads, kv_heads, size))
    return query, key, value


def joined_gradients(query: Tensor, key: Tensor, value: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> Tensor:
    """The gradient of what was split, of contiguous gradients of the three."""
    tokens, heads, size = query.shape
    kv_heads = key.shape[1]
    out_NW = query.new_empty(tokens, (heads + 2 * kv_heads) * size)
    _join[(tokens,)](query, key, value, cos_ND, sin_ND, out_NW, **_sizes(heads, kv_heads, size))
    return out_NW


def _sizes(heads: int, kv_heads: int, size: int) -> dict[str, int]:
    rows = triton.next_power_of_2(heads + 2 * kv_heads)
    return {"HEADS": heads, "KEYS": kv_heads, "N": rows, "SIZE": size, "D": triton.next_power_of_2(size), "num_warps": 4}


@triton.jit
def _split(
    joined, cos, sin, query, key, value,
    HEADS: tl.constexpr, KEYS: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, N)[:, None]
    d = tl.arange(0, D)[None, :]
    inside = (n < HEADS + 2 * KEYS) & (d < SIZE)
    base = (token * (HEADS + 2 * KEYS) + n) * SIZE
    own = tl.load(joined + base + d, mask=inside, other=0.0)
    kind = own.dtype
    turned = tl.load(joined + base + (d + SIZE // 2) % SIZE, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + token * SIZE + d, mask=d < SIZE, other=0.0).to(tl.float32)
    s = tl.load(sin + token * SIZE + d, mask=d < SIZE, other=0.0).to(tl.float32)
    turned = tl.where(d < SIZE // 2, -turned, turned)
    first = (own.to(tl.float32) * c).to(kind).to(tl.float32)
    second = (turned * s).to(kind).to(tl.float32)
    rotated = (first + second).to(kind)
    tl.store(query + (token * HEADS + n) * SIZE + d, rotated, mask=inside & (n < HEADS))
    tl.store(key + (token * KEYS + n - HEADS) * SIZE + d, rotated, mask=inside & (n >= HEADS) & (n < HEADS + KEYS))
    tl.store(value + (token * KEYS + n - HEADS - KEYS) * SIZE + d, own, mask=inside & (n >= HEADS + KEYS))


@triton.jit
def _join(
    query, key, value, cos, sin, out,
    HEADS: tl.constexpr, KEYS: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, N)[:, None]
    d = tl.arange(0, D)[None, :]
    other = (d + SIZE // 2) % SIZE
    real = d < SIZE
    inside = (n < HEADS + 2 * KEYS) & real
    is_query = (n < HEADS) & real
    is_key = (n >= HEADS) & (n < HEADS + KEYS) & real
    queries = query + (token * HEADS + n) * SIZE
    keys = key + (token * KEYS + n - HEADS) * SIZE
    own = tl.load(queries + d, mask=is_query, other=0.0) + tl.load(keys + d, mask=is_key, other=0.0)
    kind = own.dtype
    turned = tl.load(queries + other, mask=is_query, other=0.0) + tl.load(keys + other, mask=is_key, other=0.0)
    turned = tl.where(d < SIZE // 2, turned, -turned).to(tl.float32)
    c = tl.load(cos + token * SIZE + d, mask=real, other=0.0).to(tl.float32)
    s = tl.load(sin + token * SIZE + other, mask=real, other=0.0).to(tl.float32)
    first = (own.to(tl.float32) * c).to(kind).to(tl.float32)
    second = (turned * s).to(kind).to(tl.float32)
    values = value + (token * KEYS + n - HEADS - KEYS) * SIZE + d
    plain = tl.load(values, mask=inside & (n >= HEADS + KEYS), other=0.0)
    found = tl.where(n < HEADS + KEYS, (first + second).to(kind), plain)
    tl.store(out + (token * (HEADS + 2 * KEYS) + n) * SIZE + d, found, mask=inside)


# both [gate_0 … gate_F-1 up_0 … up_F-1] a row inner [silu(gate_0) · up_0 … ]


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


# The stock modules keep float32 copies of what they normalise and launch five to fifteen kernels for each of these. The
# values have the stock modules' roundings; gradients are computed in float32 from them. What is normalised may be wider
# than the weight (a float32 residual stream under bfloat16 weights): then it is rounded once, at the end, to the
# weight's kind. Axes: N rows, W width, D head size.


NORM_PROGRAMS = 528  # programs of a norm's backward: each sums the weight's gradient over its rows


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up of contiguous tensors."""
    out, count = torch.empty_like(gate), gate.numel()
    _gate[(triton.cdiv(count, 2048),)](gate, up, out, count, SCALE=1.0, BLOCK=2048, num_warps=8)
    return out


def gated_finely(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up of contiguous float32 tensors in float16, divided by ``FINE_SCALE``."""
    out, count = torch.empty_like(gate, dtype=torch.float16), gate.numel()
    _gate[(triton.cdiv(count, 2048),)](gate, up, out, count, SCALE=1 / FINE_SCALE, BLOCK=2048, num_warps=8)
    return out


def gate_gradients(gate: Tensor, up: Tensor, gradient: Tensor, again: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate and up, and where asked for ``again`` what ``gated`` gives (else the last is unspecified)."""
    gate_gradient, up_gradient, count = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    out = torch.empty_like(gate) if again else gate_gradient
    _gate_gradients[(triton.cdiv(count, 2048),)](
        gate, up, gradient, gate_gradient, up_gradient, out, count, AGAIN=again, BLOCK=2048, num_warps=8
    )
    return gate_gradient, up_gradient, out


def normed(
    x: Tensor, weight_W: Tensor, eps: float, kind: torch.dtype | None = None, centred: bool = False
) -> tuple[Tensor, Tensor]:
    """The RMSNorm of contiguous rows, in ``kind`` or the weight's, and its scales [N]. ``centred``: 1 is added to it."""
    return _launch_norm(x, None, weight_W, eps, None, kind, centred)


def add_normed(
    x: Tensor,
    residual: Tensor,
    weight_W: Tensor,
    eps: float,
    kind: torch.dtype | None = None,
    centred: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The RMSNorm of a sum of contiguous rows in ``kind`` or the weight's, the sum in the residual's, the norm's scales."""
    summed = torch.empty_like(residual)
    out, scale_N = _launch_norm(x, residual, weight_W, eps, summed, kind, centred)
    return out, summed, scale_N


def _launch_norm(
    x: Tensor,
    residual: Tensor | None,
    weight_W: Tensor,
    eps: float,
    summed: Tensor | None,
    kind: torch.dtype | None = None,
    centred: bool = False,
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    rows = x.numel() // width
    out = torch.empty_like(x, dtype=kind or weight_W.dtype)
    scale_N = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _norm[(rows,)](
        x, x if residual is None else residual, weight_W, out, x if summed is None else summed, scale_N, width, eps,
        ADD=residual is not None, CENTRED=centred, W=block, num_warps=8 if block >= 1024 else 1,
    )  # fmt: skip
    return out, scale_N


def norm_gradients(
    x: Tensor,
    weight_W: Tensor,
    scale_N: Tensor,
    gradient: Tensor,
    more: Tensor | None,
    narrow: torch.dtype | None = None,
    again: torch.dtype | None = None,
) -> NormGradients:
    """Gradients of a norm's input and weight; ``more`` is added to the input's. ``again``: the norm's result too, in it."""
    width = x.shape[-1]
    rows = x.numel() // width
    programs = min(rows, NORM_PROGRAMS)
    gradient, out = gradient.contiguous(), torch.empty_like(x)
    more = gradient if more is None else more.contiguous()
    second = None if narrow is None else torch.empty_like(x, dtype=narrow)
    result = out if again is None else torch.empty_like(x, dtype=again)
    sums_PW = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _norm_gradient[(programs,)](
        x, weight_W, scale_N, gradient, more, out, out if second is None else second, result, sums_PW, rows, width,
        MORE=more is not gradient, TWICE=second is not None, AGAIN=again is not None, W=block,
        num_warps=8 if block >= 1024 else 1,
    )  # fmt: skip
    return NormGradients(out, second, sums_PW.sum(0).to(weight_W.dtype), result)


def rotated(x_BTHD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, back: bool) -> Tensor:
    """Heads rotated by their token's angles, or a gradient of that ``back``."""
    x_BTHD = x_BTHD.contiguous()
    batch, length, heads, size = x_BTHD.shape
    out_BTHD = torch.empty_like(x_BTHD)
    _rotate[(batch * length,)](
        x_BTHD, cos_BTD.contiguous(), sin_BTD.contiguous(), out_BTHD,
        BACK=back, HEADS=heads, H=triton.next_power_of_2(heads), SIZE=size, D=triton.next_power_of_2(size), num_warps=4,
    )  # fmt: skip
    return out_BTHD


@triton.jit
def scaled(value, scale, weight, place, inside, kind: tl.constexpr, CENTRED: tl.constexpr):
    """Normed values times the weight, before the last rounding; a centred norm rounds only then."""
    gain = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        return (1.0 + gain) * (value * scale)
    return gain * (value * scale).to(kind).to(tl.float32)


@triton.jit
def _norm(
    x, residual, weight, out, summed, scales, width, eps, ADD: tl.constexpr, CENTRED: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, W)
    inside = place < width
    value = tl.load(x + row * width + place, mask=inside, other=0.0)
    if ADD:
        other = tl.load(residual + row * width + place, mask=inside, other=0.0)
        value = (other.to(tl.float32) + value.to(tl.float32)).to(other.dtype)
        tl.store(summed + row * width + place, value, mask=inside)
    wide = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    tl.store(scales + row, scale)
    found = scaled(wide, scale, weight, place, inside, value.dtype, CENTRED)
    tl.store(out + row * width + place, found.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_gradient(
    x, weight, scales, gradient, more, out, narrow, result, sums, rows, width,
    MORE: tl.constexpr, TWICE: tl.constexpr, AGAIN: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    place = tl.arange(0, W)
    inside = place < width
    gain = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    summed = tl.zeros((W,), tl.float32)
    for index in range(program, rows, tl.num_programs(0)):
        row = index + program.to(tl.int64) * 0  # as 64 bits: rows times width may not fit in 32
        value = tl.load(x + row * width + place, mask=inside, other=0.0)
        scale = tl.load(scales + row)
        normed = value.to(tl.float32) * scale
        given = tl.load(gradient + row * width + place, mask=inside, other=0.0).to(tl.float32)
        rounded = normed.to(value.dtype).to(tl.float32)
        summed += given * rounded
        if AGAIN:
            tl.store(result + row * width + place, (gain * rounded).to(result.dtype.element_ty), mask=inside)
        wide = given * gain
        found = scale * (wide - normed * (tl.sum(wide * normed, 0) / width))
        if MORE:
            found += tl.load(more + row * width + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * width + place, found.to(value.dtype), mask=inside)
        if TWICE:
            tl.store(narrow + row * width + place, found.to(narrow.dtype.element_ty), mask=inside)
    tl.store(sums + program.to(tl.int64) * width + place, summed, mask=inside)


@triton.jit
def _rotate(
    x, cos, sin, out,
    BACK: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, H)[:, None]
    d = tl.arange(0, D)[None, :]
    inside = (h < HEADS) & (d < SIZE)
    other = (d + SIZE // 2) % SIZE
    base = token * HEADS * SIZE + h * SIZE
    own = tl.load(x + base + d, mask=inside, other=0.0)
    kind = own.dtype
    turned = tl.load(x + base + other, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + token * SIZE + d, mask=d < SIZE, other=0.0).to(tl.float32)
    if BACK:
        s = tl.load(sin + token * SIZE + other, mask=d < SIZE, other=0.0).to(tl.float32)
        turned = tl.where(d < SIZE // 2, turned, -turned)
    else:
        s = tl.load(sin + token * SIZE + d, mask=d < SIZE, other=0.0).to(tl.float32)
        turned = tl.where(d < SIZE // 2, -turned, turned)
    first = (own.to(tl.float32) * c).to(kind).to(tl.float32)
    second = (turned * s).to(kind).to(tl.float32)
    tl.store(out + base + d, (first + second).to(kind), mask=inside)


@triton.jit
def fitted(value, SCALE: tl.constexpr):
    """As float16 holds it: scaled, and no larger than its largest number."""
    return tl.minimum(tl.maximum(value * SCALE, -65504.0), 65504.0).to(tl.float16)


@triton.jit
def _gate(gate, up, out, count, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    opened = tl.load(gate + place, mask=inside, other=0.0)
    wide = opened.to(tl.float32)
    silu = wide / (1.0 + tl.exp(-wide))
    found = silu * tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    if SCALE == 1.0:
        tl.store(out + place, found.to(opened.dtype), mask=inside)
    else:
        tl.store(out + place, fitted(found, SCALE), mask=inside)


@triton.jit
def _gate_gradients(
    gate, up, gradient, gate_gradient, up_gradient, out, count, AGAIN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    opened = tl.load(gate + place, mask=inside, other=0.0)
    kind = opened.dtype
    wide = opened.to(tl.float32)
    value = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-wide))
    silu = wide * sigmoid
    if AGAIN:
        tl.store(out + place, (wide / (1.0 + tl.exp(-wide)) * value).to(kind), mask=inside)
    tl.store(up_gradient + place, (given * silu).to(kind), mask=inside)
    tl.store(gate_gradient + place, (given * value * (sigmoid + silu * (1.0 - sigmoid))).to(kind), mask=inside)


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

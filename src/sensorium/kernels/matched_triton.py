"""Triton kernels whose result for a row depends on that row alone: a matrix product, and attention by blocks of 64 keys.

Both sum in an order that the shape of the weights and a token's own context fix. How many rows are computed together, and
at which place of a tile a row stands, changes nothing. ``matched_ops`` has the same in plain torch.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from sensorium.kernels.matched_ops import BLOCK, KeyStore, QueryTiles

FEW_ROWS = 256  # up to here tiles are cut for reading the weights, above for arithmetic; both sum in the same order
NARROW = 4096  # outputs of a weight; below, its tiles are narrow, so that all multiprocessors read
# Of ten that gave the same bits for any number of rows, by timings on an H200 that had other work (Qwen2.5-VL-3B's shapes).
FEW = {"N": 64, "M": 64, "K": 64, "num_warps": 4, "num_stages": 4}
FEW_NARROW = {"N": 64, "M": 16, "K": 128, "num_warps": 4, "num_stages": 4}
MANY = {"N": 128, "M": 256, "K": 64, "num_warps": 8, "num_stages": 3}
WIDE = {"N": 64, "M": 32, "K": 64, "num_warps": 4, "num_stages": 2}  # float32
TILE = 64  # rows of an attention tile: queries times the heads that share a key head
LOG2_E = 1.4426950408889634


def product(
    x_NK: Tensor,
    weight_MK: Tensor,
    bias_M: Tensor | None = None,
    kind: torch.dtype = torch.float32,
    few: bool | None = None,
) -> Tensor:
    """x · weightᵀ + bias in ``kind``, each result summed along K in steps of the tensor cores, one after the other.

    ``few``: tiles for few rows, or for many; by default by their number.
    """
    x_NK, weight_MK = x_NK.contiguous(), weight_MK.contiguous()
    rows, inner = x_NK.shape
    outputs = weight_MK.shape[0]
    out_NM = torch.empty(rows, outputs, dtype=kind, device=x_NK.device)
    if not rows:
        return out_NM
    wide = x_NK.dtype == torch.float32
    few = rows <= FEW_ROWS if few is None else few
    tile = WIDE if wide else MANY if not few else FEW_NARROW if outputs < NARROW else FEW
    grid = (triton.cdiv(rows, tile["N"]) * triton.cdiv(outputs, tile["M"]),)
    _product[grid](
        x_NK, weight_MK, weight_MK if bias_M is None else bias_M, out_NM, rows, outputs, inner,
        BIAS=bias_M is not None, EVEN=inner % tile["K"] == 0, PRECISION="ieee" if wide else "tf32", **tile,
    )  # fmt: skip
    return out_NM


@triton.jit
def _product(
    x, weight, bias, out, rows, outputs, inner,
    BIAS: tl.constexpr, N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    down = tl.cdiv(rows, N)
    # Programs that run together share tiles of both sides: 8 tiles of rows, then the next tile of outputs.
    program = tl.program_id(0)
    per_group = 8 * tl.cdiv(outputs, M)
    group = program // per_group
    height = tl.minimum(down - group * 8, 8)
    first = (group * 8 + (program % per_group) % height) * N
    second = (program % per_group) // height * M
    n = first + tl.arange(0, N)
    m = second + tl.arange(0, M)
    k = tl.arange(0, K)
    row = tl.minimum(n, rows - 1).to(tl.int64)
    output = tl.minimum(m, outputs - 1).to(tl.int64)
    left = x + row[:, None] * inner + k[None, :]
    right = weight + output[None, :] * inner + k[:, None]
    summed = tl.zeros((N, M), tl.float32)
    for start in range(0, inner, K):
        if EVEN:
            a = tl.load(left + start)
            b = tl.load(right + start)
        else:
            a = tl.load(left + start, mask=(start + k < inner)[None, :], other=0.0)
            b = tl.load(right + start, mask=(start + k < inner)[:, None], other=0.0)
        summed = tl.dot(a, b, summed, input_precision=PRECISION)
    inside = (n < rows)[:, None] & (m < outputs)[None, :]
    if BIAS:
        summed += tl.load(bias + m, mask=m < outputs, other=0.0).to(tl.float32)[None, :]
    place = n.to(tl.int64)[:, None] * outputs + m[None, :]
    tl.store(out + place, summed.to(out.dtype.element_ty), mask=inside)


def sums_alike(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether tiles for few and for many rows give the same bits here, whatever the number of rows."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 1104, generator=generator).to(device, dtype) for rows in (300, 200))
    whole = product(x, weight, few=False)
    others = [product(x, weight, few=True), torch.cat([product(part, weight) for part in x.split(7)])]
    return all(torch.equal(whole, other) for other in others)


def attend(query_THD: Tensor, store: KeyStore, tiles: QueryTiles, scaling: float) -> Tensor:
    """Attention of the tiles' queries; others get zeros."""
    query_THD = query_THD.contiguous()
    _, heads, size = query_THD.shape
    share = heads // store.kv_heads
    out_THD = torch.zeros_like(query_THD)
    of_tiles = (x.contiguous() for x in (tiles.first_X, tiles.count_X, tiles.base_X, tiles.place_X, tiles.entries))
    _attend[(len(tiles.first_X), store.kv_heads)](
        query_THD, store.keys, store.values, *of_tiles, out_THD, store.entry_stride, store.head_stride, scaling * LOG2_E,
        HEADS=heads, SHARE=share, S=triton.next_power_of_2(share), SIZE=size, D=max(16, triton.next_power_of_2(size)),
        TILE=TILE, BLOCK=BLOCK, FINE=query_THD.dtype == torch.bfloat16,
        PRECISION="ieee" if query_THD.dtype == torch.float32 else "tf32", num_warps=4, num_stages=2,
    )  # fmt: skip
    return out_THD


@triton.jit
def _attend(
    query, keys, values, firsts, counts, bases, places, entries, out, entry_stride, head_stride, factor,
    HEADS: tl.constexpr, SHARE: tl.constexpr, S: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, FINE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    k = tl.program_id(1)
    first = tl.load(firsts + tile).to(tl.int64)
    count = tl.load(counts + tile).to(tl.int32)
    base = tl.load(bases + tile).to(tl.int64)
    place = tl.load(places + tile).to(tl.int32)
    m = tl.arange(0, TILE)
    d = tl.arange(0, D)
    s = tl.arange(0, BLOCK)
    real = (m // S < count) & (m % S < SHARE)
    at = (first + m // S) * HEADS + k * SHARE + m % S
    used = real[:, None] & (d < SIZE)[None, :]
    q = tl.load(query + at[:, None] * SIZE + d[None, :], mask=used, other=0.0)
    seen = place + m // S  # the last entry that a query sees
    last = place + count - 1
    top = tl.full((TILE,), float("-inf"), tl.float32)
    weight = tl.zeros((TILE,), tl.float32)
    summed = tl.zeros((TILE, D), tl.float32)
    for start in range(0, last + 1, BLOCK):
        there = start + s <= last
        entry = tl.load(entries + base + start + s, mask=there, other=0).to(tl.int64)
        where = entry[:, None] * entry_stride + k * head_stride + d[None, :]
        loaded = there[:, None] & (d < SIZE)[None, :]
        key = tl.load(keys + where, mask=loaded, other=0.0)
        value = tl.load(values + where, mask=loaded, other=0.0)
        score = tl.dot(q, tl.trans(key), input_precision=PRECISION) * factor
        score = tl.where((start + s)[None, :] <= seen[:, None], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        kept = tl.exp2(top - higher)
        part = tl.exp2(score - higher[:, None])
        weight = weight * kept + tl.sum(part, 1)
        if FINE:
            more = tl.dot(part.to(tl.float16), value.to(tl.float16))
        else:
            more = tl.dot(part.to(value.dtype), value, input_precision=PRECISION)
        # A block of which a query sees nothing adds exactly nothing: kept is 1, and more is 0.
        summed = summed * kept[:, None] + more
        top = higher
    tl.store(out + at[:, None] * SIZE + d[None, :], (summed / weight[:, None]).to(out.dtype.element_ty), mask=used)

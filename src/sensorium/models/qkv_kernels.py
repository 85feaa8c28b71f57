"""Queries, keys and values that one product gives side by side: split and rotated by one Triton kernel, and back.

    joined   [query_0 … query_H-1  key_0 … key_K-1  value_0 … value_K-1]   a token, each D numbers

Roundings are those of ``layer_kernels.Rotate``. Axes: N tokens, H query heads, K key heads, D head size.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl
from torch import Tensor


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

"""Keys and values of the rows being written: one dense block, active rows first, grown in steps.

The block is [layers, 2, rows, K, capacity, D] (2: keys and values; K key heads; D head size), so that moving, copying or
growing rows is one operation for all layers. Entries beyond a row's length hold stale numbers that nothing attends to.
Axes besides: B rows of a forward, T new tokens, S cache entries seen.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sensorium.models.attention import masked_attention

LENGTH_STEP = 64


class KVCache:
    """The block of keys and values. Rows and capacity grow on demand; which row is whose is the engine's business."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.block = torch.zeros(layers, 2, 0, kv_heads, 0, head_dim, dtype=dtype, device=device)

    @property
    def rows(self) -> int:
        """Rows there is room for."""
        return self.block.shape[2]

    @property
    def capacity(self) -> int:
        """Tokens a row has room for."""
        return self.block.shape[4]

    @property
    def device(self) -> torch.device:
        """Where it lives."""
        return self.block.device

    def attention(self, first: int, held: Sequence[int], new: Sequence[int]) -> "FreshAttention | CachedAttention":
        """Attention of ``new`` tokens of the rows from ``first`` on, after ``held`` cached ones (of all, or of none)."""
        if not held[0]:
            return FreshAttention(self, first)
        held_B, width = torch.tensor(held, device=self.block.device), max(new)
        bias_B1TS = causal_bias(self, held_B, width, max(held) + width)
        return CachedAttention(self.block, write_places(self, first, held_B, width), bias_B1TS, first)

    def reserve(self, rows: int, length: int) -> bool:
        """Make room for that many rows and tokens; True if the block was reallocated. It grows by at least half."""
        if rows <= self.rows and length <= self.capacity:
            return False
        layers, two, old_rows, kv_heads, old_length, head_dim = self.block.shape
        rows = old_rows if rows <= old_rows else max(rows, old_rows * 3 // 2)
        if length > old_length:
            old_length = -(-max(length, old_length * 3 // 2) // LENGTH_STEP) * LENGTH_STEP
        # Zeros, not empty: a masked entry weighs nothing, but nothing times NaN is NaN.
        grown = self.block.new_zeros(layers, two, rows, kv_heads, old_length, head_dim)
        grown[:, :, : self.rows, :, : self.capacity] = self.block
        self.block = grown
        return True

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first ``length`` tokens of rows onto other rows; every source is read before a target is written."""
        if not targets:
            return
        source, target = (torch.tensor(rows, device=self.block.device) for rows in (sources, targets))
        used = self.block[:, :, :, :, :length]
        used.index_copy_(2, target, used.index_select(2, source))

    def take(self, row: int, length: int) -> Tensor:
        """The keys and values of a row, as a tensor of their own: [layers, 2, K, length, D]."""
        return self.block[:, :, row, :, :length].clone()

    def put(self, row: int, kept: Tensor, length: int) -> None:
        """Copy the first ``length`` tokens of stored keys and values into a row."""
        self.block[:, :, row, :, :length] = kept[:, :, :, :length]


class FreshAttention:
    """Prefill of rows ``first … first+B`` from their beginning: causal among the new tokens, which are written down.

    Rows may be padded on the right: no real token sees the padding; what it leaves in the cache is overwritten or masked.
    """

    def __init__(self, cache: KVCache, first: int) -> None:
        self.block = cache.block
        self.first = first

    def __call__(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float) -> Tensor:
        rows = slice(self.first, self.first + key_BKTD.shape[0])
        length = key_BKTD.shape[2]
        self.block[layer, 0, rows, :, :length] = key_BKTD
        self.block[layer, 1, rows, :, :length] = value_BKTD
        return masked_attention(query_BHTD, key_BKTD, value_BKTD, scaling, None)


class CachedAttention:
    """New tokens after cached ones, in rows ``first … first+B`` of the block. One new token each is decoding.

    ``write_N`` are the places of the new keys, by row, key head and token, in the block seen as a list of heads;
    ``bias_B1TS`` is 0 for the entries a token sees and -inf for the others; its width is how far the cache is read.
    """

    def __init__(self, block: Tensor, write_N: Tensor, bias_B1TS: Tensor, first: int = 0) -> None:
        self.block = block
        self.write_N = write_N
        self.bias_B1TS = bias_B1TS
        self.first = first

    def __call__(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float) -> Tensor:
        batch, reach = query_BHTD.shape[0], self.bias_B1TS.shape[-1]
        # Plain numbers, also while it is being recorded: only rows and reach change from call to call.
        heads, new, size, kv_heads = (int(n) for n in (*query_BHTD.shape[1:], key_BKTD.shape[1]))
        keys, values = self.block[layer, 0], self.block[layer, 1]
        keys.view(-1, size).index_copy_(0, self.write_N, key_BKTD.reshape(-1, size))
        values.view(-1, size).index_copy_(0, self.write_N, value_BKTD.reshape(-1, size))
        # Query heads that share a key head become queries of that head: keys and values are never repeated.
        share = heads // kv_heads
        rows = slice(self.first, self.first + batch)
        out = scaled_dot_product_attention(
            query_BHTD.reshape(batch, kv_heads, share * new, size),
            keys[rows, :, :reach],
            values[rows, :, :reach],
            attn_mask=self.bias_B1TS if new == 1 else self.bias_B1TS.repeat(1, 1, share, 1),
            scale=scaling,
        )
        return out.reshape(batch, heads, new, size).transpose(1, 2)


def write_places(cache: KVCache, first: int, lengths_B: Tensor, new: int) -> Tensor:
    """Where ``new`` tokens go after ``lengths_B`` cached ones, for ``CachedAttention``."""
    kv_heads, device = cache.block.shape[3], cache.block.device
    head_BK = torch.arange(first * kv_heads, (first + lengths_B.shape[0]) * kv_heads, device=device).view(-1, kv_heads)
    place_BT = lengths_B[:, None] + torch.arange(new, device=device)
    return (head_BK[:, :, None] * cache.capacity + place_BT[:, None]).view(-1)


def causal_bias(cache: KVCache, lengths_B: Tensor, new: int, width: int) -> Tensor:
    """What ``new`` tokens after ``lengths_B`` cached ones see of the first ``width`` entries, for ``CachedAttention``."""
    device = cache.block.device
    place_BT = lengths_B[:, None] + torch.arange(new, device=device)
    bias_BTS = cache.block.new_zeros(*place_BT.shape, width)
    return bias_BTS.masked_fill_(torch.arange(width, device=device) > place_BT[:, :, None], -torch.inf)[:, None]

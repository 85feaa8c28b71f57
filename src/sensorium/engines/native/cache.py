"""Keys and values of the rows being written: one dense block, active rows first, grown in steps.

The block is [layers, 2, rows, K, capacity, D] (2: keys and values; K key heads; D head size), so that moving, copying or
growing rows is one operation for all layers. Rows beyond a row's length hold stale numbers that are never attended to.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sensorium.models.attention import masked_attention

LENGTH_STEP = 64


class KVCache:
    """The block of keys and values. Rows and capacity grow on demand; indices are given by the engine."""

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

    def reserve(self, rows: int, length: int) -> None:
        """Make room for that many rows and tokens; grows by half at least, so that growing is rare."""
        if rows <= self.rows and length <= self.capacity:
            return
        if rows > self.rows:
            rows = max(rows, self.rows * 3 // 2)
        if length > self.capacity:
            length = -(-max(length, self.capacity * 3 // 2) // LENGTH_STEP) * LENGTH_STEP
        layers, two, old_rows, kv_heads, old_length, head_dim = self.block.shape
        grown = self.block.new_zeros(layers, two, max(rows, old_rows), kv_heads, max(length, old_length), head_dim)
        grown[:, :, :old_rows, :, :old_length] = self.block
        self.block = grown

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first ``length`` tokens of rows onto other rows, all at once: the sources are read before anything is written."""
        if not targets:
            return
        source, target = (torch.tensor(rows, device=self.block.device) for rows in (sources, targets))
        used = self.block[:, :, :, :, :length]
        used.index_copy_(2, target, used.index_select(2, source))

    def take(self, row: int, length: int) -> Tensor:
        """The keys and values of a row, as a tensor of their own: [layers, 2, K, length, D]."""
        return self.block[:, :, row, :, :length].clone()

    def put(self, row: int, kept: Tensor, length: int) -> None:
        """Lay the first ``length`` tokens of kept keys and values into a row."""
        self.block[:, :, row, :, :length] = kept[:, :, :, :length]

    def clear(self) -> None:
        """Give the memory back."""
        self.block = self.block[:, :, :0, :, :0].clone()


class FreshAttention:
    """Prefill of rows ``first … first+B`` from their beginning: causal among the new tokens, which are written down.

    Rows may be padded on the right: no real token sees the padding, and what it leaves in the cache is overwritten or masked.
    """

    def __init__(self, cache: KVCache, first: int) -> None:
        self.cache = cache
        self.first = first

    def __call__(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float) -> Tensor:
        rows = slice(self.first, self.first + key_BKTD.shape[0])
        length = key_BKTD.shape[2]
        self.cache.block[layer, 0, rows, :, :length] = key_BKTD
        self.cache.block[layer, 1, rows, :, :length] = value_BKTD
        return masked_attention(query_BHTD, key_BKTD, value_BKTD, scaling, None)


class CachedAttention:
    """New tokens after cached ones: row ``first + b`` holds ``lengths_B[b]`` tokens and gets T more. T = 1 is decoding.

    ``reach`` is how many cache entries any row needs to see (its length and the new tokens), known to the caller on the host.
    Query heads that share a key head become queries of that head, so nothing is repeated.
    """

    def __init__(self, cache: KVCache, first: int, lengths_B: Tensor, new: int, reach: int) -> None:
        block = cache.block
        batch, kv_heads, capacity = lengths_B.shape[0], block.shape[3], block.shape[4]
        device = block.device
        self.block = block
        self.rows = slice(first, first + batch)
        self.reach = reach
        offset_T = torch.arange(new, device=device)
        place_BT = lengths_B[:, None] + offset_T
        heads_BK = torch.arange(first * kv_heads, (first + batch) * kv_heads, device=device).view(batch, kv_heads)
        self.index_N = (heads_BK[:, :, None] * capacity + place_BT[:, None, :]).view(-1)
        hidden_BTS = torch.arange(reach, device=device) > place_BT[:, :, None]
        self.bias_BTS = torch.zeros(hidden_BTS.shape, dtype=block.dtype, device=device).masked_fill_(hidden_BTS, -torch.inf)
        self.bias: Tensor | None = None

    def __call__(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float) -> Tensor:
        batch, heads, new, size = query_BHTD.shape
        kv_heads = key_BKTD.shape[1]
        share = heads // kv_heads
        keys, values = self.block[layer, 0], self.block[layer, 1]
        keys.view(-1, size).index_copy_(0, self.index_N, key_BKTD.reshape(-1, size))
        values.view(-1, size).index_copy_(0, self.index_N, value_BKTD.reshape(-1, size))
        if self.bias is None:
            self.bias = self.bias_BTS[:, None].repeat(1, 1, share, 1) if new > 1 else self.bias_BTS[:, None]
        out = scaled_dot_product_attention(
            query_BHTD.reshape(batch, kv_heads, share * new, size),
            keys[self.rows, :, : self.reach],
            values[self.rows, :, : self.reach],
            attn_mask=self.bias,
            scale=scaling,
        )
        return out.reshape(batch, heads, new, size).transpose(1, 2)

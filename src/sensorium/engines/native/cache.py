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

    def reserve(self, rows: int, length: int) -> bool:
        """Make room for that many rows and tokens; True if the block moved. What grows does so by half at least."""
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
        """Lay the first ``length`` tokens of kept keys and values into a row."""
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
    """New tokens after cached ones: row ``first + b`` holds ``lengths_B[b]`` tokens and gets ``new`` more.

    ``reach`` is how many cache entries the longest row sees, known on the host. With one new token it serves decoding:
    ``advance`` moves every row on by one, in place, and the same tensors serve the next step.
    """

    def __init__(self, cache: KVCache, first: int, lengths_B: Tensor, new: int, reach: int) -> None:
        self.block = cache.block
        self.rows = slice(first, first + lengths_B.shape[0])
        self.reach = reach
        kv_heads, capacity, device = cache.block.shape[3], cache.capacity, cache.block.device
        place_BT = lengths_B[:, None] + torch.arange(new, device=device)
        head_BK = torch.arange(self.rows.start * kv_heads, self.rows.stop * kv_heads, device=device).view(-1, kv_heads)
        self._write_N = (head_BK[:, :, None] * capacity + place_BT[:, None]).view(-1)
        width = capacity if new == 1 else reach  # decoding goes on in the same tensor until the cache is full
        bias_BTS = cache.block.new_zeros(*place_BT.shape, width)
        bias_BTS.masked_fill_(torch.arange(width, device=device) > place_BT[:, :, None], -torch.inf)
        self._bias_B1QS = bias_BTS[:, None]
        self._see_B = torch.arange(lengths_B.shape[0], device=device) * capacity + lengths_B

    def advance(self) -> None:
        """One more token is in the cache: write and see one entry further."""
        self.reach += 1
        self._write_N += 1
        self._see_B += 1
        self._bias_B1QS.view(-1).index_fill_(0, self._see_B, 0.0)

    def __call__(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float) -> Tensor:
        batch, heads, new, size = query_BHTD.shape
        kv_heads = key_BKTD.shape[1]
        keys, values = self.block[layer].unbind(0)
        keys.view(-1, size).index_copy_(0, self._write_N, key_BKTD.reshape(-1, size))
        values.view(-1, size).index_copy_(0, self._write_N, value_BKTD.reshape(-1, size))
        # Query heads that share a key head become queries of that head: nothing is repeated but the bias of a prefill.
        queries = heads // kv_heads * new
        if new > 1 and self._bias_B1QS.shape[2] != queries:
            self._bias_B1QS = self._bias_B1QS.repeat(1, 1, heads // kv_heads, 1)
        out = scaled_dot_product_attention(
            query_BHTD.reshape(batch, kv_heads, queries, size),
            keys[self.rows, :, : self.reach],
            values[self.rows, :, : self.reach],
            attn_mask=self._bias_B1QS[..., : self.reach],
            scale=scaling,
        )
        return out.reshape(batch, heads, new, size).transpose(1, 2)

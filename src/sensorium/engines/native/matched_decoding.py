"""Prefill and decode steps of ``model.precision: matched``: the learner's own layers over pages, in tiles of queries.

row 0: pages 4 5 7, 150 entries, one new token     a tile of one query that sees entries 0-149 and itself
row 1: pages 4 5 8, nothing held, 130 new tokens   tiles of at most 8 queries (8 heads a key head): 0-7, 8-15, …
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sensorium.engines.native.decode_state import DecodeRows
from sensorium.engines.native.key_values import PAGE, PagedPrefill, PagePool, page_table, write_tokens
from sensorium.kernels.matched_ops import KeyStore, MatchedOps, QueryTiles, queries_of_tile
from sensorium.models.policy import Policy


class MatchedPrefill(PagedPrefill):
    """New tokens of some rows, as ``PagedPrefill``, in tiles."""

    def __init__(
        self,
        pool: PagePool,
        pages: Sequence[Sequence[int]],
        held: Sequence[int],
        new: Sequence[int],
        ops: MatchedOps,
    ) -> None:
        super().__init__(pool, pages, held, new)
        self._ops, self._held, self._new = ops, list(held), list(new)
        self._entries = _entries(page_table(pages, max(held) + max(new)), pool.block.shape[3]).to(pool.block.device)
        self._tiles: QueryTiles | None = None

    def __call__(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float) -> Tensor:
        """Attend; [B, T, H, D]."""
        self.store(layer, key_BKTD, value_BKTD)
        if self._tiles is None:
            self._tiles = self._cut(query_BHTD.shape[1], key_BKTD.shape[1])
        query_BTHD = query_BHTD.transpose(1, 2)
        out = self._ops.attend(query_BTHD.flatten(0, 1), _store(self._block[layer]), self._tiles, scaling)
        return out.view_as(query_BTHD)

    def _cut(self, heads: int, kv_heads: int) -> QueryTiles:
        width, reach, each = max(self._new), self._entries.shape[1], queries_of_tile(heads, kv_heads)
        tiles = [
            (row * width + start, min(each, new - start), row * reach, held + start)
            for row, (held, new) in enumerate(zip(self._held, self._new, strict=True))
            for start in range(0, new, each)
        ]
        first, count, base, place = torch.tensor(tiles).T.contiguous().to(self._entries.device).unbind()
        return QueryTiles(first, count, base, place, self._entries.flatten())


class MatchedStep:
    """A decode step through the layers that the learner runs."""

    name = "matched layers"

    def __init__(self, policy: Policy) -> None:
        assert policy.matched is not None
        self._policy, self._ops = policy, policy.matched

    def logits(self, rows: DecodeRows, pool: PagePool) -> Tensor:
        """The logits after every row's last token, whose keys and values are written."""
        positions_3B1 = rows.positions_B[None, :, None].expand(3, -1, 1)
        attention = _RowTiles(rows, pool, self._ops)
        hidden_B1H = self._policy.language(rows.tokens_B[:, None], positions_3B1, attention)
        return self._policy.logits(hidden_B1H[:, 0])


class _RowTiles:
    """One new token per row, each a tile of its own."""

    def __init__(self, rows: DecodeRows, pool: PagePool, ops: MatchedOps) -> None:
        self._pool, self._ops = pool, ops
        reach = rows.table_BP.shape[1] * PAGE
        place_B = rows.lengths_B.clamp(max=reach - 1)  # a row past its last page writes where nobody reads
        row_B = torch.arange(len(place_B), device=place_B.device)
        self._page_B = rows.table_BP.long().gather(1, (place_B // PAGE)[:, None])[:, 0]
        self._offset_B = place_B % PAGE
        entries_BS = _entries(rows.table_BP.long(), pool.block.shape[3])
        self._tiles = QueryTiles(row_B, torch.ones_like(row_B), row_B * reach, place_B, entries_BS.flatten())

    def __call__(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float) -> Tensor:
        block = self._pool.block[layer]
        for pages_NKPD, new_BKTD in zip(block.unbind(0), (key_BKTD, value_BKTD), strict=True):
            write_tokens(new_BKTD[:, :, 0], pages_NKPD, self._page_B, self._offset_B)
        return self._ops.attend(query_BHTD[:, :, 0], _store(block), self._tiles, scaling)[:, None]


def _entries(table_BP: Tensor, kv_heads: int) -> Tensor:
    """Where the entries of rows begin in their layer's keys, in units of the head size: [B, P · PAGE]."""
    return (table_BP[:, :, None] * (kv_heads * PAGE) + torch.arange(PAGE, device=table_BP.device)).flatten(1)


def _store(layer_block: Tensor) -> KeyStore:
    keys_NKPD, values_NKPD = layer_block.unbind(0)
    _, kv_heads, page, size = keys_NKPD.shape
    return KeyStore(keys_NKPD, values_NKPD, kv_heads, size, page * size)

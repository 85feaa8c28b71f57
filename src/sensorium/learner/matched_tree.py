"""Attention over trees for ``model.precision: matched``: every token's keys in the order in which the engine has them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sensorium.learner.tree_attention import TokenRun
from sensorium.learner.tree_levels import LevelAttention, Levels
from sensorium.models.attention import one_row
from sensorium.models.matched_ops import KeyStore, MatchedOps, QueryTiles, queries_of_tile, with_gradient_of


class MatchedTree(LevelAttention):
    """Attention of one flat row [1, T] that holds trees level by level: the gradients of ``LevelAttention``, other sums."""

    def __init__(self, levels: Levels, device: torch.device, ops: MatchedOps) -> None:
        super().__init__(levels, device)
        self._ops = ops
        self._tiles: QueryTiles | None = None

    def __call__(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float) -> Tensor:
        """Attend; [1, T, H, D]."""
        with torch.no_grad():
            query, key, value = (one_row(x).contiguous() for x in (query_BHTD, key_BKTD, value_BKTD))
            _, kv_heads, size = key.shape
            if self._tiles is None:
                each = queries_of_tile(query.shape[1], kv_heads)
                self._tiles = tiles_of([run for level in self._levels for run in level], each, self._device)
            exact = self._ops.attend(query, KeyStore(key, value, kv_heads, kv_heads * size, size), self._tiles, scaling)
        if not torch.is_grad_enabled():
            return exact[None]
        return with_gradient_of(exact[None], super().__call__(layer, query_BHTD, key_BKTD, value_BKTD, scaling))


def tiles_of(runs: Sequence[TokenRun], each: int, device: torch.device) -> QueryTiles:
    """Tiles of at most ``each`` queries; the context of a run is its ancestors' tokens and its own."""
    tiles: list[tuple[int, int, int, int]] = []
    contexts, base = [], 0
    for run in runs:
        context = np.concatenate([run.ancestors(), np.arange(run.start, run.start + run.length)])
        tiles += [
            (run.start + start, min(each, run.length - start), base, run.prefix + start)
            for start in range(0, run.length, each)
        ]
        contexts.append(context)
        base += len(context)
    first, count, at, place = torch.tensor(tiles).T.contiguous().to(device).unbind()
    return QueryTiles(first, count, at, place, torch.from_numpy(np.concatenate(contexts)).to(device))

"""One decode step over rows at fixed addresses: feed every row its last token, sample the next, advance.

Two ways that give the same. ``StockStep`` calls the decoder layers of transformers as they are. ``FusedStep`` calls their
linear layers and does what lies between with ``decode_ops`` or ``decode_kernels``: 10 to 14 launches a layer instead of 60.
Its residual stream is float32, as in the learner's fused layers.
Nothing in a step reads a tensor's value on the host, so it can be captured in a CUDA graph.
"""

import torch
from torch import Tensor

from sensorium.engines.native.decode_ops import TorchOps
from sensorium.engines.native.decode_state import DecodeRows
from sensorium.engines.native.pages import PagePool
from sensorium.models.layer_parts import GatedMLP, LayerParts, NormWeights, norm_of, parts_of
from sensorium.models.policy import Policy


class StockStep:
    """The step through the stock layers, attention by ``ops``."""

    name = "stock layers"

    def __init__(self, policy: Policy, ops: TorchOps) -> None:
        self._policy = policy
        self._ops = ops

    def logits(self, rows: DecodeRows, pool: PagePool) -> Tensor:
        """The logits after every row's last token, whose keys and values are written."""
        positions_3B1 = rows.positions_B[None, :, None].expand(3, -1, 1)
        attention = _RowAttention(rows, pool, self._ops)
        hidden_B1H = self._policy.language(rows.tokens_B[:, None], positions_3B1, attention, stock=True)
        return self._policy.adapter.head(hidden_B1H[:, 0])


class _RowAttention:
    """One new token per row, for stock layers, which rotate queries and keys themselves."""

    def __init__(self, rows: DecodeRows, pool: PagePool, ops: TorchOps) -> None:
        self._rows, self._pool, self._ops = rows, pool, ops

    def __call__(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float) -> Tensor:
        block = self._pool.block[layer]
        self._ops.write(key_BKTD[:, :, 0], value_BKTD[:, :, 0], self._rows, block)
        batch, heads, _, size = query_BHTD.shape
        out = self._ops.attend(query_BHTD[:, :, 0].contiguous(), self._rows, block, scaling)
        return out.view(batch, 1, heads, size)


class FusedStep:
    """The step through the linear layers of the stock modules. Refuses with ``UnknownLayer`` what it does not know."""

    name = "fused layers"

    def __init__(self, policy: Policy, ops: TorchOps) -> None:
        self._policy = policy
        self._ops = ops
        model = policy.adapter.language_model
        self._layers = [parts_of(layer) for layer in model.layers]
        self._last = norm_of(model.norm)
        ops.know(self._layers, self._last)

    def logits(self, rows: DecodeRows, pool: PagePool) -> Tensor:
        """The logits after every row's last token, whose keys and values are written."""
        policy, ops = self._policy, self._ops
        sum_BW, normed_BW, angles = ops.begin(policy, rows, self._layers[0].before)
        query = ops.project(self._layers[0], normed_BW, angles, rows, pool.block[0])
        for i, (layer, following) in enumerate(zip(self._layers, [*self._layers[1:], None], strict=True)):
            seen_BN = ops.attend(query, rows, pool.block[i], layer.scaling)
            if following is None:
                finished_BW = ops.finish(layer, self._last, seen_BN, sum_BW)
                if finished_BW is not None:
                    return policy.head_logits(finished_BW)
            else:
                passed = ops.pass_on(layer, following, seen_BN, sum_BW, angles, rows, pool.block[i + 1])
                if passed is not None:
                    query, sum_BW = passed
                    continue
            fine = torch.float16 if layer.fine else None
            normed_BW, sum_BW = ops.add_product(layer.out, seen_BN, sum_BW, layer.between, fine)
            normed_BW, sum_BW = self._inner(layer, normed_BW, sum_BW, self._last if following is None else following.before)
            if following is not None:
                query = ops.project(following, normed_BW, angles, rows, pool.block[i + 1])
        return policy.head_logits(normed_BW)

    def _inner(self, layer: LayerParts, x_BW: Tensor, sum_BW: Tensor, norm: NormWeights) -> tuple[Tensor, Tensor]:
        """A gated MLP in three products; anything else (experts) as the module it is. The next norm, and the sum."""
        inner, ops = layer.inner, self._ops
        if isinstance(inner, GatedMLP):
            return ops.add_product(inner.down, ops.gated(inner, x_BW), sum_BW, norm)
        return ops.add_norm(inner(x_BW[:, None])[:, 0], sum_BW, norm)

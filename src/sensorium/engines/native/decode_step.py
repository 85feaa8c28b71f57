"""One decode step over rows at fixed addresses: feed every row its last token, draw the next, move on.

Two ways that give the same. ``StockStep`` calls the decoder layers of transformers as they are. ``FusedStep`` calls their
linear layers and does what lies between with ``decode_ops`` or ``decode_kernels``: about 14 launches a layer instead of 60.
Nothing in a step reads a tensor's value on the host, so it can be captured in a CUDA graph.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from sensorium.engines.native.decode_ops import NormWeights, TorchOps
from sensorium.engines.native.decode_state import DecodeRows
from sensorium.engines.native.pages import PagePool
from sensorium.models.policy import Policy


class UnknownLayer(Exception):
    """A decoder layer is not built of the parts that a fused step knows; the message says which part."""


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
        hidden_B1H = self._policy.language(rows.tokens_B[:, None], positions_3B1, attention)
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


@dataclass(frozen=True)
class _Layer:
    """The parts of a stock decoder layer that a fused step calls."""

    before: NormWeights
    query: nn.Module
    key: nn.Module
    value: nn.Module
    out: nn.Module
    norms: tuple[NormWeights, NormWeights] | None
    scaling: float
    between: NormWeights
    inner: Callable[[Tensor], Tensor]


class FusedStep:
    """The step through the linear layers of the stock modules. Refuses with ``UnknownLayer`` what it does not know."""

    name = "fused layers"

    def __init__(self, policy: Policy, ops: TorchOps) -> None:
        self._policy = policy
        self._ops = ops
        model = policy.adapter.language_model
        self._layers = [self._parts(layer) for layer in model.layers]
        self._last = _norm(model.norm)

    def logits(self, rows: DecodeRows, pool: PagePool) -> Tensor:
        """The logits after every row's last token, whose keys and values are written."""
        policy, ops = self._policy, self._ops
        sum_BW = policy.adapter.language_model.embed_tokens(rows.tokens_B)
        rotary = policy.adapter.rotary(sum_BW[:, None], rows.positions_B[None, :, None].expand(3, -1, 1))
        cos_BD, sin_BD = (part.reshape(sum_BW.shape[0], -1) for part in rotary)
        normed_BW = ops.norm(sum_BW, self._layers[0].before)
        after = [*(layer.before for layer in self._layers[1:]), self._last]
        for i, (layer, next_norm) in enumerate(zip(self._layers, after, strict=True)):
            block = pool.block[i]
            # key and value are small: they take no longer than the query does if they run beside it
            query_BN, key_BN, value_BN = ops.together(
                partial(layer.query, normed_BW), partial(layer.key, normed_BW), partial(layer.value, normed_BW)
            )
            query_BHD = ops.place(query_BN, key_BN, value_BN, (cos_BD, sin_BD), layer.norms, rows, block)
            seen_BW = layer.out(ops.attend(query_BHD, rows, block, layer.scaling))
            normed_BW, sum_BW = ops.add_norm(seen_BW, sum_BW, layer.between)
            normed_BW, sum_BW = ops.add_norm(layer.inner(normed_BW), sum_BW, next_norm)
        return policy.adapter.head(normed_BW)

    def _parts(self, layer: Any) -> _Layer:
        _expect(layer, {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}, set())
        attention = layer.self_attn
        _expect(attention, {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"})
        normed = hasattr(attention, "q_norm")
        return _Layer(
            before=_norm(layer.input_layernorm),
            query=attention.q_proj,
            key=attention.k_proj,
            value=attention.v_proj,
            out=attention.o_proj,
            norms=(_norm(attention.q_norm), _norm(attention.k_norm)) if normed else None,
            scaling=attention.scaling,
            between=_norm(layer.post_attention_layernorm),
            inner=self._inner(layer.mlp),
        )

    def _inner(self, mlp: Any) -> Callable[[Tensor], Tensor]:
        """A gated MLP in three products and a kernel; anything else (experts) as the module it is."""
        names = {name for name, _ in mlp.named_children()}
        if names == {"gate_proj", "up_proj", "down_proj", "act_fn"} and _is_silu(mlp.act_fn):
            ops = self._ops

            def gated(x_BW: Tensor) -> Tensor:
                gate_BF, up_BF = ops.together(partial(mlp.gate_proj, x_BW), partial(mlp.up_proj, x_BW))
                return mlp.down_proj(ops.gate(gate_BF, up_BF))

            return gated
        return lambda x_BW: mlp(x_BW[:, None])[:, 0]


def _expect(module: nn.Module, needed: set[str], allowed: set[str]) -> None:
    names = {name for name, _ in module.named_children()}
    if not needed <= names <= needed | allowed:
        raise UnknownLayer(f"{type(module).__name__} is made of {', '.join(sorted(names))}")


def _norm(module: Any) -> NormWeights:
    if not hasattr(module, "variance_epsilon") or [name for name, _ in module.named_parameters()] != ["weight"]:
        raise UnknownLayer(f"{type(module).__name__} is no RMSNorm")
    return NormWeights(module.weight, module.variance_epsilon)


def _is_silu(function: Any) -> bool:
    """By its name, not by trying it."""
    return isinstance(function, nn.SiLU) or type(function).__name__ == "SiLUActivation"

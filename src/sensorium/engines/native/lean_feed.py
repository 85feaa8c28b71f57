"""``steps.feed`` in fewer operations, to be recorded on the CPU: the same bits.

A decode step of a small model is a few hundred operations on a few rows, so it costs what their calls cost. Stock layers
keep a token axis of length 1, compute the angles of every row at every step, and rotate queries and keys one by one:

    stock   q·cos + cat(-q₂, q₁)·sin, then the same of k               14 calls a layer
    here    x = cat(q, k);  x·cos + cat(x₂, x₁)·(-sin₁, sin₂)           5 calls a layer

Layers whose parts are not known are refused with ``UnknownLayer``; whoever records it compares it with ``feed``.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from sensorium.models.layer_parts import FIXED_ANGLES, GatedMLP, LayerParts, NormWeights, UnknownLayer, norm_of, parts_of
from sensorium.models.policy import Policy

TABLE_STEP = 512


class RotaryTable:
    """Cosines and sines of the first positions [P, 2D], as the family computes them from its buffers of the moment."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._made_of: list[tuple[int, int]] = []
        self._table_PE = torch.empty(0, 0)

    @torch.no_grad()
    def upto(self, position: int) -> Tensor:
        """A table that has this position."""
        model = self._policy.adapter.language_model
        if getattr(getattr(model, "rotary_emb", None), "rope_type", "") not in FIXED_ANGLES:
            raise UnknownLayer("its angles are not of the position alone")
        made_of = [(buffer.data_ptr(), buffer._version) for buffer in model.rotary_emb.buffers()]
        if made_of != self._made_of or len(self._table_PE) <= position:
            places_P = torch.arange(-(-(position + 1) // TABLE_STEP) * TABLE_STEP)
            given = model.embed_tokens.weight.new_empty(1, 1, 1)  # of which the family takes the kind of numbers
            cos_1PD, sin_1PD = self._policy.adapter.rotary(given, places_P[None, None].expand(3, 1, -1))
            first, second = sin_1PD[0].chunk(2, -1)
            self._table_PE = torch.cat((cos_1PD[0], -first, second), -1)
            self._made_of = made_of
        return self._table_PE


def lean_feed(
    policy: Policy,
    tokens_B: Tensor,
    positions_B: Tensor,
    block: Tensor,
    write_N: Tensor,
    bias_B11S: Tensor,
    table_PE: Tensor,
) -> Tensor:
    """Feed one token per row, its keys and values to the cache; the logits of the next."""
    model = policy.adapter.language_model
    if policy.dtype != torch.float32 or policy.sharding is not None:
        raise UnknownLayer("only whole float32 layers are computed in fewer operations")
    x_BW = model.embed_tokens(tokens_B)
    cos_B1D, sin_B1D = table_PE.index_select(0, positions_B)[:, None].chunk(2, -1)
    written = [half.unbind(0) for half in block.unbind(0)]
    seen = [half.unbind(0) for half in block[:, :, : tokens_B.shape[0], :, : bias_B11S.shape[-1]].unbind(0)]
    for i, layer in enumerate(model.layers):
        parts = parts_of(layer)
        if parts.index != i:
            raise UnknownLayer(f"layer {i} calls itself layer {parts.index}")
        query_BHD, key_BKD, value = _projected(parts, _norm(x_BW, parts.before), cos_B1D, sin_B1D)
        size = parts.head_dim
        heads, kv_heads = int(query_BHD.shape[1]), int(key_BKD.shape[1])
        written[i][0].view(-1, size).index_copy_(0, write_N, key_BKD.reshape(-1, size))
        written[i][1].view(-1, size).index_copy_(0, write_N, value.view(-1, size))
        # Query heads that share a key head are queries of that head.
        query = query_BHD.view(-1, kv_heads, heads // kv_heads, size)
        keys, values = seen[i]
        out = scaled_dot_product_attention(query, keys, values, attn_mask=bias_B11S, scale=parts.scaling)
        x_BW = x_BW + parts.out(out.reshape(-1, heads * size))
        x_BW = x_BW + _inner(parts.inner, _norm(x_BW, parts.between))
    return policy.logits(_norm(x_BW, norm_of(model.norm)))


def _projected(parts: LayerParts, normed_BW: Tensor, cos_B1D: Tensor, sin_B1D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of every row, the first two rotated; the first half of the sines has its sign turned."""
    size = parts.head_dim
    query, key, value = (layer(normed_BW) for layer in (parts.query, parts.key, parts.value))
    heads, kv_heads = (int(x.shape[-1]) // size for x in (query, key))
    query_BHD, key_BKD = query.view(-1, heads, size), key.view(-1, kv_heads, size)
    if parts.norms is not None:
        query_BHD, key_BKD = _norm(query_BHD, parts.norms[0]), _norm(key_BKD, parts.norms[1])
    both_BND = torch.cat((query_BHD, key_BKD), 1)
    both_BND = both_BND * cos_B1D + both_BND.roll(size // 2, -1) * sin_B1D
    query_BHD, key_BKD = both_BND.split((heads, kv_heads), 1)
    return query_BHD, key_BKD, value


def _norm(x: Tensor, norm: NormWeights) -> Tensor:
    return norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps))


def _inner(inner: GatedMLP | Callable[[Tensor], Tensor], normed_BW: Tensor) -> Tensor:
    if isinstance(inner, GatedMLP):
        return inner.down(silu(inner.gate(normed_BW)) * inner.up(normed_BW))
    return inner(normed_BW[:, None])[:, 0]

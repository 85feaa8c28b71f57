"""Attention as an object that the caller passes: one function in transformers' registry forwards every layer to it.

Axes: B rows, H query heads, K key and value heads, T tokens, D head size.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sensorium.models.delta_net import DeltaTokens, advance
from sensorium.models.family import IMPLEMENTATION
from sensorium.vocabulary.errors import ModelError


class Attention(Protocol):
    """The attention of one forward. Called once per layer, and again where a layer is recomputed: it must be repeatable.

    Keys and values come unrepeated and already rotated; the result is [B, T, H, D]. For models with gated delta nets it is
    a ``DeltaAttention`` as well (``models/delta_net.py``).
    """

    def __call__(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float) -> Tensor: ...


class MaskedAttention:
    """Attention among the tokens of one forward: causal, or by a boolean mask [B or 1, 1, T, T] (True: sees)."""

    def __init__(self, mask: Tensor | None = None) -> None:
        self.mask = mask

    def __call__(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float) -> Tensor:
        return masked_attention(query_BHTD, key_BKTD, value_BKTD, scaling, self.mask)

    def delta(self, net: Any, tokens: DeltaTokens) -> Tensor:
        """Delta nets read rows from their first token on. A mask that says anything else than "causal" is refused."""
        if self.mask is not None and not torch.equal(self.mask, torch.ones_like(self.mask).tril()):
            raise ModelError("a gated delta net has no mask: rows may only be causal, padded at their end.")
        return advance(net, tokens)[0]


def masked_attention(
    query_BHTD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, scaling: float, mask: Tensor | None, causal: bool = True
) -> Tensor:
    """Scaled dot-product attention with shared key heads, as [B, T, H, D]. Causal by default where there is no mask."""
    share = query_BHTD.shape[1] // key_BKSD.shape[1]
    if share > 1 and mask is not None and query_BHTD.is_cuda:
        return folded_attention(query_BHTD, key_BKSD, value_BKSD, scaling, mask)
    settings: dict[str, Any] = {"is_causal": causal and mask is None, "scale": scaling, "enable_gqa": share > 1}
    out_BHTD = scaled_dot_product_attention(query_BHTD, key_BKSD, value_BKSD, attn_mask=mask, **settings)
    return out_BHTD.transpose(1, 2)


def finer(x: Tensor) -> Tensor:
    """The input of attention without a gradient: bfloat16 as float16, which holds it exactly up to 65,504.

    The kernels round attention weights to the dtype of the values. With 11 bits instead of 8, engine and learner, which sum
    the weights in a different order, round their results to the same bfloat16 number far more often.
    """
    return x.half() if x.dtype == torch.bfloat16 else x


def one_row(x_1HTD: Tensor) -> Tensor:
    """The heads of a single row as [T, H, D]. Squeezed, not indexed: the gradient of an index is a full copy."""
    return x_1HTD.squeeze(0).transpose(0, 1)


def causal_attention(query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float) -> Tensor:
    """Causal attention as [B, T, H, D], without a gradient.

    In 16 bits on CUDA by flash attention, as in the learner: the same kernel gives the same bits on both sides.
    """
    size, length = query_BHTD.shape[-1], query_BHTD.shape[2]
    if not query_BHTD.is_cuda or query_BHTD.dtype == torch.float32 or size % 8 or size > 256 or length < 2:
        return masked_attention(query_BHTD, key_BKTD, value_BKTD, scaling, None)
    query, key, value = (finer(x.transpose(1, 2)) for x in (query_BHTD, key_BKTD, value_BKTD))
    out_BTHD: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, None, None, length, length, 0.0, True, False, scale=scaling
    )[0]
    return out_BTHD.to(query_BHTD.dtype)


def folded_attention(query_BHTD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, scaling: float, mask: Tensor) -> Tensor:
    """Masked attention with the query heads of a key head as further queries of it: no key is repeated.

    On CUDA a mask together with enable_gqa falls back to the kernel that writes out every attention weight.
    """
    batch, heads, new, size = query_BHTD.shape
    kv_heads = key_BKSD.shape[1]
    share = heads // kv_heads
    folded = query_BHTD.reshape(batch, kv_heads, share * new, size)
    out = scaled_dot_product_attention(folded, key_BKSD, value_BKSD, attn_mask=mask.repeat(1, 1, share, 1), scale=scaling)
    return out.reshape(batch, heads, new, size).transpose(1, 2)


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float = 1.0,
    sensorium_attention: Attention | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    if sensorium_attention is None:
        # A plain call of the stock model stays a plain call of the stock model.
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **rest)
    layer: int = module.layer_idx  # type: ignore[assignment]
    return sensorium_attention(layer, query, key, value, scaling), None


AttentionInterface.register(IMPLEMENTATION, _forward)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)

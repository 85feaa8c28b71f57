"""Attention of one segment of queries over one of keys by cuDNN: on Hopper in half of flash attention's time.

cuDNN makes a plan for every pair of sizes, which takes 38 ms forward and 45 backward on an H200: it is for sizes that come
again. No mask, or a causal one for gradients. Axes: Q queries, S keys, H query heads, K key heads, D.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


def block_attention(query_QHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """The result [Q, H, D] and its log-sum-exp [H, Q]."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *map(_batched, (query_QHD, key_SKD, value_SKD)), None, True, 0.0, False, False, scale=scaling
    )
    return out[0].transpose(0, 1).contiguous(), lse.reshape(query_QHD.shape[1], len(query_QHD))


def block_gradients(saved: Sequence[Tensor], given_QHD: Tensor, scaling: float, causal: bool = False) -> list[Tensor]:
    """Gradients of queries [Q, H, D], keys [S, K, D] and values, from these, a result and its log-sum-exp [H, Q].

    The log-sum-exp may be of more keys than these: then these are what a part of the result has seen.
    """
    *four, lse_HQ = saved
    query, key, value, out = map(_batched, four)
    none = _no_dropout(given_QHD.device)
    found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        _batched(given_QHD), query, key, value, out, lse_HQ[None, ..., None], none, none, None, None, None,
        query.shape[2], key.shape[2], 0.0, causal, scale=scaling,
    )  # fmt: skip
    return [gradient[0].transpose(0, 1) for gradient in found]


def _batched(x_NHD: Tensor) -> Tensor:
    """[1, H, N, D], not a copy."""
    return x_NHD.transpose(0, 1)[None]


@lru_cache(maxsize=16)
def _no_dropout(device: torch.device) -> Tensor:
    """The state of random numbers that a call without dropout takes and does not read."""
    return torch.zeros((), dtype=torch.int64, device=device)

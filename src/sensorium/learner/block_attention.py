"""Attention of one segment of queries over one of keys by cuDNN: on Hopper in half of flash attention's time.

cuDNN makes a plan for every pair of sizes, which takes 38 ms forward and 45 backward on an H200: it is for sizes that come
again. So that they do, queries are filled up with zeros to one of few ``sizes``: those neither give nor take a gradient.
No mask, or a causal one for gradients. Axes: Q queries, S keys, H query heads, K key heads, D.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad


def block_attention(
    query_QHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scaling: float, size: int
) -> tuple[Tensor, Tensor]:
    """The result [Q, H, D] and its log-sum-exp [H, Q], computed as ``size`` queries."""
    count = len(query_QHD)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *map(_batched, (_filled(query_QHD, size), key_SKD, value_SKD)), None, True, 0.0, False, False, scale=scaling
    )
    return out[0].transpose(0, 1)[:count].contiguous(), lse.reshape(-1, size)[:, :count]


def block_gradients(
    saved: Sequence[Tensor], given_QHD: Tensor, scaling: float, size: int, causal: bool = False
) -> list[Tensor]:
    """Gradients of queries [Q, H, D], keys [S, K, D] and values, from these, a result and its log-sum-exp [H, Q].

    The log-sum-exp may be of more keys than these: then these are what a part of the result has seen.
    """
    query_QHD, key_SKD, value_SKD, out_QHD, lse_HQ = saved
    count, none = len(given_QHD), _no_dropout(given_QHD.device)
    given, query, out = (_batched(_filled(x, size)) for x in (given_QHD, query_QHD, out_QHD))
    key, value, lse = _batched(key_SKD), _batched(value_SKD), pad(lse_HQ, (0, size - count))
    found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        given, query, key, value, out, lse[None, ..., None], none, none, None, None, None, size, key.shape[2], 0.0, causal,
        scale=scaling,
    )  # fmt: skip
    queries, keys, values = (gradient[0].transpose(0, 1) for gradient in found)
    return [queries[:count], keys, values]


def _filled(x_QHD: Tensor, size: int) -> Tensor:
    """With zeros for queries that are not there."""
    return x_QHD if len(x_QHD) == size else pad(x_QHD, (0, 0, 0, 0, 0, size - len(x_QHD)))


def _batched(x_NHD: Tensor) -> Tensor:
    """[1, H, N, D], not a copy."""
    return x_NHD.transpose(0, 1)[None]


@lru_cache(maxsize=16)
def _no_dropout(device: torch.device) -> Tensor:
    """The state of random numbers that a call without dropout takes and does not read."""
    return torch.zeros((), dtype=torch.int64, device=device)

"""What lies between the products of decoder layers and tower blocks, in plain torch: the reference of ``layer_triton``.

Each operation takes the roundings of the stock modules. Tensors are contiguous. Axes: N rows, W width, F inner size, H
query heads, K key heads, D head size, S slots (queries, keys, values).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

# What inner values of a fine MLP (``layer_ops.FINE_LAYERS``) are divided by: it makes room in float16 up to four million.
FINE_SCALE = 64.0
LARGEST_HALF = 65504.0  # the largest float16 number


class NormGradients(NamedTuple):
    """Gradients of a norm's input, the same in a narrower dtype, and of its weight; the norm's result where asked for.

    Where it was not, ``result`` is unspecified.
    """

    input: Tensor
    narrow: Tensor | None
    weight: Tensor
    result: Tensor


def normed(x: Tensor, weight_W: Tensor, eps: float, kind: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """The RMSNorm of rows, in ``kind`` or the weight's dtype, and its scales [N]."""
    return _norm(x, weight_W, eps, kind or weight_W.dtype)


def add_normed(
    x: Tensor, residual: Tensor, weight_W: Tensor, eps: float, kind: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The RMSNorm of a sum in ``kind`` or the weight's dtype, the sum in the residual's, the norm's scales."""
    summed = (residual + x).to(residual.dtype)
    out, scale_N = _norm(summed, weight_W, eps, kind or weight_W.dtype)
    return out, summed, scale_N


def _norm(x: Tensor, weight_W: Tensor, eps: float, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight_W * (wide * scale).to(x.dtype)).to(kind), scale.flatten()


def norm_gradients(
    x: Tensor,
    weight_W: Tensor,
    scale_N: Tensor,
    gradient: Tensor,
    more: Tensor | None,
    narrow: torch.dtype | None = None,
    again: torch.dtype | None = None,
) -> NormGradients:
    """Gradients of a norm's input and weight; ``more`` is added to the input's. ``again``: the norm's result too, in it."""
    scale = scale_N.view(*x.shape[:-1], 1)
    normed = x.float() * scale
    wide = gradient.float() * weight_W
    found = scale * (wide - normed * (wide * normed).mean(-1, keepdim=True))
    if more is not None:
        found = found + more
    rounded = normed.to(x.dtype)
    weight = (gradient.float() * rounded).flatten(0, -2).sum(0).to(weight_W.dtype)
    result = x if again is None else (weight_W * rounded).to(again)
    return NormGradients(found.to(x.dtype), None if narrow is None else found.to(narrow), weight, result)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    return silu(gate) * up


def gated_finely(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up of float32 tensors in float16, divided by ``FINE_SCALE``."""
    return (silu(gate) * up).div_(FINE_SCALE).clamp_(-LARGEST_HALF, LARGEST_HALF).half()


def gate_gradients(gate: Tensor, up: Tensor, gradient: Tensor, again: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate and up, and where asked for ``again`` what ``gated`` gives (else the last is unspecified)."""
    opened = silu(gate)
    gate_gradient = torch.ops.aten.silu_backward(gradient * up, gate)
    return gate_gradient, gradient * opened, opened * up if again else gate_gradient


def gated_pair(both: Tensor) -> Tensor:
    """silu(gate) · up of [N, 2 · F]."""
    gate, up = both.chunk(2, -1)
    return gated(gate, up)


def gate_pair_gradients(both: Tensor, given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of ``both`` where that of the inner values is given, its sum over rows, and the inner values again."""
    gate, up = both.chunk(2, -1)
    gate_gradient, up_gradient, inner = gate_gradients(gate, up, given, again=True)
    gradient = torch.cat((gate_gradient, up_gradient), -1)
    return gradient, column_sums(gradient), inner


def column_sums(x_NW: Tensor) -> Tensor:
    """Sums over rows in float32, rounded to their dtype: the gradient of a bias."""
    return x_NW.sum(0, dtype=torch.float32).to(x_NW.dtype)


def rotated(x_BTHD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, back: bool) -> Tensor:
    """Heads rotated by their token's angles, or a gradient of that ``back``."""
    cos, sin = cos_BTD[:, :, None], sin_BTD[:, :, None]
    return x_BTHD * cos + (_turned(x_BTHD * sin, back=True) if back else _turned(x_BTHD) * sin)


def split_rotated(joined_NW: Tensor, cos_ND: Tensor, sin_ND: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries [N, H, D], rotated keys [N, K, D], and values, of what one product gave side by side."""
    tokens, size = cos_ND.shape
    parts = joined_NW.view(tokens, -1, size)
    kv_heads = (parts.shape[1] - heads) // 2
    query, key, value = parts.split([heads, kv_heads, kv_heads], 1)
    cos, sin = cos_ND[:, None], sin_ND[:, None]
    return query * cos + _turned(query) * sin, key * cos + _turned(key) * sin, value.contiguous()


def joined_gradients(query: Tensor, key: Tensor, value: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> Tensor:
    """The gradient of what ``split_rotated`` split."""
    cos, sin = cos_ND[:, None], sin_ND[:, None]
    back = [x * cos + _turned(x * sin, back=True) for x in (query, key)]
    return torch.cat([*back, value], 1).flatten(1)


def rotate_into(x_NW: Tensor, out_NW: Tensor, cos_ND: Tensor, sin_ND: Tensor, slots: int, count: int, back: bool) -> None:
    """Rotate the first ``count`` of S slots of [N, S · H · D] in float32, rounded once; ``out_NW`` may be ``x_NW``."""
    rows, size = cos_ND.shape
    x, out = (each.view(rows, slots, -1, size) for each in (x_NW, out_NW))
    cos, sin = cos_ND[:, None, None], sin_ND[:, None, None]
    part = x[:, :count].float()
    turned = part * cos + (_turned(part * sin, back=True) if back else _turned(part) * sin)
    if out_NW is not x_NW:
        out.copy_(x)
    out[:, :count] = turned.to(out.dtype)


def _turned(x: Tensor, back: bool = False) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((second, -first) if back else (-second, first), -1)

"""Products of a decoder layer with what is cheap around them: norm before, gate between, residual after.

Autograd would keep every product's input for its weight's gradient. Here norms and gates are computed again in the backward
pass, from the residual stream and from gate and up, which takes two kernels and no product. Of Qwen2.5-VL-3B a layer keeps
61 kB a token instead of 91. Axes: N tokens, W width, F inner size; weights are [out, in].
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from sensorium.models.layer_kernels import (
    add_normed,
    column_sums,
    gate_gradients,
    gated,
    gated_finely,
    norm_gradients,
    normed,
)
from sensorium.models.layer_parts import FINE_SCALE
from sensorium.models.wide_products import wide_product


def is_plain(layer: nn.Module) -> bool:
    """Whether a linear layer is nothing but its weight and bias: adapters and hooks are not seen here."""
    return type(layer) is nn.Linear and not layer._forward_hooks and not layer._forward_pre_hooks


class NormedProducts(torch.autograd.Function):
    """(x, gain, eps, weight, bias, weight, bias, …) → linear layers of the norm of x, in order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain_W: Tensor, eps: float, *layers: Tensor | None) -> tuple[Tensor, ...]:
        x = x.contiguous()
        normed_NW, scale_N = normed(x, gain_W, eps)
        weights, biases = layers[::2], layers[1::2]
        ctx.eps = eps
        ctx.save_for_backward(x, gain_W, scale_N, *weights)
        ctx.biased = [bias is not None for bias in biases]
        return tuple(linear(normed_NW, weight, bias) for weight, bias in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, gain_W, scale_N, *weights = ctx.saved_tensors
        normed_NW = normed(x, gain_W, ctx.eps)[0].flatten(0, -2)
        flat = [gradient.flatten(0, -2) for gradient in gradients]
        inner_NW = _summed_products(flat, weights).view(x.shape)
        gradient, _, gain_gradient = norm_gradients(x, gain_W, scale_N, inner_NW, None)
        found: list[Tensor | None] = []
        for i, (part, biased) in enumerate(zip(flat, ctx.biased, strict=True)):
            found.append(part.T @ normed_NW if ctx.needs_input_grad[3 + 2 * i] else None)
            found.append(column_sums(part) if biased and ctx.needs_input_grad[4 + 2 * i] else None)
        return gradient, gain_gradient, None, *found


class GatedBlock(torch.autograd.Function):
    """(x, residual, gain, eps, gate, up, down, keep, fine) → s + down(silu(gate·n) · up·n), s = x + residual, n its norm.

    Unless ``keep``, the products with gate and up are computed again in the backward pass: of 69 kB a token 25 are kept.
    ``fine``: the values are computed from float16 activations (``LayerParts.fine``); gradients as without.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        gain_W: Tensor,
        eps: float,
        gate_FW: Tensor,
        up_FW: Tensor,
        down_WF: Tensor,
        keep: bool,
        fine: bool,
    ) -> Tensor:
        given = torch.float16 if fine else None
        normed_NW, summed_NW, scale_N = add_normed(x.contiguous(), residual.contiguous(), gain_W, eps, given)
        if fine:
            wide = [wide_product(normed_NW, weight.half()) for weight in (gate_FW, up_FW)]
            out = wide_product(gated_finely(*wide), down_WF.half()).mul_(FINE_SCALE)
            gate_NF, up_NF = ((part.to(gate_FW.dtype) if keep else part) for part in wide)
        else:
            gate_NF, up_NF = linear(normed_NW, gate_FW), linear(normed_NW, up_FW)
            out = wide_product(gated(gate_NF, up_NF), down_WF)
        ctx.eps, ctx.kinds = eps, (x.dtype, gate_FW.dtype)
        kept = (gate_NF, up_NF) if keep else (None, None)
        ctx.save_for_backward(summed_NW, gain_W, scale_N, *kept, gate_FW, up_FW, down_WF)
        return out.add_(summed_NW).to(summed_NW.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        summed_NW, gain_W, scale_N, gate_NF, up_NF, gate_FW, up_FW, down_WF = ctx.saved_tensors
        outer, (kind, inner_kind) = gradients[0].contiguous(), ctx.kinds
        again_NW = normed(summed_NW, gain_W, ctx.eps)[0]
        if gate_NF is None:
            gate_NF, up_NF = linear(again_NW, gate_FW), linear(again_NW, up_FW)
        narrow_NW = outer.to(inner_kind).flatten(0, -2)
        given_NF = (narrow_NW @ down_WF).view_as(gate_NF)
        gate_gradient, up_gradient, gated_NF = gate_gradients(gate_NF, up_NF, given_NF, ctx.needs_input_grad[6])
        down_gradient = narrow_NW.T @ gated_NF.flatten(0, -2) if ctx.needs_input_grad[6] else None
        flat = [gate_gradient.flatten(0, -2), up_gradient.flatten(0, -2)]
        inner_NW = _summed_products(flat, (gate_FW, up_FW)).view(summed_NW.shape)
        other = None if kind == summed_NW.dtype else kind
        wide, narrow, gain_gradient = norm_gradients(summed_NW, gain_W, scale_N, inner_NW, outer, narrow=other)
        normed_NW = again_NW.flatten(0, -2)
        weights = [part.T @ normed_NW if ctx.needs_input_grad[4 + i] else None for i, part in enumerate(flat)]
        return wide if narrow is None else narrow, wide, gain_gradient, None, *weights, down_gradient, None, None


def _summed_products(gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The gradient of what several linear layers were given."""
    summed = gradients[0] @ weights[0]
    for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
        summed = torch.addmm(summed, gradient, weight)
    return summed

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

from sensorium.models.layer_ops import ops_of
from sensorium.models.layer_parts import FINE_SCALE
from sensorium.models.wide_products import wide_product


def is_plain(layer: nn.Module) -> bool:
    """Whether a linear layer is nothing but its weight and bias: adapters and hooks are not seen here."""
    return type(layer) is nn.Linear and not layer._forward_hooks and not layer._forward_pre_hooks


class NormedProducts(torch.autograd.Function):
    """(x, gain, eps, weight, bias, weight, bias, …) → linear layers of the norm of x, in order, and x itself.

    Who goes on with x takes it from here: then its gradient is added to the norm's in the norm's kernel.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain_W: Tensor, eps: float, *layers: Tensor | None) -> tuple[Tensor, ...]:
        x = x.contiguous()
        normed_NW, scale_N = ops_of(x).normed(x, gain_W, eps)
        weights, biases = layers[::2], layers[1::2]
        ctx.save_for_backward(x, gain_W, scale_N, *weights)
        ctx.biased = [bias is not None for bias in biases]
        found = (linear(normed_NW, weight, bias) for weight, bias in zip(weights, biases, strict=True))  # type: ignore[arg-type]
        return *found, x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, gain_W, scale_N, *weights = ctx.saved_tensors
        *several, more = gradients
        flat = [gradient.flatten(0, -2) for gradient in several]
        inner_NW, ops = _summed_products(flat, weights).view(x.shape), ops_of(x)
        norm = ops.norm_gradients(x, gain_W, scale_N, inner_NW, more, again=True)
        normed_NW = norm.result.flatten(0, -2)
        found: list[Tensor | None] = []
        for i, (part, biased) in enumerate(zip(flat, ctx.biased, strict=True)):
            found.append(part.T @ normed_NW if ctx.needs_input_grad[3 + 2 * i] else None)
            found.append(ops.column_sums(part) if biased and ctx.needs_input_grad[4 + 2 * i] else None)
        return norm.input, norm.weight, None, *found


class RotatedProducts(torch.autograd.Function):
    """(x, gain, eps, cos, sin, three weights, three biases) → queries, keys, values of the norm of x, and x itself.

    Queries and keys are rotated. The three are one product, forward and backward. Biases are None, or all are there. As of
    ``NormedProducts``, who goes on with x takes it from here.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain_W: Tensor, eps: float, cos_BTD: Tensor, sin_BTD: Tensor, *layers: Tensor | None
    ) -> tuple[Tensor, ...]:
        x = x.contiguous()
        weights, biases, ops = [weight for weight in layers[:3] if weight is not None], layers[3:], ops_of(x)
        normed_NW, scale_N = ops.normed(x, gain_W, eps)
        together, bias = torch.cat(weights), None if biases[0] is None else torch.cat(biases)  # type: ignore[arg-type]
        cos_ND, sin_ND = (each.contiguous().flatten(0, -2) for each in (cos_BTD, sin_BTD))
        heads = len(weights[0]) // cos_ND.shape[1]
        three = ops.split_rotated(linear(normed_NW, together, bias).flatten(0, -2), cos_ND, sin_ND, heads)
        ctx.save_for_backward(x, gain_W, scale_N, together, cos_ND, sin_ND)
        ctx.sizes = [len(weight) for weight in weights]
        return *(part.unflatten(0, x.shape[:-1]) for part in three), x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, gain_W, scale_N, together, *angles = ctx.saved_tensors
        *three, more = gradients
        ops = ops_of(x)
        joined = ops.joined_gradients(*(part.contiguous().flatten(0, -3) for part in three), *angles)
        norm = ops.norm_gradients(x, gain_W, scale_N, (joined @ together).view(x.shape), more, again=True)
        weights: Sequence[Tensor | None] = (None, None, None)
        biases: Sequence[Tensor | None] = (None, None, None)
        if any(ctx.needs_input_grad[5:8]):
            weights = (joined.T @ norm.result.flatten(0, -2)).split(ctx.sizes)
        if any(ctx.needs_input_grad[8:]):
            biases = ops.column_sums(joined).split(ctx.sizes)
        return norm.input, norm.weight, None, None, None, *weights, *biases


class GatedBlock(torch.autograd.Function):
    """(x, out, residual, gain, eps, gate, up, down, keep, fine) → s + down(silu(gate·n) · up·n), n = norm of s.

    s = residual + out·x; where ``out`` is None, residual + x. Unless ``keep``, the products with gate and up are computed
    again in the backward pass: of 69 kB a token 25 are kept. ``fine``: the values are computed from float16 activations
    (``LayerParts.fine``); gradients as without.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        out_WA: Tensor | None,
        residual: Tensor,
        gain_W: Tensor,
        eps: float,
        gate_FW: Tensor,
        up_FW: Tensor,
        down_WF: Tensor,
        keep: bool,
        fine: bool,
    ) -> Tensor:
        given, ops = torch.float16 if fine else None, ops_of(x)
        seen = x.contiguous() if out_WA is None else wide_product(x, out_WA)
        normed_NW, summed_NW, scale_N = ops.add_normed(seen, residual.contiguous(), gain_W, eps, given)
        if fine:
            wide = [wide_product(normed_NW, weight.half()) for weight in (gate_FW, up_FW)]
            result = wide_product(ops.gated_finely(*wide), down_WF.half()).mul_(FINE_SCALE)
            gate_NF, up_NF = ((part.to(gate_FW.dtype) if keep else part) for part in wide)
        else:
            gate_NF, up_NF = linear(normed_NW, gate_FW), linear(normed_NW, up_FW)
            result = wide_product(ops.gated(gate_NF, up_NF), down_WF)
        ctx.eps, ctx.kinds = eps, (x.dtype, gate_FW.dtype)
        kept = (gate_NF, up_NF) if keep else (None, None)
        attended = (None, None) if out_WA is None else (x, out_WA)
        ctx.save_for_backward(*attended, summed_NW, gain_W, scale_N, *kept, gate_FW, up_FW, down_WF)
        return result.add_(summed_NW).to(summed_NW.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, out_WA, summed_NW, gain_W, scale_N, gate_NF, up_NF, gate_FW, up_FW, down_WF = ctx.saved_tensors
        outer, (kind, inner_kind), ops = gradients[0].contiguous(), ctx.kinds, ops_of(summed_NW)
        if gate_NF is None:
            again_NW = ops.normed(summed_NW, gain_W, ctx.eps)[0]
            gate_NF, up_NF = linear(again_NW, gate_FW), linear(again_NW, up_FW)
        narrow_NW = outer.to(inner_kind).flatten(0, -2)
        given_NF = (narrow_NW @ down_WF).view_as(gate_NF)
        gate_gradient, up_gradient, gated_NF = ops.gate_gradients(gate_NF, up_NF, given_NF, ctx.needs_input_grad[7])
        down_gradient = narrow_NW.T @ gated_NF.flatten(0, -2) if ctx.needs_input_grad[7] else None
        flat = [gate_gradient.flatten(0, -2), up_gradient.flatten(0, -2)]
        inner_NW = _summed_products(flat, (gate_FW, up_FW)).view(summed_NW.shape)
        other = None if kind == summed_NW.dtype else kind
        norm = ops.norm_gradients(summed_NW, gain_W, scale_N, inner_NW, outer, narrow=other, again=True)
        normed_NW = norm.result.flatten(0, -2)
        weights = [part.T @ normed_NW if ctx.needs_input_grad[5 + i] else None for i, part in enumerate(flat)]
        seen, out_gradient = norm.input if norm.narrow is None else norm.narrow, None
        if out_WA is not None:
            if ctx.needs_input_grad[1]:
                out_gradient = seen.flatten(0, -2).T @ x.flatten(0, -2)
            seen = seen @ out_WA
        return seen, out_gradient, norm.input, norm.weight, None, *weights, down_gradient, None, None


def _summed_products(gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The gradient of what several linear layers were given."""
    summed = gradients[0] @ weights[0]
    for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
        summed = torch.addmm(summed, gradient, weight)
    return summed

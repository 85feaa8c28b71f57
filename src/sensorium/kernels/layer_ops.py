"""Autograd functions of what lies between the products of decoder layers and tower blocks, over ``layer_triton`` on CUDA.

Axes: N rows, W width, F inner size, H query heads, D head size.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sensorium.kernels import layer_torch

interpreted = False
"""Whether a CPU runs the Triton kernels, in Triton's interpreter: for tests."""


def ops_of(x: Tensor) -> Any:
    """The module with the operations for a tensor's device: Triton kernels on CUDA, plain torch elsewhere."""
    if x.is_cuda or interpreted:
        from sensorium.kernels import layer_triton

        return layer_triton
    return layer_torch


# The stock modules keep float32 copies of what they normalise, and take five to fifteen operations for each of these.


class Norm(torch.autograd.Function):
    """(x, weight, eps) → RMSNorm over the last axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_W: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out, scale_N = ops_of(x).normed(x, weight_W, eps)
        ctx.save_for_backward(x, weight_W, scale_N)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_W, scale_N = ctx.saved_tensors
        found = ops_of(x).norm_gradients(x, weight_W, scale_N, gradients[0], None)
        return found.input, found.weight, None


class AddNorm(torch.autograd.Function):
    """(x, residual, weight, eps) → RMSNorm of their sum, and the sum in the residual's kind."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight_W: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out, summed, scale_N = ops_of(x).add_normed(x.contiguous(), residual.contiguous(), weight_W, eps)
        ctx.save_for_backward(summed, weight_W, scale_N)
        ctx.kind = x.dtype
        return out, summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        summed, weight_W, scale_N = ctx.saved_tensors
        kind = None if ctx.kind == summed.dtype else ctx.kind
        found = ops_of(summed).norm_gradients(summed, weight_W, scale_N, gradients[0], gradients[1], narrow=kind)
        return found.input if found.narrow is None else found.narrow, found.input, found.weight, None


class Rotate(torch.autograd.Function):
    """(x [B, T, H, D], cos [B, T, D], sin) → x rotated."""

    @staticmethod
    def forward(ctx: Any, x_BTHD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BTD, sin_BTD)
        return ops_of(x_BTHD).rotated(x_BTHD, cos_BTD, sin_BTD, back=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos_BTD, sin_BTD = ctx.saved_tensors
        return ops_of(cos_BTD).rotated(gradients[0], cos_BTD, sin_BTD, back=True), None, None


class RotateSlots(torch.autograd.Function):
    """(x [N, S · H · D], cos [N, D], sin, S, count) → x with its first ``count`` of S slots rotated, in place."""

    @staticmethod
    def forward(ctx: Any, x_NW: Tensor, cos_ND: Tensor, sin_ND: Tensor, slots: int, count: int) -> Tensor:
        cos_ND, sin_ND = cos_ND.contiguous(), sin_ND.contiguous()
        ctx.save_for_backward(cos_ND, sin_ND)
        ctx.slots, ctx.count = slots, count
        ctx.mark_dirty(x_NW)
        ops_of(x_NW).rotate_into(x_NW, x_NW, cos_ND, sin_ND, slots, count, back=False)
        return x_NW

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos_ND, sin_ND = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        out_NW = torch.empty_like(gradient)
        ops_of(gradient).rotate_into(gradient, out_NW, cos_ND, sin_ND, ctx.slots, ctx.count, back=True)
        return out_NW, None, None, None, None


class Gate(torch.autograd.Function):
    """(gate, up) → silu(gate) · up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return ops_of(gate).gated(gate, up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return ops_of(gate).gate_gradients(gate, up, gradients[0].contiguous())[:2]


def wide_product(x: Tensor, weight_NK: Tensor) -> Tensor:
    """x · weightᵀ in float32."""
    if not x.is_cuda or x.dtype == torch.float32:
        return (x @ weight_NK.T).float()
    return torch.mm(x.flatten(0, -2), weight_NK.T, out_dtype=torch.float32).unflatten(0, x.shape[:-1])


class WideLinear(torch.autograd.Function):
    """(x, weight) → their product in float32; gradients are of the inputs' kind."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_NK)
        return wide_product(x, weight_NK)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight_NK = ctx.saved_tensors
        gradient = gradients[0].to(x.dtype)
        inner = gradient @ weight_NK if ctx.needs_input_grad[0] else None
        weight = gradient.flatten(0, -2).T @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return inner, weight


def wide_linear(layer: nn.Module, x: Tensor) -> Tensor:
    """What a linear layer gives, in float32 where it is a plain one; any other as it is."""
    if type(layer) is not nn.Linear or layer._forward_hooks or layer._forward_pre_hooks:
        return layer(x)
    wide: Tensor = WideLinear.apply(x, layer.weight)
    return wide if layer.bias is None else wide + layer.bias

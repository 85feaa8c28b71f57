"""Norm, rotation and gate of a decoder layer with gradients: nothing is kept twice.

The stock modules keep float32 copies of what they normalise, and take five to fifteen operations for each of these.
"""

from typing import Any

import torch
from torch import Tensor

from sensorium.models.layer_ops import ops_of


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

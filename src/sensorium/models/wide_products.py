"""Products of bfloat16 tensors whose results stay float32, as the tensor cores have them: one rounding less."""

from typing import Any

import torch
from torch import Tensor, nn


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

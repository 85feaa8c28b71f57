"""Autograd functions of what lies between the products of decoder layers and tower blocks, over ``layer_triton`` on CUDA.

Axes: N rows, W width, F inner size, H query heads, D head size.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from sensorium.kernels import layer_torch
from sensorium.kernels.layer_torch import column_sums

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


# A linear layer's part in an autograd function: weight, bias, and of merged adapters A and the scaled B (else None).
Factors = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


class AdaptedLinear(nn.Linear):
    """A layer with low-rank adapters as one product: ``weight`` is base + scale · B · A in the base's dtype.

    It stands beside peft's module, whose A and B learn: what would be the weight's gradient goes on to them. ``settle``
    makes the weight anew after A, B or the base changed.
    """

    @torch.inference_mode(False)
    def __init__(self, adapted: Any, name: str) -> None:
        nn.Module.__init__(self)
        base = adapted.base_layer
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight = nn.Parameter(torch.empty_like(base.weight), requires_grad=False)
        self.bias = base.bias
        self._adapted = (adapted, name)  # in a tuple: it is no module of this one
        self._made: tuple[object, ...] = ()
        self.settle()

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, float]:
        """The base's weight, A, B and the scale."""
        adapted, name = self._adapted
        return adapted.base_layer.weight, adapted.lora_A[name].weight, adapted.lora_B[name].weight, adapted.scaling[name]

    @torch.inference_mode(False)
    @torch.no_grad()
    def settle(self) -> None:
        """Make the weight of what A, B and the base are now."""
        base_OI, a_RI, b_OR, scale = self.parts
        off = self._adapted[0].disable_adapters
        made = (off, *(known for part in (base_OI, a_RI, b_OR) for known in (part.data_ptr(), part._version)))
        if made != self._made:
            self.weight.copy_(base_OI if off else summed(base_OI, a_RI, b_OR, scale))
            self._made = made

    def factors(self) -> Factors:
        """Weight and bias, and A and the scaled B, where their gradients may be asked for."""
        _, a_RI, b_OR, scale = self.parts
        if self._adapted[0].disable_adapters or not torch.is_grad_enabled():
            return self.weight, self.bias, None, None
        return self.weight, self.bias, a_RI.to(self.weight.dtype), (b_OR * scale).to(self.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Product.apply(x, *self.factors(), False)
        return result


def summed(base_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    """base + scale · B · A in the base's dtype.

    In bfloat16 it is rounded up or down by a threshold of its place, uniform over places: rounded to nearest, a change
    below half a unit of the last place would be lost in every weight, and adapters would not learn until they are large.
    """
    wide_OI = torch.addmm(base_OI.float(), b_OR.float(), a_RI.float(), alpha=scale)
    if base_OI.dtype != torch.bfloat16:
        return wide_OI.to(base_OI.dtype)
    row_O, column_I = (_thresholds(count, base_OI.device) for count in base_OI.shape)
    bits_OI = wide_OI.view(torch.int32)
    bits_OI += (row_O[:, None] + column_I) & 0xFFFF  # a number that bfloat16 has keeps its upper half
    return (bits_OI >> 16).to(torch.int16).view(torch.bfloat16)


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def _thresholds(count: int, device: torch.device) -> Tensor:
    drawn = torch.randint(0, 1 << 16, (count,), generator=torch.Generator().manual_seed(count), dtype=torch.int32)
    return drawn.to(device)


def factors_of(layer: Any) -> Factors:
    """The factors of a linear layer, with merged adapters or plain."""
    return layer.factors() if isinstance(layer, AdaptedLinear) else (layer.weight, layer.bias, None, None)


def factor_gradients(
    needed: Sequence[bool], gradient_NO: Tensor, x_NI: Tensor, a_RI: Tensor | None, b_OR: Tensor | None
) -> list[Tensor | None]:
    """The gradients of a layer's factors, where they are needed: of what it gave, [N, O], and of what it was given."""
    return [
        gradient_NO.T @ x_NI if needed[0] else None,
        column_sums(gradient_NO) if needed[1] else None,
        (gradient_NO @ b_OR).T @ x_NI if needed[2] and b_OR is not None else None,
        gradient_NO.T @ (x_NI @ a_RI.T) if needed[3] and a_RI is not None else None,
    ]


class Product(torch.autograd.Function):
    """(x, weight, bias, a, b, wide) → x · weightᵀ + bias; ``wide``: in float32, gradients are of the inputs' kind."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None, wide: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        if not wide:
            return linear(x, weight, bias)
        result = wide_product(x, weight)
        return result if bias is None else result + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        gradient = gradients[0].to(x.dtype)
        inner = gradient @ weight if ctx.needs_input_grad[0] else None
        learned = factor_gradients(ctx.needs_input_grad[1:5], gradient.flatten(0, -2), x.flatten(0, -2), a, b)
        return inner, *learned, None


def is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a linear layer is one product of its weight and bias, without hooks; adapters may be merged into it."""
    return type(layer) in (nn.Linear, AdaptedLinear) and not layer._forward_hooks and not layer._forward_pre_hooks


def wide_linear(layer: nn.Module, x: Tensor) -> Tensor:
    """What a linear layer gives, in float32 where it is one product; any other as it is."""
    result: Tensor = Product.apply(x, *factors_of(layer), True) if is_plain(layer) else layer(x)
    return result

"""FP8 (e4m3) numbers with scales, in plain torch: the reference of ``fp8_triton``.

A row of activations [3.5 -7.0 0.1] has the scale 7 / 448 and the values [224 -448 6.5]: 6.4 has no place in e4m3, whose
numbers have three bits behind the first. A weight has one scale: e4m3 has an exponent, so numbers down to a 28,000th of
the largest keep their bits. A product of values is scaled by both afterwards, where it is read.

Axes: B rows, K inner size, N outputs, F inner size of an MLP, W hidden size.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0
LEAST_LARGEST = 1e-12  # smaller numbers are scaled as if this were the largest of them: zeros have a scale


@dataclass(frozen=True)
class Fp8Rows:
    """Rows in FP8, contiguous, and a float32 scale of each."""

    values_BK: Tensor
    scales_B: Tensor

    @staticmethod
    def empty(rows: int, width: int, device: torch.device) -> "Fp8Rows":
        """Rows without values."""
        scales_B = torch.empty(rows, dtype=torch.float32, device=device)
        return Fp8Rows(torch.empty(rows, width, dtype=FP8, device=device), scales_B)

    @property
    def wide_BK(self) -> Tensor:
        """The numbers that the values stand for, in float32."""
        return self.values_BK.float() * self.scales_B[:, None]


@dataclass(frozen=True)
class Fp8Matrix:
    """A weight in FP8, contiguous, and its float32 scale, a tensor without axes."""

    values_NK: Tensor
    scale: Tensor

    @staticmethod
    def empty(outputs: int, inner: int, device: torch.device) -> "Fp8Matrix":
        """A weight without values."""
        scale = torch.empty((), dtype=torch.float32, device=device)
        return Fp8Matrix(torch.empty(outputs, inner, dtype=FP8, device=device), scale)

    @property
    def wide_NK(self) -> Tensor:
        """The numbers that the values stand for, in float32."""
        return self.values_NK.float() * self.scale


def quantise(x_BK: Tensor) -> Fp8Rows:
    """Rows rounded to nearest. A row with a number that is not finite has no other afterwards."""
    wide_BK = x_BK.float()
    scales_B = wide_BK.abs().amax(1).clamp(min=LEAST_LARGEST) / LARGEST_FP8
    return Fp8Rows((wide_BK * (1.0 / scales_B)[:, None]).to(FP8), scales_B)


def quantise_weights(weights: tuple[Tensor, ...], out: Fp8Matrix) -> None:
    """Weights one below the other with one scale, into memory that is there."""
    largest = torch.stack([extreme.abs() for weight in weights for extreme in torch.aminmax(weight)]).max().float()
    out.scale.copy_(largest.clamp(min=LEAST_LARGEST) / LARGEST_FP8)
    begin = 0
    for weight in weights:
        out.values_NK[begin : begin + len(weight)].copy_(weight.float().mul_(1.0 / out.scale))
        begin += len(weight)


def product(x_BK: Fp8Rows, weight_NK: Fp8Matrix) -> Tensor:
    """x · weightᵀ of the values, without scales, in float32."""
    return x_BK.values_BK.float() @ weight_NK.values_NK.float().T


def library_product(x_BK: Fp8Rows, weight_NK: Fp8Matrix) -> Tensor:
    """The same by the GPU's library, in bfloat16."""
    multiply: Any = torch._scaled_mm
    one = _one(weight_NK.scale.device)
    found: Tensor = multiply(
        x_BK.values_BK, weight_NK.values_NK.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return found


@cache
def _one(device: torch.device) -> Tensor:
    """A scale that changes nothing, at a fixed address: a CUDA graph does not fill it at every step."""
    return torch.ones((), device=device)


def gated_rows(both_BN: Tensor, scales_B: Tensor, scale: Tensor) -> Fp8Rows:
    """silu(gate) · up of rows that hold gates, then ups, which ``scales_B`` and ``scale`` scale."""
    gate_BF, up_BF = (both_BN.float() * (scales_B * scale)[:, None]).chunk(2, 1)
    return quantise(silu(gate_BF) * up_BF)


def normed(sum_BW: Tensor, weight_W: Tensor, eps: float) -> Tensor:
    """The RMSNorm of rows, in float32."""
    wide_BW = sum_BW.float()
    return wide_BW * torch.rsqrt(wide_BW.square().mean(-1, keepdim=True) + eps) * weight_W.float()

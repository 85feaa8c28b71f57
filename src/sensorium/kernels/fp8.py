"""FP8 (e4m3) numbers with scales, in plain torch: the reference of ``fp8_triton``.

A row of activations [3.5 -7.0 0.1] has the scale 7 / 448 and the values [224 -448 6.5]: 6.4 has no place in e4m3, whose
numbers have three bits behind the first. Each output of a weight is such a row, too, so a product is scaled by both.

Axes: B rows, K inner size, N outputs, G groups of a row that have a scale each, F inner size of an MLP.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0
LEAST_LARGEST = 1e-12  # a row of smaller numbers is scaled as if this were its largest: zeros have a scale


@dataclass(frozen=True)
class Fp8Rows:
    """Rows in FP8, contiguous, and the float32 scale of each of G equal groups of a row."""

    values_BK: Tensor
    scales_BG: Tensor

    @staticmethod
    def empty(rows: int, width: int, device: torch.device, groups: int = 1) -> "Fp8Rows":
        """Rows without values."""
        scales_BG = torch.empty(rows, groups, dtype=torch.float32, device=device)
        return Fp8Rows(torch.empty(rows, width, dtype=FP8, device=device), scales_BG)

    @property
    def wide_BK(self) -> Tensor:
        """The numbers that the values stand for, in float32."""
        groups = self.scales_BG.shape[1]
        return (self.values_BK.float().unflatten(1, (groups, -1)) * self.scales_BG[:, :, None]).flatten(1)

    def slice(self, begin: int, end: int) -> "Fp8Rows":
        """Some of the rows, in the same memory."""
        return Fp8Rows(self.values_BK[begin:end], self.scales_BG[begin:end])


def quantise(x_BK: Tensor, groups: int = 1) -> Fp8Rows:
    """Rows rounded to nearest. A group with a number that is not finite has a scale that is none."""
    wide_BGJ = x_BK.float().unflatten(1, (groups, -1))
    scales_BG1 = wide_BGJ.abs().amax(-1, keepdim=True).clamp(min=LEAST_LARGEST) / LARGEST_FP8
    scales_BG1 = scales_BG1 + (wide_BGJ * 0.0).sum(-1, keepdim=True)
    values_BGJ = (wide_BGJ * (1.0 / scales_BG1)).clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8)
    return Fp8Rows(values_BGJ.flatten(1), scales_BG1[:, :, 0])


def quantise_into(x_BK: Tensor, out: Fp8Rows) -> None:
    """Rows with one scale each, into memory that is there."""
    found = quantise(x_BK)
    out.values_BK.copy_(found.values_BK)
    out.scales_BG.copy_(found.scales_BG)


def product(x_BK: Fp8Rows | Tensor, weight_NK: Fp8Rows) -> Tensor:
    """x · weightᵀ in float32."""
    return (x_BK if isinstance(x_BK, Tensor) else x_BK.wide_BK).float() @ weight_NK.wide_BK.T


def gated_product(x_BK: Fp8Rows, both_NK: Fp8Rows, groups: int) -> Fp8Rows:
    """silu(x · gateᵀ) · (x · upᵀ), where gates stand before ups in ``both_NK``."""
    gate_BF, up_BF = product(x_BK, both_NK).chunk(2, 1)
    return quantise(silu(gate_BF) * up_BF, groups)


def normed(sum_BW: Tensor, weight_W: Tensor, eps: float) -> Tensor:
    """The RMSNorm of rows, in float32."""
    wide_BW = sum_BW.float()
    return wide_BW * torch.rsqrt(wide_BW.square().mean(-1, keepdim=True) + eps) * weight_W.float()


def scaled_product(x_BK: Fp8Rows, weight_NK: Fp8Rows) -> Tensor:
    """The library's product in bfloat16, of rows with one scale each."""
    multiply: Any = torch._scaled_mm
    found: Tensor = multiply(
        x_BK.values_BK, weight_NK.values_BK.T, scale_a=x_BK.scales_BG, scale_b=weight_NK.scales_BG.T,
        out_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip
    return found

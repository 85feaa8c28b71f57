"""What lies between the products of a decoder layer, as few passes over memory: kernels for CUDA (``layer_kernels``).

Axes: N rows, W width, F inner size, H query heads, D head size.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

interpreted = False
"""Whether a CPU takes the kernels too, in Triton's interpreter: for tests. Otherwise its layers are the stock ones."""


class NormGradients(NamedTuple):
    """Gradients of a norm's input, the same in a narrower kind, and of its weight; the norm's result where asked for.

    Where it was not, ``result`` is unspecified.
    """

    input: Tensor
    narrow: Tensor | None
    weight: Tensor
    result: Tensor


class LayerOps(Protocol):
    """The operations. Tensors are contiguous unless said otherwise; products are the caller's."""

    def normed(self, x: Tensor, weight_W: Tensor, eps: float, /) -> tuple[Tensor, Tensor]:
        """The RMSNorm of rows, in the weight's kind, and its scales [N]."""

    def add_normed(
        self, x: Tensor, residual: Tensor, weight_W: Tensor, eps: float, kind: torch.dtype | None = None, /
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The RMSNorm of a sum in ``kind`` or the weight's, the sum in the residual's, the norm's scales."""

    def norm_gradients(
        self,
        x: Tensor,
        weight_W: Tensor,
        scale_N: Tensor,
        gradient: Tensor,
        more: Tensor | None,
        narrow: torch.dtype | None = None,
        again: bool = False,
    ) -> NormGradients:
        """Gradients of a norm's input and weight; ``more`` is added to the input's. ``again``: the norm's result too."""

    def gated(self, gate: Tensor, up: Tensor, /) -> Tensor:
        """silu(gate) · up."""

    def gated_finely(self, gate: Tensor, up: Tensor, /) -> Tensor:
        """silu(gate) · up of float32 tensors in float16, divided by ``FINE_SCALE``."""

    def gate_gradients(
        self, gate: Tensor, up: Tensor, gradient: Tensor, again: bool = False, /
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of gate and up, and where asked for ``again`` what ``gated`` gives (else the last is unspecified)."""

    def column_sums(self, x_NW: Tensor, /) -> Tensor:
        """Sums over rows, in their kind: a bias' gradient."""

    def split_rotated(
        self, joined_NW: Tensor, cos_ND: Tensor, sin_ND: Tensor, heads: int, /
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [N, H, D], rotated keys, and values, of what one product gave side by side."""

    def joined_gradients(self, query: Tensor, key: Tensor, value: Tensor, cos_ND: Tensor, sin_ND: Tensor, /) -> Tensor:
        """The gradient of what was split."""

    def rotated(self, x_BTHD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, back: bool) -> Tensor:
        """Heads rotated by their token's angles, or a gradient of that ``back``; not necessarily contiguous."""


def ops_of(x: Tensor) -> LayerOps:
    """The operations for a tensor's device. Raises ImportError without Triton."""
    assert x.is_cuda or interpreted, "layers on a CPU are the stock ones"
    from sensorium.models import layer_kernels

    return layer_kernels

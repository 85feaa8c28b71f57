"""A whole block of a Qwen2.5 vision tower as one function with its gradient.

    x ─ norm ─ q, k, v ─ rotation ─ attention ─ out ─ + x ─ norm ─ gate, up ─ silu · ─ down ─ + ─▶

Autograd over the parts would keep 41 kB a patch of Qwen2.5-VL-3B's tower, and take the host longer than the GPU for few
pictures. Here norms and the gate are computed again in the backward pass: 29 kB a patch are kept. Axes: P patches, W width,
F inner size, H heads, D head size; weights are [out, in].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from sensorium.models.layer_kernels import add_normed, column_sums, gate_gradients, gated, norm_gradients, normed
from sensorium.models.tower_kernels import rotate_into
from sensorium.models.window_kernels import LONGEST, attend_windows, window_gradients


@dataclass(frozen=True)
class BlockSettings:
    """What a block computes with beside its weights: ends of the segments, the longest, rotation, heads, norms' eps."""

    ends: Tensor
    longest: int
    cos_PD: Tensor
    sin_PD: Tensor
    heads: int
    scaling: float
    eps: tuple[float, float]


class PaddedMLP:
    """Weights of a gated MLP with its inner size a multiple of 8, as fast matrix kernels want it; made anew when they move.

    Padding changes no number: silu(0) · 0 = 0, and what it is multiplied with is 0 too.
    """

    def __init__(self) -> None:
        self._made_of: tuple[tuple[int, int], ...] = ()
        self._padded: tuple[Tensor, ...] = ()

    @torch.no_grad()
    @torch.inference_mode(False)  # what is cached must also serve training
    def __call__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> tuple[Tensor, ...]:
        """(gate, its bias, up, its bias, down): not copies where nothing is missing."""
        weights = (gate.weight, gate.bias, up.weight, up.bias, down.weight)
        more = -gate.out_features % 8
        if not more:
            return tuple(weight.detach() for weight in weights)
        made_of = tuple((weight.data_ptr(), weight._version) for weight in weights)
        if made_of != self._made_of:
            wider = [pad(weight.detach(), (0, 0) * (weight.dim() - 1) + (0, more)) for weight in weights[:4]]
            self._padded = (*wider, pad(weights[4].detach(), (0, more)))
            self._made_of = made_of
        return self._padded


class GatedTowerBlock(torch.autograd.Function):
    """(x, settings, padded MLP, gain, qkv, bias, out, bias, gain, gate, bias, up, bias, down, bias) → x after the block."""

    @staticmethod
    def forward(ctx: Any, x_PW: Tensor, settings: BlockSettings, padded: Sequence[Tensor], *weights: Tensor) -> Tensor:
        first_gain, qkv, qkv_bias, out, out_bias, second_gain, *_, down_bias = weights
        gate, gate_bias, up, up_bias, down = padded
        x_PW = x_PW.contiguous()
        normed_PW, first_scale = normed(x_PW, first_gain, settings.eps[0])
        rotated = linear(normed_PW, qkv, qkv_bias)
        rotate_into(rotated, rotated, settings.cos_PD, settings.sin_PD, 3, 2, back=False)
        seen_PHD, lse = attended(rotated, settings)
        projected_PW = linear(seen_PHD.flatten(1), out, out_bias)
        normed_PW, summed_PW, second_scale = add_normed(projected_PW, x_PW, second_gain, settings.eps[1])
        gate_PF, up_PF = linear(normed_PW, gate, gate_bias), linear(normed_PW, up, up_bias)
        result_PW = linear(gated(gate_PF, up_PF), down, down_bias).add_(summed_PW)
        ctx.settings = settings
        kept = (x_PW, first_scale, rotated, seen_PHD, lse, summed_PW, second_scale, gate_PF, up_PF)
        ctx.save_for_backward(*kept, first_gain, qkv, out, second_gain, gate, up, down)
        ctx.inner = len(weights[6])
        return result_PW

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_PW, first_scale, rotated, seen_PHD, lse, summed_PW, second_scale, gate_PF, up_PF, *weights = ctx.saved_tensors
        first_gain, qkv, out, second_gain, gate, up, down = weights
        settings, inner, given_PW = ctx.settings, ctx.inner, gradients[0].contiguous()
        gate_given, up_given, gated_PF = gate_gradients(gate_PF, up_PF, given_PW @ down, True)
        normed_PW = normed(summed_PW, second_gain, settings.eps[1])[0]
        mlp = [
            (gate_given.T @ normed_PW)[:inner], column_sums(gate_given)[:inner],
            (up_given.T @ normed_PW)[:inner], column_sums(up_given)[:inner],
            (given_PW.T @ gated_PF)[:, :inner], column_sums(given_PW),
        ]  # fmt: skip
        before_PW = torch.addmm(gate_given @ gate, up_given, up)
        between_PW, _, second_gain_given = norm_gradients(summed_PW, second_gain, second_scale, before_PW, given_PW)
        seen_given = (between_PW @ out).view_as(seen_PHD)
        turned = attention_gradients(seen_given, rotated, seen_PHD, lse, settings)
        rotate_into(turned, turned, settings.cos_PD, settings.sin_PD, 3, 2, back=True)
        normed_PW = normed(x_PW, first_gain, settings.eps[0])[0]
        x_given, _, first_gain_given = norm_gradients(x_PW, first_gain, first_scale, turned @ qkv, between_PW)
        attention = [turned.T @ normed_PW, column_sums(turned), between_PW.T @ seen_PHD.flatten(1), column_sums(between_PW)]
        return x_given, None, None, first_gain_given, *attention, second_gain_given, *mlp


def attended(rotated: Tensor, settings: BlockSettings) -> tuple[Tensor, Tensor]:
    """Attention within segments, and what its gradient needs of the weights: windows by kernels, longer ones by flash."""
    if settings.longest <= LONGEST:
        return attend_windows(rotated, settings.ends, settings.heads, settings.scaling)
    return flash_attended(rotated, settings)


def attention_gradients(
    given_PHD: Tensor, rotated: Tensor, seen_PHD: Tensor, logs: Tensor, settings: BlockSettings
) -> Tensor:
    """The gradient of queries, keys and values as they lie side by side."""
    if settings.longest <= LONGEST:
        return window_gradients(given_PHD, rotated, seen_PHD, logs, settings.ends, settings.scaling)
    return flash_gradients(given_PHD, rotated, seen_PHD, logs, settings)


def flash_attended(rotated: Tensor, settings: BlockSettings) -> tuple[Tensor, Tensor]:
    """By torch's flash attention, 16 bits on CUDA, with its log-sum-exp."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *_three(rotated, settings), settings.ends, settings.ends, settings.longest, settings.longest, 0.0, False, False,
        scale=settings.scaling,
    )  # fmt: skip
    return out, lse


def flash_gradients(given_PHD: Tensor, rotated: Tensor, seen_PHD: Tensor, lse: Tensor, settings: BlockSettings) -> Tensor:
    """The same by torch's flash attention."""
    no_dropout = torch.empty(2, dtype=torch.uint64, device=given_PHD.device)  # taken, and not read
    found = torch.ops.aten._flash_attention_backward(
        given_PHD, *_three(rotated, settings), seen_PHD, lse, settings.ends, settings.ends, settings.longest,
        settings.longest, 0.0, False, no_dropout, no_dropout, scale=settings.scaling,
    )  # fmt: skip
    return torch.stack(tuple(found), 1).view_as(rotated)


def _three(rotated: Tensor, settings: BlockSettings) -> tuple[Tensor, ...]:
    """Queries, keys and values, each [P, H, D]."""
    return rotated.view(len(rotated), 3, settings.heads, -1).unbind(1)

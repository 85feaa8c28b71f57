"""A whole block of a Qwen2.5 vision tower as one function with its gradient.

    x ─ norm ─ q, k, v ─ rotation ─ attention ─ out ─ + x ─ norm ─ gate, up ─ silu · ─ down ─ + ─▶

Autograd over the parts would keep 41 kB a patch of Qwen2.5-VL-3B's tower, and for few pictures the host would take longer
than the GPU. Here norms and the gate are recomputed in the backward pass: 29 kB a patch are kept. Axes: P patches, W width,
F inner size, H heads, D head size; weights are [out, in].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from sensorium.kernels.layer_ops import ops_of
from sensorium.kernels.layer_torch import column_sums

# Inner sizes are padded to multiples of this. Of 3,424, 3,456 and 3,584 for Qwen2.5-VL's 3,420 the first is the fastest.
ALIGNED = 32


@dataclass(frozen=True)
class BlockSettings:
    """Inputs of a block beside its weights: ends of the segments, the longest, rotation, heads, eps of the norms."""

    ends: Tensor
    longest: int
    cos_PD: Tensor
    sin_PD: Tensor
    heads: int
    scaling: float
    eps: tuple[float, float]


class JoinedMLP:
    """Weights of a gated MLP for two products: gate and up in one, the inner size a multiple of ``ALIGNED``.

    Fast matrix kernels want such sizes. Padding changes no number: silu(0) · 0 = 0, and the weights there are 0 too. Made
    again when weights change.
    """

    def __init__(self) -> None:
        self._made_of: tuple[tuple[int, int], ...] = ()
        self._joined: tuple[Tensor, ...] = ()

    @torch.no_grad()
    @torch.inference_mode(False)  # what is cached must also serve training
    def __call__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> tuple[Tensor, ...]:
        """(gate over up, their biases, down)."""
        weights = (gate.weight, gate.bias, up.weight, up.bias, down.weight)
        made_of = tuple((weight.data_ptr(), weight._version) for weight in weights)
        if made_of != self._made_of:
            more = -gate.out_features % ALIGNED
            wider = [pad(weight, (0, 0) * (weight.dim() - 1) + (0, more)) for weight in weights[:4]]
            self._joined = (torch.cat(wider[::2]), torch.cat(wider[1::2]), pad(weights[4], (0, more)))
            self._made_of = made_of
        return self._joined


class GatedTowerBlock(torch.autograd.Function):
    """(x, settings, joined MLP, gain, qkv, bias, out, bias, gain, gate, bias, up, bias, down, bias) → x after the block."""

    @staticmethod
    def forward(ctx: Any, x_PW: Tensor, settings: BlockSettings, joined: Sequence[Tensor], *weights: Tensor) -> Tensor:
        first_gain, qkv, qkv_bias, out, out_bias, second_gain, *_, down_bias = weights
        pair, pair_bias, down = joined
        x_PW = x_PW.contiguous()
        ops = ops_of(x_PW)
        normed_PW, first_scale = ops.normed(x_PW, first_gain, settings.eps[0])
        rotated = linear(normed_PW, qkv, qkv_bias)
        ops.rotate_into(rotated, rotated, settings.cos_PD, settings.sin_PD, 3, 2, back=False)
        seen_PHD, lse = attended(rotated, settings)
        projected_PW = linear(seen_PHD.flatten(1), out, out_bias)
        normed_PW, summed_PW, second_scale = ops.add_normed(projected_PW, x_PW, second_gain, settings.eps[1])
        both_PF = linear(normed_PW, pair, pair_bias)
        result_PW = linear(ops.gated_pair(both_PF), down, down_bias).add_(summed_PW)
        ctx.settings = settings
        kept = (x_PW, first_scale, rotated, seen_PHD, lse, summed_PW, second_scale, both_PF)
        ctx.save_for_backward(*kept, first_gain, qkv, out, second_gain, pair, down)
        ctx.inner = len(weights[6])
        return result_PW

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_PW, first_scale, rotated, seen_PHD, lse, summed_PW, second_scale, both_PF, *weights = ctx.saved_tensors
        first_gain, qkv, out, second_gain, pair, down = weights
        settings, inner, given_PW = ctx.settings, ctx.inner, gradients[0].contiguous()
        ops = ops_of(given_PW)
        both_given, both_bias, gated_PF = ops.gate_pair_gradients(both_PF, given_PW @ down)
        second = ops.norm_gradients(
            summed_PW, second_gain, second_scale, both_given @ pair, given_PW, again=second_gain.dtype
        )
        between_PW = second.input
        gate, up = (both_given.T @ second.result).chunk(2)
        gate_bias, up_bias = both_bias.chunk(2)
        mlp = [
            gate[:inner], gate_bias[:inner], up[:inner], up_bias[:inner],
            (given_PW.T @ gated_PF)[:, :inner], column_sums(given_PW),
        ]  # fmt: skip
        seen_given = (between_PW @ out).view_as(seen_PHD)
        turned = attention_gradients(seen_given, rotated, seen_PHD, lse, settings)
        ops.rotate_into(turned, turned, settings.cos_PD, settings.sin_PD, 3, 2, back=True)
        first = ops.norm_gradients(x_PW, first_gain, first_scale, turned @ qkv, between_PW, again=first_gain.dtype)
        attention = [
            turned.T @ first.result, column_sums(turned),
            between_PW.T @ seen_PHD.flatten(1), column_sums(between_PW),
        ]  # fmt: skip
        return first.input, None, None, first.weight, *attention, second.weight, *mlp


def attended(rotated: Tensor, settings: BlockSettings) -> tuple[Tensor, Tensor]:
    """Attention within segments by torch's flash attention, 16 bits on CUDA, with its log-sum-exp."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *_three(rotated, settings), settings.ends, settings.ends, settings.longest, settings.longest, 0.0, False, False,
        scale=settings.scaling,
    )  # fmt: skip
    return out, lse


def attention_gradients(
    given_PHD: Tensor, rotated: Tensor, seen_PHD: Tensor, lse: Tensor, settings: BlockSettings
) -> Tensor:
    """The gradient of queries, keys and values side by side."""
    no_dropout = torch.empty(2, dtype=torch.uint64, device=given_PHD.device)  # required, but not read
    found = torch.ops.aten._flash_attention_backward(
        given_PHD, *_three(rotated, settings), seen_PHD, lse, settings.ends, settings.ends, settings.longest,
        settings.longest, 0.0, False, no_dropout, no_dropout, scale=settings.scaling,
    )  # fmt: skip
    return torch.stack(tuple(found), 1).view_as(rotated)


def _three(rotated: Tensor, settings: BlockSettings) -> tuple[Tensor, ...]:
    return rotated.view(len(rotated), 3, settings.heads, -1).unbind(1)

"""Gated delta nets (linear attention of Qwen3.5) whose state belongs to the caller, as keys and values do.

The adapter of a family gives each stock layer a subclass of its own class, so loading, saving and copying stay stock. Given
``sensorium_attention``, the layer computes what each token is before the convolution and leaves the rest to it::

    hidden ─▶ in_proj_qkv, beta, decay ─▶ attention.delta(net, tokens) ─▶ norm, gate, out_proj
                                            └─ advance(net, tokens, window and state before) ─▶ out, window and state after

Example: a prompt of 5 tokens and two responses that follow it. ``advance(net, prompt)`` returns a window (columns 3 to 5 of
in_proj_qkv) and a state; ``advance(net, responses, window, state)``, both repeated twice, gives what two rows would.

Axes: B rows, T tokens, C channels, W the window (columns before the first token that the convolution reads), H key heads,
G value heads, K and V their sizes.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, softplus
from transformers.activations import ACT2FN

from sensorium.kernels.delta_rule import delta_rule
from sensorium.vocabulary.errors import ModelError


@dataclass(frozen=True)
class DeltaTokens:
    """What tokens are before the convolution: channels of queries, keys and values; beta; the logarithm of the decay."""

    mixed_BTC: Tensor
    beta_BTG: Tensor
    decay_BTG: Tensor


@dataclass(frozen=True)
class DeltaState:
    """What a delta net knows of all tokens so far: the last W columns before the convolution, and the state (float32)."""

    window_BWC: Tensor
    state_BGKV: Tensor


@runtime_checkable
class DeltaAttention(Protocol):
    """An ``Attention`` that also holds the states of delta nets. Repeatable, as an ``Attention`` is."""

    def delta(self, net: Any, tokens: DeltaTokens) -> Tensor:
        """[B, T, G, V] of the layer ``net.layer_idx``."""
        ...


class DeltaNet(nn.Module):
    """A stock gated delta net that leaves convolution and states to the caller's attention, where one is given."""

    def forward(self, hidden_states: Tensor, *given: Any, sensorium_attention: Any = None, **rest: Any) -> Tensor:
        """The stock forward, or the one over the caller's states."""
        if sensorium_attention is None:
            out: Tensor = super().forward(hidden_states, *given, **rest)
            return out
        if not isinstance(sensorium_attention, DeltaAttention):
            raise ModelError(
                f"{type(sensorium_attention).__name__} has no states for the gated delta nets of this model (Qwen3.5)."
            )
        net: Any = self
        tokens = DeltaTokens(
            net.in_proj_qkv(hidden_states),
            net.in_proj_b(hidden_states).sigmoid(),
            -net.A_log.float().exp() * softplus(net.in_proj_a(hidden_states).float() + net.dt_bias),
        )
        seen_BTGV = sensorium_attention.delta(net, tokens)
        gate_BTGV = net.in_proj_z(hidden_states).view_as(seen_BTGV)
        normed = net.norm(seen_BTGV.flatten(0, 2), gate_BTGV.flatten(0, 2))
        result: Tensor = net.out_proj(normed.view(*hidden_states.shape[:2], -1))
        return result


@lru_cache(maxsize=16)
def _own_class(stock: Any) -> Any:
    return type(f"Stateless{stock.__name__}", (DeltaNet, stock), {})


def is_delta(layer: Any) -> bool:
    """Whether a decoder layer is a delta net, not attention."""
    return hasattr(layer, "linear_attn")


def hand_over_states(language_model: Any) -> None:
    """Let the delta nets among the decoder layers take their states from the caller. May be called again."""
    for layer in language_model.layers:
        if is_delta(layer) and not isinstance(layer.linear_attn, DeltaNet):
            stock: Any = type(layer.linear_attn)
            layer.linear_attn.__class__ = _own_class(stock)


def window_size(net: Any) -> int:
    """How many columns before a token its convolution reads."""
    size: int = net.conv_kernel_size - 1
    return size


def convolved(net: Any, mixed_BSC: Tensor) -> Tensor:
    """[B, S - W, C] after the convolution and its activation; the first W columns are only read."""
    weight = net.conv1d.weight
    out_BCT = conv1d(mixed_BSC.transpose(1, 2).to(weight.dtype), weight, net.conv1d.bias, groups=net.conv_dim)
    activated: Tensor = ACT2FN[net.activation](out_BCT)
    return activated.to(mixed_BSC.dtype).transpose(1, 2)


def heads_of(net: Any, mixed_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys [B, T, H, K] and values [B, T, G, V] of convolved columns."""
    query, key, value = mixed_BTC.split([net.key_dim, net.key_dim, net.value_dim], dim=-1)
    sizes = (net.head_k_dim, net.head_k_dim, net.head_v_dim)
    split = [x.unflatten(-1, (-1, size)) for x, size in zip((query, key, value), sizes, strict=True)]
    return split[0], split[1], split[2]


def advance(
    net: Any, tokens: DeltaTokens, before: DeltaState | None = None, lengths_B: Tensor | None = None
) -> tuple[Tensor, DeltaState]:
    """The result [B, T, G, V] of rows of tokens, and what the net knows after them.

    ``before``: what it knew before the first token; None: nothing. ``lengths_B``: how many tokens of each row are real, on
    the tokens' device; those after are padding, which changes nothing and whose results mean nothing.
    """
    mixed_BTC, beta_BTG, decay_BTG = tokens.mixed_BTC, tokens.beta_BTG, tokens.decay_BTG
    batch, length, channels = mixed_BTC.shape
    width = window_size(net)
    window_BWC = mixed_BTC.new_zeros(batch, width, channels) if before is None else before.window_BWC
    mixed_BSC = torch.cat([window_BWC.to(mixed_BTC.dtype), mixed_BTC], dim=1)
    after_BWC = mixed_BSC[:, length:]
    if lengths_B is not None:
        real_BT1 = (torch.arange(length, device=mixed_BTC.device) < lengths_B[:, None])[..., None]
        beta_BTG, decay_BTG = beta_BTG * real_BT1, decay_BTG * real_BT1
        columns_BW = lengths_B[:, None] + torch.arange(width, device=mixed_BTC.device)
        after_BWC = mixed_BSC.gather(1, columns_BW[..., None].expand(-1, -1, channels))
    query, key, value = heads_of(net, convolved(net, mixed_BSC))
    state = None if before is None else before.state_BGKV
    out_BTGV, state_BGKV = delta_rule(query, key, value, decay_BTG, beta_BTG, state)
    return out_BTGV, DeltaState(after_BWC, state_BGKV)

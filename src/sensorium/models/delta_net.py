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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, silu, softplus
from transformers.activations import ACT2FN

from sensorium.kernels import layer_ops
from sensorium.kernels.delta_rule import BOUND, delta_rule
from sensorium.kernels.first_use import fall_back, trying
from sensorium.kernels.layer_ops import product_of
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
        net: Any = self
        tokens = tokens_of(net, *(layer(hidden_states) for layer in (net.in_proj_qkv, net.in_proj_b, net.in_proj_a)))
        seen_BTGV = attended(net, tokens, sensorium_attention)
        result: Tensor = net.out_proj(gated(net, seen_BTGV, net.in_proj_z(hidden_states)))
        return result


def tokens_of(net: Any, mixed_BTC: Tensor, b_BTG: Tensor, a_BTG: Tensor) -> DeltaTokens:
    """Tokens by the results of the layers in_proj_qkv, in_proj_b and in_proj_a."""
    return DeltaTokens(mixed_BTC, b_BTG.sigmoid(), -net.A_log.float().exp() * softplus(a_BTG.float() + net.dt_bias))


def linears_of(net: Any) -> tuple[Any, ...]:
    """The linear layers of a delta net: those of its input, in the order of channels, gate, b and a, and of its output."""
    named = net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a, net.out_proj
    return tuple(product_of(layer) for layer in named)


def gated(net: Any, seen_BTGV: Tensor, gate_BTN: Tensor) -> Tensor:
    """What the layer out_proj takes, [B, T, G · V]: the norm, gated by the result of in_proj_z."""
    normed: Tensor = net.norm(seen_BTGV.flatten(0, 2), gate_BTN.view_as(seen_BTGV).flatten(0, 2))
    return normed.view_as(gate_BTN)


def attended(net: Any, tokens: DeltaTokens, attention: Any) -> Tensor:
    """[B, T, G, V] by the attention, which must have states for delta nets."""
    if not isinstance(attention, DeltaAttention):
        raise ModelError(f"{type(attention).__name__} has no states for the gated delta nets of this model (Qwen3.5).")
    return attention.delta(net, tokens)


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


MOST_COLUMNS = 4  # that the kernel reads for a result


@dataclass(frozen=True)
class Windows:
    """Rows of M columns that a convolution reads for each of N results; -1 where there is none."""

    places_NS: Tensor  # int32
    inputs: int  # M

    @cached_property
    def readers(self) -> tuple[Tensor, Tensor]:
        """Places in ``places_NS`` by the row they name, and where those of each row begin, for the backward pass."""
        flat = self.places_NS.flatten()
        order = flat.argsort(stable=True)
        starts = torch.searchsorted(flat[order], torch.arange(self.inputs + 1, device=flat.device, dtype=flat.dtype))
        return order.int(), starts.int()


def convolved(net: Any, mixed_BSC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the columns after the first W, which are only read."""
    batch, length, _ = mixed_BSC.shape
    if has_kernel(net, mixed_BSC):
        ends_BN = torch.arange(batch * length, device=mixed_BSC.device).view(batch, length)[:, window_size(net) :]
        span = torch.arange(-window_size(net), 1, device=mixed_BSC.device)
        windows = Windows((ends_BN.flatten()[:, None] + span).int(), batch * length)
        query, key, value = (x.unflatten(0, (batch, -1)) for x in convolved_at(net, mixed_BSC.flatten(0, 1), windows))
        return query, key, value
    return heads_of(net, by_torch(net, mixed_BSC))


def by_torch(net: Any, mixed_BSC: Tensor) -> Tensor:
    """[B, S - W, C] after the convolution and its activation; the first W columns are only read."""
    weight = net.conv1d.weight
    out_BCT = conv1d(mixed_BSC.transpose(1, 2).to(weight.dtype), weight, net.conv1d.bias, groups=net.conv_dim)
    activated: Tensor = ACT2FN[net.activation](out_BCT)
    return activated.to(mixed_BSC.dtype).transpose(1, 2)


def convolved_at(net: Any, mixed_MC: Tensor, windows: Windows) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys [N, H, K] and values [N, G, V] by the kernel."""
    apply = import_module("sensorium.kernels.delta_triton").Convolve.apply
    return _heads(net, apply(mixed_MC, net.conv1d.weight, windows, net.key_dim))


def has_kernel(net: Any, mixed: Tensor) -> bool:
    """Whether the kernel takes this convolution and agrees with the reference."""
    plain = net.conv1d.bias is None and net.activation == "silu" and net.conv_kernel_size <= MOST_COLUMNS
    if not plain or net.conv1d.weight.dtype != mixed.dtype:
        return False
    if layer_ops.interpreted:
        return True
    return mixed.is_cuda and _usable(mixed.device, mixed.dtype, net.conv_dim, net.key_dim, net.conv_kernel_size)


@lru_cache(maxsize=16)
def _usable(device: torch.device, dtype: torch.dtype, channels: int, keys: int, span: int) -> bool:
    try:
        error = trial(device, dtype, channels, keys, span)
        if not error <= BOUND:
            raise ValueError(f"it is {error:.2g} off (bound {BOUND:g})")
    except Exception as error:  # a kernel that this GPU cannot run is a reason to be slow, not to stop
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        fall_back(f"the convolutions of gated delta nets run by plain torch, which is slower: {reason}")
        return False
    return True


def trial(device: torch.device, dtype: torch.dtype, channels: int, keys: int, span: int) -> float:
    """The largest error of the kernel's results and gradients on two short runs, relative to the largest value."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(*shape, generator=generator) for shape in ((70, channels), (channels, 1, span), (64, channels))]
    columns, weight, upstream = (x.to(dtype).float() for x in drawn)
    places_NS = torch.arange(64)[:, None] + torch.arange(span)
    places_NS[40:] += 70 - 64 - span + 1
    places_NS[40] = torch.tensor([-1] * (span - 1) + [5])  # a first token, and a place that many read
    apply = import_module("sensorium.kernels.delta_triton").Convolve.apply
    results = []
    with trying():
        for kind, fast in ((dtype, True), (torch.float32, False)):
            x, factor = (each.to(device, kind).requires_grad_() for each in (columns, weight))
            places = places_NS.to(device)
            if fast:
                out = torch.cat(apply(x, factor, Windows(places.int(), len(x)), keys), dim=-1)
            else:
                seen_NSC = x[places.clamp(min=0)] * (places >= 0)[..., None]
                out = silu((seen_NSC * factor[:, 0].T).sum(1))
            gradients = torch.autograd.grad(out, [x, factor], upstream.to(device, kind))
            results.append([each.detach().float() for each in (out, *gradients)])
    pairs = list(zip(*results, strict=True))
    errors = [float((found - right).abs().max() / right.abs().max()) for found, right in pairs]
    return max(errors) if all(bool(found.isfinite().all()) for found, _ in pairs) else float("inf")


def heads_of(net: Any, mixed_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys [B, T, H, K] and values [B, T, G, V] of convolved columns."""
    return _heads(net, mixed_BTC.split([net.key_dim, net.key_dim, net.value_dim], dim=-1))


def _heads(net: Any, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (net.head_k_dim, net.head_k_dim, net.head_v_dim)
    query, key, value = (x.unflatten(-1, (-1, size)) for x, size in zip(parts, sizes, strict=True))
    return query, key, value


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
    query, key, value = convolved(net, mixed_BSC)
    state = None if before is None else before.state_BGKV
    out_BTGV, state_BGKV = delta_rule(query, key, value, decay_BTG, beta_BTG, state)
    return out_BTGV, DeltaState(after_BWC, state_BGKV)

"""The parts of a stock decoder layer: norms, linear layers, what lies between. For code that calls them one by one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sensorium.kernels.layer_ops import is_plain

# The first so many layers compute their MLP from float16 activations, 11 bits instead of bfloat16's 8, without rounding
# gate and up on the way: what is rounded early differs between engine and learner in all that follows. Weights in bfloat16
# are float16 numbers but for the tiniest.
FINE_LAYERS = 4


class UnknownLayer(Exception):
    """A decoder layer has a part that fused code does not support; the message names it."""


@dataclass(frozen=True)
class NormWeights:
    """The weight and epsilon of a stock RMSNorm. ``centred``: its weight learns around 0, and 1 is added to it."""

    weight: Tensor
    eps: float
    centred: bool = False

    @property
    def gain(self) -> Tensor:
        """What normed values are multiplied by; in float32 for a centred norm, as a small weight would be rounded away."""
        return 1.0 + self.weight.float() if self.centred else self.weight


@dataclass(frozen=True)
class GatedMLP:
    """The linear layers of a SwiGLU."""

    gate: nn.Module
    up: nn.Module
    down: nn.Module


@dataclass(frozen=True)
class LayerParts:
    """A decoder layer: ``before`` · attention · ``between`` · ``inner``, with a residual around each half.

    ``norms`` are of queries and keys, where the family has them. ``inner`` is a gated MLP, or any module (experts).
    ``gated`` (Qwen3.5): ``query`` gives each head's query and then its gate.
    """

    index: int
    before: NormWeights
    query: nn.Module
    key: nn.Module
    value: nn.Module
    out: nn.Module
    norms: tuple[NormWeights, NormWeights] | None
    head_dim: int
    scaling: float
    between: NormWeights
    inner: GatedMLP | Callable[[Tensor], Tensor]
    gated: bool = False

    @property
    def fine(self) -> bool:
        """Whether its MLP computes from float16 activations: an early layer in bfloat16 on CUDA."""
        if self.gated or self.index >= FINE_LAYERS or not isinstance(self.inner, GatedMLP):
            return False
        return all(_is_fine(layer) for layer in (self.inner.gate, self.inner.up, self.inner.down))


@dataclass(frozen=True)
class MixerParts:
    """A decoder layer whose first half, ``mixer``, is called as it is (a delta net, gated attention, one with a norm)."""

    index: int
    before: NormWeights
    mixer: Callable[..., Any]
    between: NormWeights
    inner: GatedMLP | Callable[[Tensor], Tensor]
    fine: bool = False


def has_mixer(layer: Any) -> bool:
    """Whether a layer makes its model one whose layers are taken as ``MixerParts``: Qwen3.5's, or GLM-4V's."""
    return hasattr(layer, "linear_attn") or hasattr(layer, "post_mlp_layernorm")


def mixer_of(layer: Any) -> MixerParts:
    """The parts of a layer of a hybrid model, or of one with norms after each half; others are ``UnknownLayer``."""
    names = {name for name, _ in layer.named_children()}
    usual, after = (
        {"mlp", "input_layernorm", "post_attention_layernorm"},
        {"post_self_attn_layernorm", "post_mlp_layernorm"},
    )
    for name in ("linear_attn", "self_attn"):
        if names in ({name, *usual}, {name, *usual, *after}):
            mixer, inner = getattr(layer, name), _inner(layer.mlp)
            before, between = mixer_norm(layer.input_layernorm), mixer_norm(layer.post_attention_layernorm)
            if names == {name, *usual}:
                return MixerParts(mixer.layer_idx, before, mixer, between, inner)
            inner = nn.Sequential(layer.mlp, layer.post_mlp_layernorm)
            return MixerParts(mixer.layer_idx, before, _normed(mixer, layer.post_self_attn_layernorm), between, inner)
    raise UnknownLayer(f"{type(layer).__name__} is made of {', '.join(sorted(names))}")


def decoded_parts(layer: Any) -> LayerParts | MixerParts:
    """The parts of a layer of a hybrid model that a decode step calls one by one; the mixer is a delta net."""
    parts = mixer_of(layer)
    if hasattr(layer, "linear_attn") and isinstance(parts.mixer, nn.Module):
        return parts
    _expect(layer, {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}, set())
    attention = layer.self_attn
    _expect(attention, {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}, set())
    if attention.q_proj.out_features != 2 * attention.o_proj.in_features:
        raise UnknownLayer(f"{type(attention).__name__} has no gates")
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    query, key, value, out = (product_of(getattr(attention, name)) for name in names)
    return LayerParts(
        parts.index, parts.before, query, key, value, out,
        (mixer_norm(attention.q_norm), mixer_norm(attention.k_norm)), attention.head_dim, attention.scaling,
        parts.between, parts.inner, gated=True,
    )  # fmt: skip


def _normed(attention: nn.Module, norm: nn.Module) -> Callable[..., Tensor]:
    def mixer(*given: Any, **named: Any) -> Tensor:
        mixed: Tensor = norm(attention(*given, **named)[0])
        return mixed

    return mixer


def mixer_norm(module: Any) -> NormWeights:
    """The weights of a norm around a mixer; Qwen3.5's learn around 0."""
    return norm_of(module) if hasattr(module, "variance_epsilon") else NormWeights(module.weight, module.eps, centred=True)


def parts_of(layer: Any) -> LayerParts:
    """The parts of a layer of the Qwen families; others are refused with ``UnknownLayer``."""
    _expect(layer, {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}, set())
    attention = layer.self_attn
    _expect(attention, {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"})
    normed = hasattr(attention, "q_norm")
    return LayerParts(
        index=attention.layer_idx,
        before=norm_of(layer.input_layernorm),
        query=product_of(attention.q_proj),
        key=product_of(attention.k_proj),
        value=product_of(attention.v_proj),
        out=product_of(attention.o_proj),
        norms=(norm_of(attention.q_norm), norm_of(attention.k_norm)) if normed else None,
        head_dim=attention.head_dim,
        scaling=attention.scaling,
        between=norm_of(layer.post_attention_layernorm),
        inner=_inner(layer.mlp),
    )


def norm_of(module: Any) -> NormWeights:
    """The weights of a stock RMSNorm."""
    if not hasattr(module, "variance_epsilon") or [name for name, _ in module.named_parameters()] != ["weight"]:
        raise UnknownLayer(f"{type(module).__name__} is no RMSNorm")
    return NormWeights(module.weight, module.variance_epsilon)


def product_of(layer: Any) -> Any:
    """The layer itself; of one whose adapters are merged, the product that stands for both (``AdaptedLinear``)."""
    return layer.product[0] if hasattr(layer, "product") else layer


def _inner(mlp: Any) -> GatedMLP | Callable[[Tensor], Tensor]:
    names = {name for name, _ in mlp.named_children()}
    if names == {"gate_proj", "up_proj", "down_proj", "act_fn"} and _is_silu(mlp.act_fn):
        return GatedMLP(*(product_of(part) for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)))
    module: nn.Module = mlp
    return module


def _expect(module: nn.Module, needed: set[str], allowed: set[str]) -> None:
    names = {name for name, _ in module.named_children()}
    if not needed <= names <= needed | allowed:
        raise UnknownLayer(f"{type(module).__name__} is made of {', '.join(sorted(names))}")


def _is_fine(layer: nn.Module) -> bool:
    if not is_plain(layer) or layer.bias is not None:
        return False
    return layer.weight.is_cuda and layer.weight.dtype == torch.bfloat16


def _is_silu(function: Any) -> bool:
    """By its name, not by trying it."""
    return isinstance(function, nn.SiLU) or type(function).__name__ == "SiLUActivation"

"""Autograd functions of what lies between the products of decoder layers and tower blocks, over ``layer_triton`` on CUDA.
And the parts of a stock decoder layer, for code that calls them one by one.

Axes: N rows, W width, F inner size, H query heads, D head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

"""Decoder layers with fused norms, rotation and gate around the linear layers of the stock modules.

They replace the stock layers' forward on CUDA, with the same parameters and signature. The residual stream is float32
between them: in bfloat16, rounding its 72 sums made most of the difference between two ways to compute a log-prob. Each
kind of layer is compared with its stock forward, values and gradients, before it is used; where they disagree, or a layer
is unknown, the stock layers are used, with a warning.

Autograd would keep every product's input for its weight's gradient. Here norms and gates are recomputed in the backward
pass from the residual stream and from gate and up, by two kernels: Qwen2.5-VL-3B keeps 61 kB a token and layer instead of
91. Axes: N tokens, W width, F inner size; weights are [out, in].
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from sensorium.kernels import layer_torch
from sensorium.kernels.first_use import fall_back
from sensorium.kernels.layer_ops import (
    AddNorm,
    Gate,
    GatedMLP,
    LayerParts,
    MixerParts,
    Norm,
    NormWeights,
    Rotate,
    UnknownLayer,
    factor_gradients,
    factors_of,
    has_mixer,
    is_plain,
    mixer_norm,
    mixer_of,
    norm_of,
    ops_of,
    parts_of,
    product_of,
    wide_linear,
    wide_product,
)
from sensorium.kernels.layer_torch import FINE_SCALE
from sensorium.models.attention import Attention, MaskedAttention
from sensorium.models.delta_net import DeltaNet, attended, is_delta, linears_of, tokens_of
from sensorium.models.experts import replaying, routers_of, watching
from sensorium.models.family import one_axis

DecoderLayer = Callable[..., Tensor]
# False: activations are kept. "selective": those of the MLP are recomputed. True: whole layers are.
Recomputation = bool | Literal["selective"]
# Largest relative deviation of values and gradients from the stock layer's in float32.
BOUND = 1e-5
# Of a gated delta net, which amplifies roundings: in six trials of tiny ones the fused layer was 1e-6 to 2e-5 off.
DELTA_BOUND = 5e-5
# In 16 bits both are rounded: how far off a tensor of the fused layer may be, in norm, relative to how far that of the
# stock layer is from the layer in float32 (or to the median of those distances, if larger). Some gradients are sums that
# nearly cancel: of keys' biases in Qwen2.5-VL-3B's shape the stock layer is 0.015 to 0.02 off (median 0.006), of a tiny
# delta net's decay 0.02 to 0.08, of its convolution up to 0.1. The fused layer is held against both; the nearer counts.
FACTOR = 2.0
DRAWS = 4  # random inputs of a trial in 16 bits: a decay's gradient has a number for each head, too few for one draw
TRIAL_TOKENS = 48


class NormedProducts(torch.autograd.Function):
    """(x, gain, eps, factors of a layer, factors, …) → linear layers of the norm of x, in order, and x itself.

    Later layers take x from here: then its gradient is added to the norm's in the norm's kernel.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain_W: Tensor, eps: float, *factors: Tensor | None) -> tuple[Tensor, ...]:
        x = x.contiguous()
        weights, biases, *adapters = (factors[i::4] for i in range(4))
        assert weights[0] is not None
        normed_NW, scale_N = ops_of(x).normed(x, gain_W, eps, weights[0].dtype)
        ctx.save_for_backward(x, gain_W, scale_N, *weights, *adapters[0], *adapters[1])
        found = (linear(normed_NW, weight, bias) for weight, bias in zip(weights, biases, strict=True))  # type: ignore[arg-type]
        return *found, x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *several, more = gradients
        count = len(several)
        x, gain_W, scale_N, *kept = ctx.saved_tensors
        weights, a, b = (kept[i : i + count] for i in (0, count, 2 * count))
        flat = [gradient.flatten(0, -2) for gradient in several]
        inner_NW, ops = _summed_products(flat, weights).view(x.shape), ops_of(x)
        norm = ops.norm_gradients(x, gain_W, scale_N, inner_NW, more, again=weights[0].dtype)
        normed_NW, needed = norm.result.flatten(0, -2), ctx.needs_input_grad[3:]
        found = [factor_gradients(needed[4 * i :], flat[i], normed_NW, a[i], b[i]) for i in range(count)]
        return norm.input, norm.weight, None, *(gradient for each in found for gradient in each)


class RotatedProducts(torch.autograd.Function):
    """(x, gain, eps, cos, sin, factors of three layers) → queries, keys, values of the norm of x, and x itself.

    Queries and keys are rotated. The three are one product, forward and backward. Either all biases are None or none is.
    Later layers take x from here, as from ``NormedProducts``.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain_W: Tensor, eps: float, cos_BTD: Tensor, sin_BTD: Tensor, *factors: Tensor | None
    ) -> tuple[Tensor, ...]:
        x = x.contiguous()
        weights, ops = [weight for weight in factors[::4] if weight is not None], ops_of(x)
        biases = [bias for bias in factors[1::4] if bias is not None]
        normed_NW, scale_N = ops.normed(x, gain_W, eps)
        together, bias = torch.cat(weights), torch.cat(biases) if biases else None
        cos_ND, sin_ND = (each.contiguous().flatten(0, -2) for each in (cos_BTD, sin_BTD))
        heads = len(weights[0]) // cos_ND.shape[1]
        three = ops.split_rotated(linear(normed_NW, together, bias).flatten(0, -2), cos_ND, sin_ND, heads)
        ctx.save_for_backward(x, gain_W, scale_N, together, cos_ND, sin_ND, *factors[2::4], *factors[3::4])
        ctx.sizes = [len(weight) for weight in weights]
        return *(part.unflatten(0, x.shape[:-1]) for part in three), x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, gain_W, scale_N, together, cos_ND, sin_ND, *adapters = ctx.saved_tensors
        *three, more = gradients
        ops, needed = ops_of(x), ctx.needs_input_grad[5:]
        joined = ops.joined_gradients(*(part.contiguous().flatten(0, -3) for part in three), cos_ND, sin_ND)
        norm = ops.norm_gradients(x, gain_W, scale_N, (joined @ together).view(x.shape), more, again=gain_W.dtype)
        normed_NW = norm.result.flatten(0, -2)
        found: list[Tensor | None] = [None] * 12
        whole = factor_gradients([any(needed[i::4]) for i in (0, 1)] + [False, False], joined, normed_NW, None, None)
        for i, gradient in enumerate(whole[:2]):
            if gradient is not None:
                found[i::4] = gradient.split(ctx.sizes)
        for i, part in enumerate(joined.split(ctx.sizes, dim=1)):
            adapted = (False, False, *needed[4 * i + 2 : 4 * i + 4])
            found[4 * i + 2 : 4 * i + 4] = factor_gradients(adapted, part, normed_NW, adapters[i], adapters[3 + i])[2:]
        return norm.input, norm.weight, None, None, None, *found


class GatedBlock(torch.autograd.Function):
    """(x, residual, gain, eps, keep, fine, factors of out, gate, up, down) → s + down(silu(gate·n) · up·n), n = norm of s.

    s = residual + out·x; where the weight of ``out`` is None, residual + x. Unless ``keep``, the products with gate and up
    are recomputed in the backward pass: 25 of 69 kB a token are kept. ``fine``: values come from float16 activations
    (``LayerParts.fine``); gradients as without. No layer has a bias.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        gain_W: Tensor,
        eps: float,
        keep: bool,
        fine: bool,
        *factors: Tensor | None,
    ) -> Tensor:
        out_WA, gate_FW, up_FW, down_WF = factors[::4]
        assert gate_FW is not None
        assert up_FW is not None
        assert down_WF is not None
        given, ops = torch.float16 if fine else gate_FW.dtype, ops_of(x)
        seen = x.contiguous() if out_WA is None else wide_product(x, out_WA)
        normed_NW, summed_NW, scale_N = ops.add_normed(seen, residual.contiguous(), gain_W, eps, given)
        if fine:
            wide = [wide_product(normed_NW, weight.half()) for weight in (gate_FW, up_FW)]
            result = wide_product(ops.gated_finely(*wide), down_WF.half()).mul_(FINE_SCALE)
            gate_NF, up_NF = ((part.to(gate_FW.dtype) if keep else part) for part in wide)
        else:
            gate_NF, up_NF = linear(normed_NW, gate_FW), linear(normed_NW, up_FW)
            result = wide_product(ops.gated(gate_NF, up_NF), down_WF)
        ctx.eps, ctx.kinds = eps, (x.dtype, gate_FW.dtype)
        kept = (gate_NF, up_NF) if keep else (None, None)
        ctx.save_for_backward(None if out_WA is None else x, summed_NW, gain_W, scale_N, *kept, *factors)
        return result.add_(summed_NW).to(summed_NW.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, summed_NW, gain_W, scale_N, gate_NF, up_NF, *factors = ctx.saved_tensors
        out_WA, gate_FW, up_FW, down_WF = factors[::4]
        outer, (kind, inner_kind), ops = gradients[0].contiguous(), ctx.kinds, ops_of(summed_NW)
        if gate_NF is None:
            again_NW = ops.normed(summed_NW, gain_W, ctx.eps, inner_kind)[0]
            gate_NF, up_NF = linear(again_NW, gate_FW), linear(again_NW, up_FW)
        narrow_NW = outer.to(inner_kind).flatten(0, -2)
        given_NF = (narrow_NW @ down_WF).view_as(gate_NF)
        needed = [ctx.needs_input_grad[i : i + 4] for i in range(6, 22, 4)]
        gate_gradient, up_gradient, gated_NF = ops.gate_gradients(gate_NF, up_NF, given_NF, any(needed[3]))

        def learned(place: int, gradient_NO: Tensor, x_NI: Tensor | None) -> Sequence[Tensor | None]:
            if x_NI is None or not any(needed[place]):
                return (None,) * 4
            return factor_gradients(
                needed[place], gradient_NO, x_NI.flatten(0, -2), *factors[4 * place + 2 : 4 * place + 4]
            )

        down = learned(3, narrow_NW, gated_NF)
        flat = [gate_gradient.flatten(0, -2), up_gradient.flatten(0, -2)]
        inner_NW = _summed_products(flat, (gate_FW, up_FW)).view(summed_NW.shape)
        other = None if kind == summed_NW.dtype else kind
        norm = ops.norm_gradients(summed_NW, gain_W, scale_N, inner_NW, outer, narrow=other, again=inner_kind)
        normed_NW = norm.result
        seen = norm.input if norm.narrow is None else norm.narrow
        out = learned(0, seen.flatten(0, -2), x)
        given = (None, None, None, *out, *learned(1, flat[0], normed_NW), *learned(2, flat[1], normed_NW), *down)
        return seen if out_WA is None else seen @ out_WA, norm.input, norm.weight, *given


def _summed_products(gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The gradient of the shared input of several linear layers."""
    summed = gradients[0] @ weights[0]
    for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
        summed = torch.addmm(summed, gradient, weight)
    return summed


class LayerStack:
    """Decoder layers and the norm after them; ``stream`` is the dtype of the residual stream (None: the embeddings')."""

    def __init__(self, layers: Sequence[DecoderLayer], norm: Callable[[Tensor], Tensor], stream: torch.dtype | None = None):
        self.layers, self.norm, self.stream = layers, norm, stream

    def recomputes(self, how: Recomputation) -> bool:
        """Whether whole layers are recomputed; fused ones recompute a part of theirs for ``selective``."""
        fused = [layer for layer in self.layers if isinstance(layer, FusedLayer)]
        for layer in fused:
            layer.lean = how == "selective"
        return how is True or (how == "selective" and not fused)

    def enter(self, hidden_BTH: Tensor) -> Tensor:
        """Embeddings in the dtype of the residual stream."""
        return hidden_BTH if self.stream is None else hidden_BTH.to(self.stream)


class FusedLayer:
    """One decoder layer over a float32 residual stream."""

    def __init__(self, parts: LayerParts | MixerParts) -> None:
        self._parts = parts
        self.lean = False  # recomputes products of the MLP, and the delta rule, in the backward pass

    def __call__(
        self, hidden_BTW: Tensor, *, position_embeddings: tuple[Tensor, Tensor], sensorium_attention: Attention
    ) -> Tensor:
        parts = self._parts
        if isinstance(parts, MixerParts):
            net = parts.mixer
            if ops_of(hidden_BTW) is not layer_torch:
                if isinstance(net, DeltaNet) and all(map(is_plain, linears_of(net))):
                    return self._second_half(*self._delta(net, hidden_BTW, sensorium_attention))
                if _is_gated_attention(net):
                    angles = one_axis(position_embeddings)
                    return self._second_half(*self._gated_attention(net, hidden_BTW, angles, sensorium_attention))
            normed_BTW = self.norm(hidden_BTW, parts.before)
            given = {"position_embeddings": position_embeddings, "attention_mask": None}
            mixed = parts.mixer(normed_BTW, sensorium_attention=sensorium_attention, **given)
            return self._second_half(mixed[0] if isinstance(mixed, tuple) else mixed, hidden_BTW)
        query, key, value, hidden_BTW = self._projected(parts, hidden_BTW, one_axis(position_embeddings))
        seen_BTHD = sensorium_attention(
            parts.index, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), parts.scaling
        )
        return self._second_half(seen_BTHD.flatten(2), hidden_BTW)

    def _delta(self, net: Any, hidden_BTW: Tensor, attention: Any) -> tuple[Tensor, Tensor]:
        """The result of a delta net over the normed stream, and the stream."""
        before, (*given, out) = self._parts.before, linears_of(net)
        mixed, gate, b, a, hidden_BTW = NormedProducts.apply(hidden_BTW, before.gain, before.eps, *_factors(given))
        tokens = tokens_of(net, mixed, b, a)
        if self.lean and torch.is_grad_enabled():
            seen_BTGV = checkpoint(attended, net, tokens, attention, use_reentrant=False, preserve_rng_state=False)
        else:
            seen_BTGV = attended(net, tokens, attention)
        apply = import_module("sensorium.kernels.delta_triton").GatedNormProduct.apply
        return apply(seen_BTGV, gate, net.norm.weight, net.norm.variance_epsilon, *factors_of(out)), hidden_BTW

    def _gated_attention(
        self, net: Any, hidden_BTW: Tensor, angles: tuple[Tensor, Tensor], attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """The result of attention whose queries come with a gate, over the normed stream, and the stream."""
        before, kernels = self._parts.before, import_module("sensorium.kernels.delta_triton")
        norms = mixer_norm(net.q_norm), mixer_norm(net.k_norm)
        *given, out = (product_of(layer) for layer in (net.q_proj, net.k_proj, net.v_proj, net.o_proj))
        joint, key, value, hidden_BTW = NormedProducts.apply(hidden_BTW, before.gain, before.eps, *_factors(given))
        gains = [norm.gain for norm in norms]
        query, key, gate = kernels.TurnedHeads.apply(joint, key, *gains, norms[0].eps, *angles)
        value = value.unflatten(-1, (-1, net.head_dim))
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        seen_BTHD = attention(net.layer_idx, query, key, value, net.scaling)
        return kernels.GatedProduct.apply(seen_BTHD, gate, *factors_of(out)), hidden_BTW

    @property
    def fine(self) -> bool:
        """Whether its MLP computes from float16 activations."""
        return self._parts.fine

    def norm(self, x: Tensor, norm: NormWeights) -> Tensor:
        return Norm.apply(x, norm.gain, norm.eps).to(norm.weight.dtype)

    def _projected(self, parts: LayerParts, hidden_BTW: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Rotated queries and keys, and values, [B, T, heads, D] of the normed stream, and the stream."""
        before = parts.before
        layers = (parts.query, parts.key, parts.value)
        plain = all(is_plain(layer) for layer in layers)
        if plain and parts.norms is None and len({layer.bias is None for layer in layers}) == 1:
            return RotatedProducts.apply(hidden_BTW, before.weight, before.eps, *angles, *_factors(layers))
        if plain:
            *several, hidden_BTW = NormedProducts.apply(hidden_BTW, before.weight, before.eps, *_factors(layers))
        else:
            normed_BTW = self.norm(hidden_BTW, before)
            several = [layer(normed_BTW) for layer in layers]
        query, key, value = (x.unflatten(-1, (-1, parts.head_dim)) for x in several)
        if parts.norms is not None:
            query, key = self.norm(query, parts.norms[0]), self.norm(key, parts.norms[1])
        query, key = (Rotate.apply(x, *angles) for x in (query, key))
        return query, key, value, hidden_BTW

    def _second_half(self, seen_BTW: Tensor, hidden_BTW: Tensor) -> Tensor:
        """The stream after the output projection, which a mixer has done itself, and the MLP or the experts."""
        inner, between = self._parts.inner, self._parts.between
        out = None if isinstance(self._parts, MixerParts) else self._parts.out
        if isinstance(inner, GatedMLP) and all(map(is_plain, (inner.gate, inner.up, inner.down))):
            layers = (inner.gate, inner.up, inner.down)
            if all(layer.bias is None for layer in layers):
                plain = out is not None and is_plain(out) and out.bias is None
                given = seen_BTW if plain else _product(out, seen_BTW)
                first = factors_of(out) if plain else (None,) * 4
                settings = between.gain, between.eps, not self.lean, self._parts.fine
                return GatedBlock.apply(given, hidden_BTW, *settings, *first, *_factors(layers))
        normed_BTW, sum_BTW = AddNorm.apply(_product(out, seen_BTW), hidden_BTW, between.gain, between.eps)
        normed_BTW = normed_BTW.to(between.weight.dtype)
        if self.lean and torch.is_grad_enabled():
            return sum_BTW + checkpoint(self._inner, normed_BTW, use_reentrant=False, preserve_rng_state=False)
        return sum_BTW + self._inner(normed_BTW)

    def _inner(self, normed_BTW: Tensor) -> Tensor:
        inner = self._parts.inner
        if isinstance(inner, GatedMLP):
            return wide_linear(inner.down, Gate.apply(inner.gate(normed_BTW), inner.up(normed_BTW)))
        return inner(normed_BTW)


def _is_gated_attention(net: Any) -> bool:
    """Whether a mixer is attention of plain linear layers with norms of heads, whose queries come with a gate."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    if not isinstance(net, nn.Module) or {name for name, _ in net.named_children()} != set(names):
        return False
    layers = [product_of(getattr(net, name)) for name in names[:4]]
    gated = layers[0].out_features == 2 * layers[3].in_features
    return gated and all(is_plain(layer) and layer.bias is None for layer in layers)


def _factors(layers: Sequence[nn.Module]) -> list[Tensor | None]:
    return [factor for layer in layers for factor in factors_of(layer)]


def _product(out: nn.Module | None, seen_BTW: Tensor) -> Tensor:
    return seen_BTW if out is None else wide_linear(out, seen_BTW)


def fused_layers(model: Any, rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> LayerStack:
    """The fused layers of a language model, or the stock ones where that fails."""
    layers = model.layers
    try:
        if model.embed_tokens.weight.is_cuda and find_spec("triton") is None:
            raise UnknownLayer("Triton is not installed")
        mixed = any(has_mixer(layer) for layer in layers)
        fused = [FusedLayer(mixer_of(layer) if mixed else parts_of(layer)) for layer in layers]
        found = reversed(list(enumerate(layers)))
        kinds = {(type(layer.mlp), is_delta(layer), fused[i].fine): i for i, layer in found}
        last = mixer_norm(model.norm) if mixed else norm_of(model.norm)
        for i in kinds.values():
            check(layers[i], fused[i], rotary)
    except Exception as error:  # a kernel that this GPU or Triton cannot build is a reason to be slow, not to stop
        fall_back(
            "the language model runs through its stock layers, which is slower and takes more memory than the forecast "
            f"(model.gradient_checkpointing: true lowers it): {str(error).splitlines()[0]}"
        )
        return LayerStack(layers, model.norm)
    return LayerStack(fused, partial(fused[0].norm, norm=last), torch.float32)


def check(layer: Any, fused: FusedLayer, rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    """Compare a fused layer with the stock one on random input; raises ``UnknownLayer`` where they disagree."""
    weight, stock_layer = layer.input_layernorm.weight, _with_products(layer)
    narrow = weight.dtype != torch.float32
    wide = deepcopy(stock_layer).float() if narrow else None
    generator, squares = torch.Generator().manual_seed(0), []
    for _ in range(DRAWS if narrow else 1):
        drawn = [torch.randn(1, TRIAL_TOKENS, weight.shape[0], generator=generator) for _ in range(2)]
        hidden, gradient = (x.to(weight.device, weight.dtype) for x in drawn)
        positions = torch.arange(TRIAL_TOKENS, device=weight.device)[None, None].expand(3, 1, -1)
        given: dict[str, Any] = {"position_embeddings": rotary(hidden, positions), "sensorium_attention": MaskedAttention()}
        with torch.enable_grad():
            with watching(routers_of([stock_layer])) as seen:
                entered = hidden.clone().requires_grad_()
                out = stock_layer(entered, **given)
                stock = [out, *_gradients(out, entered, stock_layer, gradient, layer)]
            # The same experts: where two are nearly as likely, a rounding would send a token elsewhere.
            routes = torch.stack([one.ids_TK for one in seen], 1) if seen else None
            with nullcontext() if routes is None else replaying(routers_of([layer]), routes):
                entered = hidden.float().requires_grad_()
                out = fused(entered, **given)
                found = [out, *_gradients(out, entered, layer, gradient, layer)]
        expected = stock if wide is None else _in_float32(wide, layer, rotary, hidden, positions, gradient, routes)
        squares.append(_squared_errors(found, stock, expected))
    own, from_stock, from_expected, size = torch.stack(squares).sum(0).unbind(1)
    scale = size.sqrt().clamp(min=1e-20)
    errors = torch.minimum(from_stock, from_expected).sqrt() / scale
    errors = errors.masked_fill(~(from_stock + from_expected).isfinite(), torch.inf)
    if narrow:
        rounded = own.sqrt() / scale
        bounds = FACTOR * rounded.clamp(min=float(rounded[size > 0].median()))
    else:
        bounds = torch.full_like(errors, DELTA_BOUND if is_delta(layer) else BOUND)
    names = ["result", "input", *(name for name, parameter in layer.named_parameters() if parameter.requires_grad)]
    i = int((errors / bounds).argmax())
    if not errors[i] <= bounds[i]:
        raise UnknownLayer(
            f"a fused {type(layer).__name__} is {errors[i]:.2g} off the stock one (bound {bounds[i]:.2g}) in its {names[i]}"
        )


def _in_float32(
    wide: Any,
    layer: Any,
    rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    hidden: Tensor,
    positions: Tensor,
    gradient: Tensor,
    routes: Tensor | None,
) -> list[Tensor | None]:
    entered = hidden.float().requires_grad_()
    with torch.enable_grad(), nullcontext() if routes is None else replaying(routers_of([wide]), routes):
        out = wide(entered, position_embeddings=rotary(entered, positions), sensorium_attention=MaskedAttention())
        return [out, *_gradients(out, entered, wide, gradient.float(), layer)]


def _with_products(layer: Any) -> Any:
    """The layer; one with merged adapters as a copy with plain linear layers of the merged weights in their place."""
    if not any(hasattr(part, "product") for part in layer.modules()):
        return layer
    plain = deepcopy(layer)
    for name, part in list(plain.named_modules()):
        if hasattr(part, "product"):
            product = part.product[0]
            linear = nn.Linear(1, 1, bias=False)
            linear.weight, linear.bias = nn.Parameter(product.weight.detach().clone()), product.bias
            plain.set_submodule(name, linear)
    return plain


def _gradients(out: Tensor, entered: Tensor, made_by: Any, gradient: Tensor, layer: Any) -> list[Tensor | None]:
    """Gradients of the input and of what learns in ``layer``, of whose merged weights ``made_by`` may have had copies."""
    named = {name: parameter for name, parameter in made_by.named_parameters() if parameter.requires_grad}
    of_input, *found = torch.autograd.grad(out, [entered, *named.values()], gradient, allow_unused=True)
    by_name: dict[str, Tensor | None] = dict(zip(named, found, strict=True))
    for name, parameter in layer.named_parameters():
        owner, adapted, part = name.partition(".lora_")
        whole_OI = by_name.get(f"{owner}.weight") if adapted else None
        if parameter.requires_grad and whole_OI is not None:
            _, a_RI, b_OR, scale = layer.get_submodule(owner).product[0].parts
            a_RI, b_OR, whole_OI = a_RI.to(whole_OI), b_OR.to(whole_OI), scale * whole_OI
            by_name[name] = b_OR.T @ whole_OI if part.startswith("A") else whole_OI @ a_RI.T
    return [of_input, *(by_name[name] for name, parameter in layer.named_parameters() if parameter.requires_grad)]


def _squared_errors(
    found: Sequence[Tensor | None], stock: Sequence[Tensor | None], expected: Sequence[Tensor | None]
) -> Tensor:
    """[N, 4] of N tensors: squared distances of stock from expected, and of found from both; the size of expected.

    All are 0 where stock and expected have no gradient; where only ``found`` has none, it counts as zeros.
    """
    rows = []
    for one, other, right in zip(found, stock, expected, strict=True):
        if other is None or right is None:
            rows.append(torch.zeros(4, dtype=torch.float64))
            continue
        wide, of_stock, of_right = (
            torch.zeros_like(right, dtype=torch.float32) if x is None else x.detach().float() for x in (one, other, right)
        )
        parts = (of_stock - of_right, wide - of_stock, wide - of_right, of_right)
        rows.append(torch.stack([part.norm() for part in parts]).double().cpu() ** 2)
    return torch.stack(rows)

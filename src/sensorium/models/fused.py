"""Decoder layers with fused norms, rotation and gate: the linear layers of the stock modules, kernels between them.

Used on CUDA in place of a stock layer's own forward, with the same parameters and the same signature. Each kind of layer is
held against its stock forward, values and gradients, before it is used; where they disagree, or the layer is not known, the
stock layers are used, with a warning that says why.
"""

import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from sensorium.models.attention import Attention, MaskedAttention
from sensorium.models.layer_parts import GatedMLP, LayerParts, NormWeights, UnknownLayer, parts_of

DecoderLayer = Callable[..., Tensor]
# How far values and gradients may be from the stock layer's, relative to the largest.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 0.01}
TRIAL_TOKENS = 48


class FusedLayer:
    """One decoder layer."""

    def __init__(self, parts: LayerParts) -> None:
        from sensorium.models import layer_kernels

        self._parts, self._kernels = parts, layer_kernels

    def __call__(
        self, hidden_BTW: Tensor, *, position_embeddings: tuple[Tensor, Tensor], sensorium_attention: Attention
    ) -> Tensor:
        """What the stock layer returns."""
        parts, kernels = self._parts, self._kernels
        normed_BTW = self._norm(hidden_BTW, parts.before)
        query, key, value = (
            part(normed_BTW).unflatten(-1, (-1, parts.head_dim)) for part in (parts.query, parts.key, parts.value)
        )
        if parts.norms is not None:
            query, key = self._norm(query, parts.norms[0]), self._norm(key, parts.norms[1])
        query, key = (kernels.Rotate.apply(x, *position_embeddings) for x in (query, key))
        seen_BTHD = sensorium_attention(
            parts.index, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), parts.scaling
        )
        seen_BTW = parts.out(seen_BTHD.flatten(2))
        normed_BTW, sum_BTW = kernels.AddNorm.apply(seen_BTW, hidden_BTW, parts.between.weight, parts.between.eps)
        return sum_BTW + self._inner(normed_BTW)

    def _norm(self, x: Tensor, norm: NormWeights) -> Tensor:
        normed: Tensor = self._kernels.Norm.apply(x, norm.weight, norm.eps)
        return normed

    def _inner(self, normed_BTW: Tensor) -> Tensor:
        inner = self._parts.inner
        if isinstance(inner, GatedMLP):
            down: Tensor = inner.down(self._kernels.Gate.apply(inner.gate(normed_BTW), inner.up(normed_BTW)))
            return down
        return inner(normed_BTW)


def fused_layers(layers: Sequence[Any], rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> list[DecoderLayer]:
    """The layers fused, or the stock ones where that cannot be done."""
    try:
        if find_spec("triton") is None:
            raise UnknownLayer("Triton is not installed")
        fused = [FusedLayer(parts_of(layer)) for layer in layers]
        kinds = {type(layer.mlp): i for i, layer in reversed(list(enumerate(layers)))}
        for i in kinds.values():
            check(layers[i], fused[i], rotary)
    except Exception as error:  # a kernel that this GPU or Triton cannot build is a reason to be slow, not to stop
        warnings.warn(
            f"the language model runs through its stock layers, which is slower: {str(error).splitlines()[0]}", stacklevel=2
        )
        return list(layers)
    return list(fused)


def check(layer: Any, fused: FusedLayer, rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    """Hold a fused layer against the stock one on random input; raises ``UnknownLayer`` where they disagree."""
    weight = layer.input_layernorm.weight
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, TRIAL_TOKENS, weight.shape[0], generator=generator) for _ in range(2)]
    hidden, gradient = (x.to(weight.device, weight.dtype) for x in drawn)
    positions = torch.arange(TRIAL_TOKENS, device=weight.device)[None, None].expand(3, 1, -1)
    given: dict[str, Any] = {"position_embeddings": rotary(hidden, positions), "sensorium_attention": MaskedAttention()}
    learning = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    results = []
    with torch.enable_grad():
        for each in (layer, fused):
            entered = hidden.clone().requires_grad_()
            out = each(entered, **given)
            results.append([out, *torch.autograd.grad(out, [entered, *learning], gradient, allow_unused=True)])
    for expected, found in zip(*results, strict=True):
        if expected is None and found is None:
            continue
        expected, found = expected.detach(), found.detach()
        error = float((found.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1e-20))
        if not error <= BOUNDS[weight.dtype]:
            raise UnknownLayer(
                f"a fused {type(layer).__name__} is {error:.2g} off the stock one (bound {BOUNDS[weight.dtype]:g})"
            )

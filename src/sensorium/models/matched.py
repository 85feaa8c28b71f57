"""Decoder layers in which a token's result depends on its own context alone (``model.precision: matched``).

Engine and learner run these layers, over the same linear layers of the stock modules; only where attention finds its keys
differs. So what was sampled is what is trained, bit for bit. ``matched_ops`` defines the order of sums.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from sensorium.kernels.first_use import fall_back
from sensorium.kernels.layer_ops import GatedMLP, LayerParts, UnknownLayer, norm_of, parts_of
from sensorium.kernels.matched_ops import (
    MatchedOps,
    MatchedProduct,
    integer_weights,
    log_probs,
    matched_linear,
    refuse_unknown,
)
from sensorium.models.attention import Attention
from sensorium.models.delta_net import is_delta
from sensorium.models.family import Tower, one_axis
from sensorium.models.fused import LayerStack
from sensorium.models.prepared_media import TowerInput
from sensorium.models.segment_layout import Features
from sensorium.models.tower import VisionTower
from sensorium.vocabulary.errors import ModelError


class MatchedLayer:
    """One decoder layer over a float32 residual stream."""

    def __init__(self, parts: LayerParts, ops: MatchedOps) -> None:
        if not isinstance(parts.inner, GatedMLP):
            raise UnknownLayer(f"{type(parts.inner).__name__} computes a token together with others")
        self._parts, self._ops, self._mlp = parts, ops, parts.inner
        for layer in (parts.query, parts.key, parts.value, parts.out, self._mlp.gate, self._mlp.up, self._mlp.down):
            refuse_unknown(layer)

    def __call__(
        self, hidden_BTW: Tensor, *, position_embeddings: tuple[Tensor, Tensor], sensorium_attention: Attention
    ) -> Tensor:
        parts, ops = self._parts, self._ops
        normed_BTW = ops.norm(hidden_BTW, parts.before)
        layers = (parts.query, parts.key, parts.value)
        query, key, value = (matched_linear(layer, normed_BTW, ops).unflatten(-1, (-1, parts.head_dim)) for layer in layers)
        if parts.norms is not None:
            query, key = ops.norm(query, parts.norms[0]), ops.norm(key, parts.norms[1])
        query, key = (ops.rotate(x, *one_axis(position_embeddings)) for x in (query, key))
        seen_BTHD = sensorium_attention(
            parts.index, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), parts.scaling
        )
        summed_BTW = hidden_BTW + matched_linear(parts.out, seen_BTHD.flatten(2), ops, torch.float32)
        normed_BTW = ops.norm(summed_BTW, parts.between)
        inner_BTF = ops.gate(matched_linear(self._mlp.gate, normed_BTW, ops), matched_linear(self._mlp.up, normed_BTW, ops))
        return summed_BTW + matched_linear(self._mlp.down, inner_BTF, ops, torch.float32)


def matched_layers(model: Any, ops: MatchedOps) -> LayerStack:
    """The matched layers of a language model; one that cannot be computed token by token is refused."""
    try:
        if any(is_delta(layer) for layer in model.layers):
            raise UnknownLayer("gated delta nets sum a prompt in chunks and a response token by token")
        layers = [MatchedLayer(parts_of(layer), ops) for layer in model.layers]
        norm: Callable[[Tensor], Tensor] = partial(ops.norm, norm=norm_of(model.norm))
    except UnknownLayer as error:
        raise ModelError(
            f"model.precision is 'matched', which this model has no layers for: {error}. Use model.precision: fast; the "
            "mismatch of engine and learner is then corrected by algorithm.correction."
        ) from error
    return LayerStack(layers, norm, torch.float32)


@torch.no_grad()
def matched_logprobs(logits_MV: Tensor, targets_M: Tensor, forbidden_F: Tensor, temperature: float) -> Tensor:
    """Float32 log-probs of tokens, bit for bit as the sampler gives them."""
    # By a tensor: by a number, a GPU would multiply with its reciprocal.
    scaled_MV = logits_MV.float() / torch.tensor([[temperature]], dtype=torch.float32, device=logits_MV.device)
    scaled_MV.index_fill_(1, forbidden_F, -torch.inf)
    shifted_MV, weights_MV = integer_weights(scaled_MV)
    chosen_M = shifted_MV.gather(1, targets_M[:, None])[:, 0]
    return log_probs(chosen_M, weights_MV.sum(-1), logits_MV.shape[-1]).float()


class MatchedLinears(TorchFunctionMode):
    """Inside this mode, linear layers are matched products."""

    def __init__(self, ops: MatchedOps) -> None:
        super().__init__()
        self._ops = ops

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return (self._linear if func is linear else func)(*args, **(kwargs or {}))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return MatchedProduct.apply(x, weight, bias, x.dtype, self._ops)


class TowerBatching:
    """Decides which media a tower encodes in one pass. Without ``ops`` (precision ``fast``): all of them.

    Alone, a medium always gives the same features. In a batch it does where every operation treats a row by itself, as in a
    Qwen vision tower on CUDA whose linear layers are matched products. The first pass over several media is compared with
    passes over single ones. Where a bit differs, and for other towers, each medium is a pass by itself.
    """

    def __init__(self, ops: MatchedOps | None, device: torch.device) -> None:
        self._ops, self._device = ops, device
        self._shares: dict[Tower, bool] = {}

    def linears(self, tower: Tower) -> AbstractContextManager[Any]:
        """The context of a pass of the tower, and of the recomputation of its blocks."""
        return MatchedLinears(self._ops) if self._ops is not None and self._may_share(tower) else nullcontext()

    def together(
        self, tower: Tower, media: Sequence[Any], prepare: Callable[[Sequence[Any]], Sequence[TowerInput]]
    ) -> bool:
        """Whether these media may share a pass."""
        if self._ops is None or len(media) < 2:
            return True
        if not self._may_share(tower):
            return False
        if tower not in self._shares:
            self._shares[tower] = self._alike(tower, prepare(media))
            if not self._shares[tower]:
                fall_back(
                    "matched precision: a tower's features depend on what is encoded together, so media go one by one"
                )
        return self._shares[tower]

    def _may_share(self, tower: Tower) -> bool:
        return isinstance(tower, VisionTower) and self._device.type == "cuda"

    @torch.no_grad()
    def _alike(self, tower: Tower, prepared: Sequence[TowerInput]) -> bool:
        """Whether the first and the last of several media have the features that they have alone."""
        with self.linears(tower):
            several = tower(prepared)
            return all(_equal(several[i], tower([prepared[i]])[0]) for i in (0, -1))


def _equal(one: Features, other: Features) -> bool:
    pairs = zip((one.embeds_NH, *one.deepstack_NH), (other.embeds_NH, *other.deepstack_NH), strict=True)
    return all(torch.equal(first, second) for first, second in pairs)

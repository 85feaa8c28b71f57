"""The weights of a small decoder as the compiled step reads them: known parts, in tiles, packed anew when they change.

weight [N, K] of a linear layer, tiles of C columns  ->  [N / C, K, C]: what one tile multiplies stands together
"""

from collections.abc import Sequence
from ctypes import POINTER, Structure, c_double, c_int64, c_void_p
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from sensorium.engines.native.lean_feed import RotaryTable
from sensorium.engines.native.recording import ModuleState
from sensorium.models.layer_parts import GatedMLP, LayerParts, NormWeights, UnknownLayer, norm_of, parts_of
from sensorium.models.policy import Policy

MOST_WEIGHTS = 1 << 22
"""Weights that a token is multiplied with. Steps of larger models spend their time in products, which torch has as fast."""
HEAD_STEP = 4
"""The narrowest vectors of feed.c."""


class CNorm(Structure):
    """``struct norm`` of feed.c."""

    _fields_: ClassVar = [("weight", c_void_p), ("eps", c_double)]


class CProduct(Structure):
    """``struct product`` of feed.c."""

    _fields_: ClassVar = [("weight", c_void_p), ("bias", c_void_p), ("inner", c_int64), ("outer", c_int64)]


class CLayer(Structure):
    """``struct layer`` of feed.c."""

    _fields_: ClassVar = [
        *((name, CNorm) for name in ("before", "query", "key", "between")),
        *((name, CProduct) for name in ("query_key_value", "out", "gate_up", "down")),
        ("scaling", c_double),
    ]


class CModel(Structure):
    """``struct model`` of feed.c."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("layers", "width", "heads", "kv_heads", "size")),
        ("layer", POINTER(CLayer)),
        ("embedding", c_void_p),
        ("last", CNorm),
        ("head", CProduct),
    ]


class PackedWeights:
    """A policy's decoder for the compiled step. Layers that it does not know are refused with ``UnknownLayer``."""

    def __init__(self, policy: Policy, tile_columns: int) -> None:
        self.check(policy)
        self._policy = policy
        self._columns = tile_columns
        self._rotary = RotaryTable(policy)
        self._table_PE = torch.empty(0, 0)
        self._state = ModuleState(self._modules)
        self._made_of: list[tuple[int, int]] = []
        self._held: list[Tensor] = []
        self._model = CModel()
        self.weights = _count(policy)

    @property
    def _modules(self) -> tuple[Any, Any]:
        return self._policy.adapter.language_model, self._policy.adapter.head

    def is_of_the_same_modules(self) -> bool:
        """False if modules came, went or were exchanged."""
        return self._state.is_of(self._modules)

    def forget(self) -> None:
        """Pack anew at the next use, whether a change can be seen or not."""
        self._made_of = []

    def current(self) -> CModel:
        """The weights of the moment."""
        tensors = self._state.held()
        made_of = [(tensor.data_ptr(), tensor._version) for tensor in tensors]
        if made_of != self._made_of:
            # Held on to, so that no other weights can come to lie where these were.
            self._held = [tensor.detach() for tensor in tensors]
            self._model = self._packed()
            self._table_PE = self._rotary.upto(0)
            self._made_of = made_of
        return self._model

    def table(self, last: int) -> Tensor:
        """Cosines and sines of the positions up to this one."""
        if last >= len(self._table_PE):
            self._table_PE = self._rotary.upto(last)
        return self._table_PE

    @staticmethod
    def check(policy: Policy) -> None:
        """Refuse what the compiled step does not compute, or not faster."""
        model, head = policy.adapter.language_model, policy.adapter.head
        if policy.device.type != "cpu" or policy.sharding is not None or policy.matched is not None:
            raise UnknownLayer("only whole layers on the CPU are compiled")
        weights = [*model.parameters(), *head.parameters()]
        if any(tensor.dtype != torch.float32 or not tensor.is_contiguous() for tensor in weights):
            raise UnknownLayer("only float32 weights are compiled")
        if any(module._forward_hooks or module._forward_pre_hooks for part in (model, head) for module in part.modules()):
            raise UnknownLayer("a layer has hooks")
        if type(model.embed_tokens) is not nn.Embedding:
            raise UnknownLayer(f"{type(model.embed_tokens).__name__} is no plain embedding")
        if _count(policy) > MOST_WEIGHTS:
            raise UnknownLayer("it is large enough for the products of torch")
        norm_of(model.norm)
        _linears((head,))
        layers = [parts_of(layer) for layer in model.layers]
        for i, parts in enumerate(layers):
            _refuse_unknown(parts, i)
        if RotaryTable(policy).upto(0).shape[1] != 2 * layers[0].head_dim:
            raise UnknownLayer("a part of each head is not rotated")

    def _layers(self) -> list[LayerParts]:
        return [parts_of(layer) for layer in self._policy.adapter.language_model.layers]

    def _packed(self) -> CModel:
        model, head = self._modules
        layers = self._layers()
        size = layers[0].head_dim
        heads, kv_heads = (_linears((part,))[0].out_features // size for part in (layers[0].query, layers[0].key))
        return CModel(
            layers=len(layers),
            width=model.embed_tokens.weight.shape[1],
            heads=heads,
            kv_heads=kv_heads,
            size=size,
            layer=(CLayer * len(layers))(*(self._layer(parts) for parts in layers)),
            embedding=model.embed_tokens.weight.data_ptr(),
            last=_norm(norm_of(model.norm)),
            head=self._product(head),
        )

    def _layer(self, parts: LayerParts) -> CLayer:
        assert isinstance(parts.inner, GatedMLP)
        query, key = (CNorm(), CNorm()) if parts.norms is None else (_norm(norm) for norm in parts.norms)
        return CLayer(
            before=_norm(parts.before),
            query=query,
            key=key,
            between=_norm(parts.between),
            query_key_value=self._product(parts.query, parts.key, parts.value),
            out=self._product(parts.out),
            gate_up=self._product(parts.inner.gate, parts.inner.up),
            down=self._product(parts.inner.down),
            scaling=parts.scaling,
        )

    @torch.no_grad()
    def _product(self, *modules: nn.Module) -> CProduct:
        """Linear layers of one input as one product."""
        layers = _linears(modules)
        weight_NK = torch.cat([layer.weight for layer in layers])
        outer, inner = weight_NK.shape
        weight_NK = pad(weight_NK, (0, 0, 0, -outer % self._columns))
        packed = weight_NK.view(-1, self._columns, inner).transpose(1, 2).contiguous()
        self._held.append(packed)
        if all(layer.bias is None for layer in layers):
            return CProduct(packed.data_ptr(), None, inner, outer)
        bias_N = torch.cat([_no_bias(layer) if layer.bias is None else layer.bias for layer in layers])
        self._held.append(bias_N)
        return CProduct(packed.data_ptr(), bias_N.data_ptr(), inner, outer)


def _no_bias(layer: nn.Linear) -> Tensor:
    return layer.weight.new_zeros(layer.out_features)


def _norm(norm: NormWeights) -> CNorm:
    return CNorm(norm.weight.data_ptr(), norm.eps)


def _refuse_unknown(parts: LayerParts, index: int) -> None:
    if parts.index != index:
        raise UnknownLayer(f"layer {index} calls itself layer {parts.index}")
    if parts.head_dim % HEAD_STEP:
        raise UnknownLayer(f"heads of {parts.head_dim} are not in whole vectors")
    if not isinstance(parts.inner, GatedMLP):
        raise UnknownLayer(f"{type(parts.inner).__name__} is no gated MLP")
    _linears((parts.query, parts.key, parts.value, parts.out, parts.inner.gate, parts.inner.up, parts.inner.down))


def _linears(modules: Sequence[nn.Module]) -> list[nn.Linear]:
    for module in modules:
        if type(module) is not nn.Linear:
            raise UnknownLayer(f"{type(module).__name__} is no plain linear layer")
    return list(modules)  # type: ignore[arg-type]


def _count(policy: Policy) -> int:
    """Weights that a token is multiplied with."""
    layers = sum(tensor.numel() for tensor in policy.adapter.language_model.layers.parameters())
    return layers + int(policy.adapter.head.weight.numel())

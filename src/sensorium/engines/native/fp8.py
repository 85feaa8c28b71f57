"""The decode step over FP8 copies of the layers' weights (``rollout.quantization: fp8``).

    weights  bfloat16 ──▶ e4m3, a scale for each output; made anew when they change, at the same addresses
    inputs   norm, gate ──▶ e4m3, a scale for each row (or for 128 inner values of it); attention's output stays bfloat16
    products e4m3 · e4m3 ──▶ float32 sums, scaled by both

Queries, keys and values are one product, and so are gate and up. Prefill, embeddings, head, norms, the residual stream and
what is in the cache are as without quantization. Log-probs are those of the policy that samples, and the learner's differ:
``mismatch/*`` measures by how much, ``algorithm.correction`` weighs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from sensorium.engines.native.decode_state import DecodeRows, TorchOps, Unplaced
from sensorium.engines.native.key_values import PagePool
from sensorium.kernels import fp8
from sensorium.kernels.fp8 import Fp8Rows
from sensorium.kernels.layer_ops import (
    GatedMLP,
    LayerParts,
    NormWeights,
    UnknownLayer,
    has_mixer,
    is_plain,
    norm_of,
    parts_of,
)
from sensorium.models.policy import Policy
from sensorium.vocabulary.errors import EngineError

LEAST_CAPABILITY = (8, 9)  # the first GPUs that multiply FP8 numbers
FEW_ROWS = 128  # up to so many rows our kernels multiply, above the library
INNER, OUTPUTS = 128, 64  # that inner sizes and numbers of outputs are multiples of
OFF = "Leave rollout.quantization out (none)"


def refuse_without_fp8(device: torch.device) -> None:
    """Refuse a device that does not multiply FP8 numbers; nothing falls back."""
    reason = ""
    if device.type != "cuda":
        reason = f"this engine computes on the device '{device.type}'"
    elif torch.version.hip is not None:
        reason = "this GPU is not NVIDIA's"
    elif (found := torch.cuda.get_device_capability(device)) < LEAST_CAPABILITY:
        reason = f"{torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]}"
    elif find_spec("triton") is None:
        reason = "triton is not installed"
    if reason:
        raise EngineError(
            "rollout.quantization is 'fp8', which needs an NVIDIA GPU of compute capability 8.9 or newer (Ada, Hopper, "
            f"Blackwell) and triton, and {reason}. {OFF}."
        )


@dataclass(frozen=True)
class Fp8Weight:
    """The weights of linear layers one below the other, in FP8, and their biases."""

    layers: tuple[nn.Linear, ...]
    rows: Fp8Rows

    @property
    def biases(self) -> list[Tensor]:
        """One for each layer, or none at all."""
        return [layer.bias for layer in self.layers if layer.bias is not None]


class TorchProducts:
    """Products with FP8 weights in plain torch: the reference, which widens them."""

    quantise_into = staticmethod(fp8.quantise_into)

    def __init__(self) -> None:
        self._weights: list[Fp8Weight] = []

    @torch.no_grad()
    def weight(self, layers: Sequence[nn.Linear]) -> Fp8Weight:
        """A copy of these layers' weights in FP8, which ``renew`` makes again."""
        first = layers[0].weight
        total = sum(layer.out_features for layer in layers)
        made = Fp8Weight(tuple(layers), Fp8Rows.empty(total, first.shape[1], first.device))
        self._weights.append(made)
        self._fill(made)
        return made

    @torch.no_grad()
    def renew(self) -> None:
        """Weights changed in place: quantise them again."""
        for weight in self._weights:
            self._fill(weight)

    def _fill(self, weight: Fp8Weight) -> None:
        begin = 0
        for layer in weight.layers:
            end = begin + layer.out_features
            self.quantise_into(layer.weight.detach(), weight.rows.slice(begin, end))
            begin = end

    def quantised(self, x_BW: Tensor) -> Fp8Rows:
        """Rows with one scale each."""
        return fp8.quantise(x_BW)

    def parts(self, x_BK: Fp8Rows | Tensor, weight: Fp8Weight) -> Tensor:
        """A product in parts [P, B, N], without biases."""
        return fp8.product(x_BK, weight.rows)[None]

    def gated(self, x_BW: Fp8Rows, weight: Fp8Weight) -> Fp8Rows:
        """The inner values of a gated MLP."""
        few = x_BW.values_BK.shape[0] <= FEW_ROWS
        return fp8.gated_product(x_BW, weight.rows, weight.rows.values_BK.shape[0] // 2 // INNER if few else 1)

    def add_norm(
        self, parts_PBW: Tensor, biases: Sequence[Tensor], residual_BW: Tensor, norm: NormWeights
    ) -> tuple[Fp8Rows, Tensor]:
        """The norm of a product and the residual, and their sum."""
        sum_BW = parts_PBW.float().sum(0) + residual_BW + sum(bias.float() for bias in biases)
        return fp8.quantise(fp8.normed(sum_BW, norm.weight, norm.eps)), sum_BW


class KernelProducts(TorchProducts):
    """The products as kernels: ours for few rows, the library's for more."""

    def __init__(self) -> None:
        from sensorium.kernels import fp8_triton

        super().__init__()
        self._kernels = fp8_triton
        self.quantise_into = fp8_triton.quantise_into

    def quantised(self, x_BW: Tensor) -> Fp8Rows:
        """Rows with one scale each."""
        return self._kernels.quantise(x_BW)

    def parts(self, x_BK: Fp8Rows | Tensor, weight: Fp8Weight) -> Tensor:
        """A product in parts [P, B, N], without biases; of many rows one part in bfloat16."""
        rows = (x_BK if isinstance(x_BK, Tensor) else x_BK.values_BK).shape[0]
        if rows <= FEW_ROWS:
            return self._kernels.product_parts(x_BK, weight.rows)
        return fp8.scaled_product(self.quantised(x_BK) if isinstance(x_BK, Tensor) else x_BK, weight.rows)[None]

    def gated(self, x_BW: Fp8Rows, weight: Fp8Weight) -> Fp8Rows:
        """The inner values of a gated MLP."""
        if x_BW.values_BK.shape[0] <= FEW_ROWS:
            return self._kernels.gated_product(x_BW, weight.rows)
        return self._kernels.gated_rows(fp8.scaled_product(x_BW, weight.rows))

    def add_norm(
        self, parts_PBW: Tensor, biases: Sequence[Tensor], residual_BW: Tensor, norm: NormWeights
    ) -> tuple[Fp8Rows, Tensor]:
        """The norm of a product and the residual, and their sum."""
        bias_W = biases[0] if biases else None
        return self._kernels.add_norm(parts_PBW, bias_W, residual_BW, norm.weight, norm.eps)


@dataclass(frozen=True)
class _Layer:
    parts: LayerParts
    attention: Fp8Weight
    out: Fp8Weight
    inner: Fp8Weight
    down: Fp8Weight


class Fp8Step:
    """A decode step through FP8 copies of the weights. Refuses models whose layers it does not know."""

    name = "fp8 layers"

    def __init__(self, policy: Policy, ops: TorchOps, products: TorchProducts) -> None:
        self._policy, self._ops, self.products = policy, ops, products
        model = policy.adapter.language_model
        try:
            parts = [_known(layer) for layer in model.layers]
            self._last = norm_of(model.norm)
        except UnknownLayer as error:
            raise EngineError(
                "rollout.quantization is 'fp8', which is built for layers of attention and a gated MLP of plain linear "
                f"layers, and {error}. {OFF}."
            ) from error
        self._layers = [self._copied(layer) for layer in parts]

    def reference(self) -> "Fp8Step":
        """The same step, on the same copies of weights, in plain torch."""
        same = object.__new__(Fp8Step)
        same._policy, same._layers, same._last = self._policy, self._layers, self._last
        same._ops, same.products = TorchOps(), TorchProducts()
        return same

    def logits(self, rows: DecodeRows, pool: PagePool) -> Tensor:
        """The logits after every row's last token, whose keys and values are written."""
        ops, products = self._ops, self.products
        sum_BW, first_BW, angles = ops.begin(self._policy, rows, self._layers[0].parts.before)
        x_BW = products.quantised(first_BW)
        for place, layer, following in zip(pool.places, self._layers, [*self._layers[1:], None], strict=True):
            parts, block = layer.parts, pool.block[place]
            unplaced = Unplaced(parts, products.parts(x_BW, layer.attention), layer.attention.biases, angles)
            seen_BN = ops.attend(ops.placed(unplaced, rows, block), rows, block, parts.scaling)
            found_PBW = products.parts(seen_BN, layer.out)
            x_BW, sum_BW = products.add_norm(found_PBW, layer.out.biases, sum_BW, parts.between)
            found_PBW = products.parts(products.gated(x_BW, layer.inner), layer.down)
            if following is None:
                break
            x_BW, sum_BW = products.add_norm(found_PBW, layer.down.biases, sum_BW, following.parts.before)
        found_BW = found_PBW.sum(0)
        for bias in layer.down.biases:
            found_BW = found_BW + bias
        return self._policy.head_logits(ops.add_norm(found_BW, sum_BW, self._last)[0])

    def _copied(self, parts: LayerParts) -> _Layer:
        inner: Any = parts.inner
        groups: Any = ((parts.query, parts.key, parts.value), (parts.out,), (inner.gate, inner.up), (inner.down,))
        return _Layer(parts, *(self.products.weight(layers) for layers in groups))


def _known(layer: Any) -> LayerParts:
    """The parts of a layer, if all its products can be in FP8."""
    if has_mixer(layer):
        raise UnknownLayer(f"{type(layer).__name__} has a delta net, or norms after attention and MLP")
    parts = parts_of(layer)
    if not isinstance(parts.inner, GatedMLP):
        raise UnknownLayer(f"{type(parts.inner).__name__} is no gated MLP of three linear layers")
    first, inner = (parts.query, parts.key, parts.value), parts.inner
    for product in (*first, parts.out, inner.gate, inner.up, inner.down):
        if not is_plain(product):
            kind = type(product).__name__
            raise UnknownLayer(f"{kind} is no plain linear layer; adapters can be merged into one (model.lora.merge)")
        if product.in_features % INNER or product.out_features % OUTPUTS:
            raise UnknownLayer(
                f"a layer has {product.in_features} inputs and {product.out_features} outputs, which are no multiples of "
                f"{INNER} and {OUTPUTS}"
            )
    if len([product for product in first if getattr(product, "bias", None) is not None]) not in (0, 3):
        raise UnknownLayer("only some of query, key and value have a bias")
    if any(getattr(product, "bias", None) is not None for product in (inner.gate, inner.up)):
        raise UnknownLayer("gate or up has a bias")
    return parts

"""The decode step with gated MLPs in FP8 (``rollout.quantization: fp8``).

    weights  bfloat16 ──▶ e4m3, one scale; made anew when they change, at the same addresses
    inputs   norm, gate ──▶ e4m3, a scale for each row, so results do not depend on what else is in the batch
    products e4m3 · e4m3 ──▶ summed in float32; scaled where they are read

Gate and up are one product. Attention and its products, prefill, embeddings, head, the residual stream and what is in the
cache are as without quantization: on an H200 other products gained nothing in FP8, once rows are quantised for them.
Log-probs are those of the policy that samples, and the learner's differ: ``mismatch/*`` measures by how much,
``algorithm.correction`` weighs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from sensorium.engines.native.decode_state import DecodeRows, TorchOps
from sensorium.engines.native.key_values import PagePool
from sensorium.kernels import fp8
from sensorium.kernels.fp8 import Fp8Matrix, Fp8Rows
from sensorium.kernels.layer_ops import (
    GatedMLP,
    LayerParts,
    NormWeights,
    UnknownLayer,
    has_mixer,
    is_plain,
    norm_of,
    parts_of,
    wide_linear,
)
from sensorium.models.policy import Policy
from sensorium.vocabulary.errors import EngineError

LEAST_CAPABILITY = (8, 9)  # the first GPUs that multiply FP8 numbers
FEW_ROWS = 128  # up to so many rows down is our kernel's product, above the library's
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
    """The weights of linear layers one below the other, in FP8."""

    layers: tuple[nn.Linear, ...]
    matrix: Fp8Matrix

    @torch.no_grad()
    def renew(self) -> None:
        """Quantise the weights as they are now."""
        fp8.quantise_weights(tuple(layer.weight for layer in self.layers), self.matrix)

    @classmethod
    def of(cls, *layers: nn.Linear) -> "Fp8Weight":
        """A copy of these layers' weights."""
        outputs, first = sum(layer.out_features for layer in layers), layers[0].weight
        made = cls(layers, Fp8Matrix.empty(outputs, first.shape[1], first.device))
        made.renew()
        return made


class TorchProducts:
    """What is computed in FP8, and what makes its inputs, in plain torch: the reference."""

    def out(self, layer: nn.Module, seen_BN: Tensor, sum_BW: Tensor, norm: NormWeights) -> tuple[Fp8Rows, Tensor]:
        """Attention's output layer: the norm of its result and the residual, in FP8, and their sum."""
        summed_BW = sum_BW + wide_linear(layer, seen_BN)
        return fp8.quantise(fp8.normed(summed_BW, norm.weight, norm.eps)), summed_BW

    def gated(self, x_BW: Fp8Rows, weight: Fp8Weight) -> Fp8Rows:
        """The inner values of a gated MLP."""
        both_BN = fp8.product(x_BW, weight.matrix).bfloat16()
        return fp8.gated_rows(both_BN, x_BW.scales_B, weight.matrix.scale)

    def down(self, x_BF: Fp8Rows, weight: Fp8Weight, sum_BW: Tensor, norm: NormWeights) -> tuple[Tensor, Tensor]:
        """The last layer of an MLP: the norm of its result and the residual, in the norm's kind, and their sum."""
        found_BW = fp8.product(x_BF, weight.matrix) * (x_BF.scales_B * weight.matrix.scale)[:, None]
        if (bias_W := weight.layers[0].bias) is not None:
            found_BW = found_BW + bias_W
        summed_BW = sum_BW + found_BW
        return fp8.normed(summed_BW, norm.weight, norm.eps).to(norm.weight.dtype), summed_BW


class KernelProducts(TorchProducts):
    """The same as kernels, ours and the library's."""

    def __init__(self) -> None:
        from sensorium.kernels import decode_triton, fp8_triton

        self._kernels, self._wide = fp8_triton, decode_triton

    def out(self, layer: nn.Module, seen_BN: Tensor, sum_BW: Tensor, norm: NormWeights) -> tuple[Fp8Rows, Tensor]:
        """Attention's output layer: the norm of its result and the residual, in FP8, and their sum."""
        bias_W = None
        if self._wide.fits([layer], seen_BN):
            assert isinstance(layer, nn.Linear)
            parts_PBW, bias_W = self._wide.product_parts(seen_BN, [layer.weight]), layer.bias
        else:
            parts_PBW = wide_linear(layer, seen_BN)[None]
        x_BW = Fp8Rows.empty(sum_BW.shape[0], sum_BW.shape[1], sum_BW.device)
        return x_BW, self._kernels.add_norm(parts_PBW, None, bias_W, sum_BW, norm.weight, norm.eps, x_BW)

    def gated(self, x_BW: Fp8Rows, weight: Fp8Weight) -> Fp8Rows:
        """The inner values of a gated MLP."""
        both_BN = fp8.library_product(x_BW, weight.matrix)
        return self._kernels.gated_rows(both_BN, x_BW.scales_B, weight.matrix.scale)

    def down(self, x_BF: Fp8Rows, weight: Fp8Weight, sum_BW: Tensor, norm: NormWeights) -> tuple[Tensor, Tensor]:
        """The last layer of an MLP: the norm of its result and the residual, in the norm's kind, and their sum."""
        few = len(sum_BW) <= FEW_ROWS
        matrix = weight.matrix
        parts_PBW = self._kernels.few_rows_product(x_BF, matrix) if few else fp8.library_product(x_BF, matrix)[None]
        x_BW = torch.empty_like(sum_BW, dtype=norm.weight.dtype)
        scales, bias_W = (x_BF.scales_B, matrix.scale), weight.layers[0].bias
        return x_BW, self._kernels.add_norm(parts_PBW, scales, bias_W, sum_BW, norm.weight, norm.eps, x_BW)


@dataclass(frozen=True)
class _Layer:
    parts: LayerParts
    inner: Fp8Weight
    down: Fp8Weight
    following: NormWeights


class Fp8Step:
    """A decode step with MLPs in FP8. Refuses models whose layers it does not know."""

    name = "fp8 layers"

    def __init__(self, policy: Policy, ops: TorchOps, products: TorchProducts) -> None:
        self._policy, self._ops, self.products = policy, ops, products
        model = policy.adapter.language_model
        try:
            parts = [_known(layer) for layer in model.layers]
            norms = [*(part.before for part in parts[1:]), norm_of(model.norm)]
        except UnknownLayer as error:
            raise EngineError(
                "rollout.quantization is 'fp8', which is built for layers of attention and a gated MLP of plain linear "
                f"layers, and {error}. {OFF}."
            ) from error
        self._layers = [_copied(part, norm) for part, norm in zip(parts, norms, strict=True)]

    @property
    def weights(self) -> list[Fp8Weight]:
        """All that is in FP8."""
        return [weight for layer in self._layers for weight in (layer.inner, layer.down)]

    def renew(self) -> None:
        """Weights changed in place: quantise them again."""
        for weight in self.weights:
            weight.renew()

    def logits(self, rows: DecodeRows, pool: PagePool) -> Tensor:
        """The logits after every row's last token, whose keys and values are written."""
        sum_BW, x_BW, angles = self._ops.begin(self._policy, rows, self._layers[0].parts.before)
        for layer, place in zip(self._layers, pool.places, strict=True):
            x_BW, sum_BW = self._through(layer, x_BW, sum_BW, angles, rows, pool.block[place])
        return self._policy.head_logits(x_BW)

    def off_reference(self, rows: DecodeRows, narrow: DecodeRows, pool: PagePool, count: int) -> float | None:
        """How far ``count`` rows are from plain torch, at most of all layers; None where no row is finite.

        Each layer is held against the reference of that layer on the same inputs, and what it adds to rows is compared.
        Logits at the end would tell nothing: a bfloat16 rounding sends a few inputs to another FP8 number, a sixteenth
        away. That is 3 % of what one layer adds, and over 36 layers as much as FP8 changes altogether.
        """
        reference = object.__new__(Fp8Step)
        reference._ops, reference.products = TorchOps(), TorchProducts()
        sum_BW, x_BW, angles = self._ops.begin(self._policy, rows, self._layers[0].parts.before)
        begun = _off(x_BW, reference._ops.begin(self._policy, narrow, self._layers[0].parts.before)[1], count)
        found = []
        for layer, place in zip(self._layers, pool.places, strict=True):
            block = pool.block[place]
            expected_x_BW, expected_BW = reference._through(layer, x_BW, sum_BW, angles, narrow, block)
            given_BW, (x_BW, sum_BW) = sum_BW, self._through(layer, x_BW, sum_BW, angles, rows, block)
            found += [*_off(sum_BW - given_BW, expected_BW - given_BW, count), *_off(x_BW, expected_x_BW, count)]
        return float(torch.stack([*begun, *found]).max()) if found else None

    def _through(
        self, layer: _Layer, x_BW: Tensor, sum_BW: Tensor, angles: tuple[Tensor, Tensor], rows: DecodeRows, block: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The normed input of the next layer, and the residual stream."""
        ops, products, parts = self._ops, self.products, layer.parts
        seen_BN = ops.attend(ops.project(parts, x_BW, angles, rows, block), rows, block, parts.scaling)
        narrow_BW, sum_BW = products.out(parts.out, seen_BN, sum_BW, parts.between)
        return products.down(products.gated(narrow_BW, layer.inner), layer.down, sum_BW, layer.following)


def _off(found_BW: Tensor, expected_BW: Tensor, count: int) -> list[Tensor]:
    """How far finite rows are from others: of their length the mean, or a third of the largest. Nothing if there are none.

    A row whose result is due to one large number may be off by an eighth, so one row alone has more room.
    """
    found_BW, expected_BW = found_BW[:count].float(), expected_BW[:count].float()
    finite_B = expected_BW.isfinite().all(1)
    if not finite_B.any():
        return []
    off_B = ((found_BW - expected_BW).norm(dim=1) / expected_BW.norm(dim=1).clamp(min=1e-12))[finite_B]
    return [torch.maximum(off_B.mean(), off_B.max() / 3)]


def _copied(parts: LayerParts, following: NormWeights) -> _Layer:
    inner: Any = parts.inner
    return _Layer(parts, Fp8Weight.of(inner.gate, inner.up), Fp8Weight.of(inner.down), following)


def _known(layer: Any) -> LayerParts:
    """The parts of a layer, if its MLP can be in FP8."""
    if has_mixer(layer):
        raise UnknownLayer(f"{type(layer).__name__} has a delta net, or norms after attention and MLP")
    parts = parts_of(layer)
    if not isinstance(parts.inner, GatedMLP):
        raise UnknownLayer(f"{type(parts.inner).__name__} is no gated MLP of three linear layers")
    inner: Sequence[Any] = (parts.inner.gate, parts.inner.up, parts.inner.down)
    for product in inner:
        if not is_plain(product):
            kind = type(product).__name__
            raise UnknownLayer(f"{kind} is no plain linear layer; adapters can be merged into one (model.lora.merge)")
        if product.in_features % INNER or product.out_features % OUTPUTS:
            raise UnknownLayer(
                f"a layer has {product.in_features} inputs and {product.out_features} outputs, which are no multiples of "
                f"{INNER} and {OUTPUTS}"
            )
    if any(product.bias is not None for product in inner[:2]):
        raise UnknownLayer("gate or up has a bias")
    return parts

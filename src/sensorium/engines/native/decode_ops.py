"""The small operations of a decode step in plain torch: the reference for ``decode_kernels``, and what runs without it.

Each takes the roundings of the stock modules, so that a fused step gives what they give. Axes: B rows, H query heads,
K key heads, D head size, W hidden size, F inner size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from sensorium.engines.native.decode_state import DecodeRows
from sensorium.engines.native.key_values import PAGE, attend
from sensorium.engines.native.sampler import sample, uniforms
from sensorium.kernels.layer_ops import wide_linear, wide_product
from sensorium.kernels.layer_parts import FINE_SCALE, GatedMLP, LayerParts, NormWeights
from sensorium.models.policy import Policy

LARGEST_HALF = 65504.0  # the largest float16 number


@dataclass(frozen=True)
class Unplaced:
    """Queries, keys and values of a layer side by side, in parts [P, B, N] that are to be summed, normed and rotated."""

    layer: LayerParts
    parts_PBN: Tensor
    biases: Sequence[Tensor]
    rotary: tuple[Tensor, Tensor]


class TorchOps:
    """The operations, one torch call after another."""

    name = "torch"

    def __init__(self) -> None:
        self.branching = False
        """Whether ``together`` may use streams beside the current one: while a step is being captured."""
        self.apart = False
        """Whether rows of the step read the pages they share each for itself: what ``reads_apart`` said of its batch."""

    def together(self, first: Callable[[], Tensor], *others: Callable[[], Tensor]) -> list[Tensor]:
        """Results of work that does not depend on each other, in order."""
        return [work() for work in (first, *others)]

    def begin(self, policy: Policy, rows: DecodeRows, norm: NormWeights) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Of every row's last token: the residual stream, its norm, and the cosines and sines of its position."""
        embedded_BW = policy.adapter.language_model.embed_tokens(rows.tokens_B)
        rotary = policy.adapter.rotary(embedded_BW[:, None], rows.positions_B[None, :, None].expand(3, -1, 1))
        cos_BD, sin_BD = (part.reshape(embedded_BW.shape[0], -1) for part in rotary)
        sum_BW = embedded_BW.float()
        return sum_BW, self.norm(sum_BW, norm), (cos_BD, sin_BD)

    def norm(self, x_BW: Tensor, norm: NormWeights) -> Tensor:
        """RMSNorm over the last axis in the weight's kind: float32 inside, rounded to x's kind before the weight."""
        wide = x_BW.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
        return (norm.weight * wide.to(x_BW.dtype)).to(norm.weight.dtype)

    def add_norm(
        self, x_BW: Tensor, residual_BW: Tensor, norm: NormWeights, kind: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """The norm of the sum in the weight's kind or another, and the sum in the residual's kind."""
        summed_BW = residual_BW + x_BW
        finer = norm if kind is None else NormWeights(norm.weight.to(kind), norm.eps)
        return self.norm(summed_BW, finer), summed_BW

    def add_product(
        self, layer: nn.Module, x_BK: Tensor, residual_BW: Tensor, norm: NormWeights, kind: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """A linear layer's result added to the residual: the norm of the sum, in ``kind`` if given, and the sum."""
        weight = layer.weight if isinstance(layer, nn.Linear) else None
        if weight is not None and x_BK.dtype == torch.float16 != weight.dtype:
            return self.add_norm(wide_product(x_BK, self.half(weight)) * FINE_SCALE, residual_BW, norm, kind)
        return self.add_norm(wide_linear(layer, x_BK), residual_BW, norm, kind)

    def gate(self, gate_BF: Tensor, up_BF: Tensor) -> Tensor:
        """SwiGLU."""
        return silu(gate_BF) * up_BF

    def gate_finely(self, gate_BF: Tensor, up_BF: Tensor) -> Tensor:
        """SwiGLU of float32 values in float16, divided by ``FINE_SCALE``."""
        return (silu(gate_BF) * up_BF).div_(FINE_SCALE).clamp_(-LARGEST_HALF, LARGEST_HALF).half()

    def half(self, weight: Tensor) -> Tensor:
        """A weight in float16."""
        return weight.half()

    def renew(self) -> None:
        """Weights changed in place: what was computed of them is computed again."""

    def gated(self, inner: GatedMLP, x_BW: Tensor) -> Tensor:
        """The inner values of a gated MLP; of float16 activations and wider weights as ``layer_kernels.gated_finely``."""
        gate, up = inner.gate, inner.up
        if x_BW.dtype == torch.float16 and isinstance(gate, nn.Linear) and isinstance(up, nn.Linear):
            return self.gate_finely(*(wide_product(x_BW, self.half(layer.weight)) for layer in (gate, up)))
        return self.gate(*self.together(partial(inner.gate, x_BW), partial(inner.up, x_BW)))

    def ready(self, rows: int) -> None:
        """Called before a step of so many rows."""

    def reads_apart(self, rows: int, again: int) -> bool:
        """Whether rows that would read ``again`` bytes of a layer more do so to be faster."""
        return False

    def know(self, layers: Sequence[LayerParts], last: NormWeights) -> None:
        """Called once with the layers of the step, in order, and the norm before the head."""

    def pass_on(
        self,
        layer: LayerParts,
        following: LayerParts,
        seen_BN: Tensor,
        sum_BW: Tensor,
        rotary: tuple[Tensor, Tensor],
        rows: DecodeRows,
        next_block: Tensor,
    ) -> tuple[Tensor | Unplaced, Tensor] | None:
        """From what a layer's attention gave to the next layer's ``project`` at once, with the residual stream between.

        None where this is done by ``add_product``, ``gated`` and ``project`` one after the other.
        """
        return None

    def finish(self, layer: LayerParts, norm: NormWeights, seen_BN: Tensor, sum_BW: Tensor) -> Tensor | None:
        """From what the last layer's attention gave to what the head takes at once; None as in ``pass_on``."""
        return None

    def project(
        self, layer: LayerParts, x_BW: Tensor, rotary: tuple[Tensor, Tensor], rows: DecodeRows, layer_block: Tensor
    ) -> Tensor | Unplaced:
        """Queries, keys and values of a layer, normed and rotated; keys and values go to the rows' pages.

        Or what is left to ``attend`` to do.
        """
        # key and value are small: they take no longer than the query does if they run beside it
        query_BN, key_BN, value_BN = self.together(*(partial(part, x_BW) for part in (layer.query, layer.key, layer.value)))
        return self.place(query_BN, key_BN, value_BN, rotary, layer.norms, rows, layer_block)

    def place(
        self,
        query_BN: Tensor,
        key_BN: Tensor,
        value_BN: Tensor,
        rotary: tuple[Tensor, Tensor],
        norms: tuple[NormWeights, NormWeights] | None,
        rows: DecodeRows,
        layer_block: Tensor,
    ) -> Tensor:
        """Norm and rotate queries and keys, write keys and values to the rows' pages; the queries [B, H, D].

        ``layer_block`` is the layer's part of the pool: [2, pages, K, PAGE, D].
        """
        size = layer_block.shape[-1]
        query_BHD, key_BKD, value_BKD = (x.view(x.shape[0], -1, size) for x in (query_BN, key_BN, value_BN))
        if norms is not None:
            query_BHD, key_BKD = self.norm(query_BHD, norms[0]), self.norm(key_BKD, norms[1])
        cos_B1D, sin_B1D = (part[:, None] for part in rotary)
        query_BHD = query_BHD * cos_B1D + _half_turned(query_BHD) * sin_B1D
        key_BKD = key_BKD * cos_B1D + _half_turned(key_BKD) * sin_B1D
        self.write(key_BKD, value_BKD, rows, layer_block)
        return query_BHD

    def write(self, key_BKD: Tensor, value_BKD: Tensor, rows: DecodeRows, layer_block: Tensor) -> None:
        """Write one entry of every row to its page; a row past its last page writes where nobody reads."""
        place_B = rows.lengths_B.clamp(max=rows.table_BP.shape[1] * PAGE - 1)
        page_B = rows.table_BP.gather(1, (place_B // PAGE)[:, None])[:, 0].long()
        layer_block[0][page_B, :, place_B % PAGE] = key_BKD
        layer_block[1][page_B, :, place_B % PAGE] = value_BKD

    def attend(self, query: Tensor | Unplaced, rows: DecodeRows, layer_block: Tensor, scaling: float) -> Tensor:
        """Attention over each row's pages, of what ``project`` gave, as [B, H · D]."""
        assert isinstance(query, Tensor)
        keys_NKPD, values_NKPD = layer_block.unbind(0)
        return attend(query, keys_NKPD, values_NKPD, rows.table_BP, rows.lengths_B, scaling).flatten(1)

    def draw(self, logits_BV: Tensor, rows: DecodeRows, forbidden_F: Tensor, stop_S: Tensor, truncated: bool) -> None:
        """Sample the next token of every row and advance the rows."""
        sampling = rows.sampling(forbidden_F, stop_S, truncated)
        drawn = sample(logits_BV.float(), sampling, uniforms(rows.keys_B, rows.counts_B))
        rows.advance(drawn.tokens_B, drawn.logprobs_B, drawn.sampled_logprobs_B)


def _half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)

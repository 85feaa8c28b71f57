"""The small operations of a decode step as Triton kernels: one launch where torch takes five to fifteen."""

# mypy: disable-error-code="no-untyped-def"
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor, nn

from sensorium.engines.native.decode_state import TILE_ROWS, DecodeRows, TorchOps, Unplaced
from sensorium.engines.native.row_attention import LOG2_E, RowAttention
from sensorium.kernels.decode_attention_triton import attend_own, attend_shared, launch_ahead, merge
from sensorium.kernels.decode_triton import (
    LARGEST_GATED,
    Tiling,
    add_parts_norm,
    chunk_mass,
    convolve_next,
    delta_next,
    draw_tokens,
    few_outputs,
    fits,
    gated_norm_next,
    gated_products,
    largest_logits,
    place,
    product_parts,
)
from sensorium.kernels.layer_ops import GatedMLP, LayerParts, NormWeights, product_of
from sensorium.kernels.layer_torch import FINE_SCALE
from sensorium.kernels.layer_triton import add_normed, gated, gated_finely, normed
from sensorium.kernels.matched_ops import unit_bits
from sensorium.models.delta_net import window_size

# They compute what ``TorchOps`` computes, with the same roundings; only sums are taken in another order.
# Attention is one launch where ``row_attention`` takes it, and otherwise in three parts. Rows of a tile (members of a
# group) read the pages they share once, with all their queries; each row reads the pages of its own; both leave partial
# results with the logarithm of their weight, and a last kernel merges these. A row's entries are cut into a fixed number of
# splits, so that few rows still fill the GPU.


COLUMNS, GROUPS = 512, 8  # channels of a delta net's convolution, and heads of its norm, that one program computes
CHUNK = 4096  # entries of the vocabulary that one program of the sampler reads
# Programs of attention that keep an H200 busy, over shared pages and over own ones: of 3 to 16 splits of own pages 8 were
# fastest at 24 rows, of 1 to 6 3 at 64.
SHARED_PROGRAMS, OWN_PROGRAMS = 264, 400
FEW_ROWS = 128  # up to so many take shared pages one by one; more take two at a time, 4 µs a layer faster at 256 rows


class TritonOps(TorchOps):
    """The operations as kernels; what is truncated (top-k, top-p) is drawn by torch, which sorts."""

    name = "triton"
    defers = True

    def __init__(self, noted: Callable[[str], None] | None = None) -> None:
        """With ``noted``, ``RowAttention`` may attend to few rows; ``noted`` gets the reason where it cannot."""
        super().__init__()
        self._row_attention = RowAttention(noted, self._attended_one_by_one) if noted is not None else None
        self._blocked: dict[tuple[int, int], Tensor] = {}
        self._halves: dict[int, tuple[Tensor, Tensor]] = {}
        self._streams: list[torch.cuda.Stream] = []

    def together(self, first: Callable[[], Any], *others: Callable[[], Any]) -> list[Any]:
        """Results of independent work, in order; in a graph the others run beside the first.

        Each branch starts after everything before it on the current stream and is waited for before this returns: so a
        tensor of one stream that is freed after its use on another is never handed out too early.
        """
        if not self.branching:
            return super().together(first, *others)
        here = torch.cuda.current_stream()
        while len(self._streams) < len(others):
            self._streams.append(torch.cuda.Stream())
        beside = []
        for stream, work in zip(self._streams, others, strict=False):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                beside.append(work())
        results = [first(), *beside]
        for stream in self._streams[: len(others)]:
            here.wait_stream(stream)
        return results

    def norm(self, x_BW: Tensor, norm: NormWeights) -> Tensor:
        """RMSNorm over the last axis."""
        return normed(x_BW, norm.weight, norm.eps, centred=norm.centred)[0]

    def add_norm(
        self, x_BW: Tensor, residual_BW: Tensor, norm: NormWeights, kind: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """The norm of the sum in the weight's kind or another, and the sum."""
        return add_normed(x_BW, residual_BW, norm.weight, norm.eps, kind, norm.centred)[:2]

    def add_product(
        self, layer: nn.Module, x_BK: Tensor, residual_BW: Tensor, norm: NormWeights, kind: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """A linear layer's result added to the residual: the norm of the sum, in ``kind`` if given, and the sum."""
        if not fits([layer], x_BK):
            return super().add_product(layer, x_BK, residual_BW, norm, kind)
        assert isinstance(layer, nn.Linear)
        parts_PBW = product_parts(x_BK, [layer.weight])
        parts, rows, width = parts_PBW.shape
        out_BW, summed_BW = x_BK.new_empty(rows, width, dtype=kind or norm.weight.dtype), torch.empty_like(residual_BW)
        add_parts_norm[(rows,)](
            parts_PBW, layer.bias if layer.bias is not None else norm.weight, residual_BW, norm.weight, out_BW, summed_BW,
            rows, width, norm.eps,
            PARTS=parts, BIAS=layer.bias is not None, CENTRED=norm.centred, W=triton.next_power_of_2(width),
            SCALE=1.0 if x_BK.dtype == layer.weight.dtype else FINE_SCALE, num_warps=8, **launch_ahead(x_BK),
        )  # fmt: skip
        return out_BW, summed_BW

    def gate(self, gate_BF: Tensor, up_BF: Tensor) -> Tensor:
        """SwiGLU."""
        return gated(gate_BF, up_BF)

    def gate_finely(self, gate_BF: Tensor, up_BF: Tensor) -> Tensor:
        """SwiGLU of float32 values in float16, divided by ``FINE_SCALE``."""
        return gated_finely(gate_BF, up_BF)

    def half(self, weight: Tensor) -> Tensor:
        """A weight in float16, at a fixed address; kept, since many rows would take it at every step."""
        key = weight.data_ptr()
        if key not in self._halves:
            self._halves[key] = (weight, weight.half())
        return self._halves[key][1]

    def renew(self) -> None:
        """Weights changed in place: what was computed of them is computed again."""
        for weight, half in self._halves.values():
            half.copy_(weight)

    def reads_apart(self, rows: int, again: int) -> bool:
        """Whether rows read the pages they share each for itself: ``again`` bytes of a layer more than together."""
        return self._row_attention is not None and self._row_attention.pays(rows, again)

    def gated(self, inner: GatedMLP, x_BW: Tensor) -> Tensor:
        """The inner values of a gated MLP."""
        layers = (inner.gate, inner.up)
        largest = LARGEST_GATED if x_BW.element_size() < 4 else LARGEST_GATED // 2  # float32 tiles take twice the room
        if not fits(layers, x_BW, largest) or any(layer.bias is not None for layer in layers):
            return super().gated(inner, x_BW)
        assert isinstance(inner.gate, nn.Linear)
        assert isinstance(inner.up, nn.Linear)
        return gated_products(x_BW, inner.gate.weight, inner.up.weight)

    def project(
        self, layer: LayerParts, x_BW: Tensor, rotary: tuple[Tensor, Tensor], rows: DecodeRows, layer_block: Tensor
    ) -> Tensor | Unplaced:
        """Queries, keys and values of a layer, normed and rotated; keys and values go to the rows' pages."""
        layers = [part for part in (layer.query, layer.key, layer.value) if isinstance(part, nn.Linear)]
        biases = [part.bias for part in layers if part.bias is not None]
        if len(layers) < 3 or len(biases) not in (0, 3) or not fits(layers, x_BW):
            return super().project(layer, x_BW, rotary, rows, layer_block)
        parts_PBN = product_parts(x_BW, [part.weight for part in layers])
        given = Unplaced(layer, parts_PBN, biases, rotary)
        if self.apart and self._row_attention is not None and self._row_attention.takes(given, layer_block):
            return given
        return self._placed_parts(given, rows, layer_block)

    def _placed_parts(self, given: Unplaced, rows: DecodeRows, layer_block: Tensor) -> Tensor:
        """``place`` of queries, keys and values side by side, in parts."""
        parts, batch, width = given.parts_PBN.shape
        kv_heads, _, size = layer_block.shape[2:]
        query = _queries(layer_block, batch, width // size - 2 * kv_heads, given.layer.gated)
        three, norms = (given.parts_PBN,) * 3, given.layer.norms
        return self._placed(three, given.biases, parts, query, given.rotary, norms, rows, layer_block)

    def _attended_one_by_one(self, given: Unplaced, rows: DecodeRows, layer_block: Tensor) -> Tensor:
        """What ``RowAttention`` does in one launch."""
        return self.attend(self._placed_parts(given, rows, layer_block), rows, layer_block, given.layer.scaling)

    def place(
        self,
        query_BN: Tensor,
        key_BN: Tensor,
        value_BN: Tensor,
        rotary: tuple[Tensor, Tensor],
        norms: tuple[NormWeights, NormWeights] | None,
        rows: DecodeRows,
        layer_block: Tensor,
        gated: bool = False,
    ) -> Tensor:
        """Norm and rotate queries and keys, write keys and values to the rows' pages; the queries [B, H, D]."""
        query = _queries(layer_block, query_BN.shape[0], query_BN.shape[1] // layer_block.shape[-1], gated)
        return self._placed((query_BN, key_BN, value_BN), [], 0, query, rotary, norms, rows, layer_block)

    def _placed(
        self,
        projected: tuple[Tensor, Tensor, Tensor],
        biases: Sequence[Tensor],
        parts: int,
        query: Tensor,
        rotary: tuple[Tensor, Tensor],
        norms: tuple[NormWeights, NormWeights] | None,
        rows: DecodeRows,
        layer_block: Tensor,
    ) -> Tensor:
        """``place`` of three products, or of one in ``parts`` that are summed on the way; writes ``query``."""
        _, _, kv_heads, page, size = layer_block.shape
        batch, heads = query.shape[-3:-1]
        first, second = norms if norms is not None else (NormWeights(query, 0.0), NormWeights(query, 0.0))
        place[(batch, heads + 2 * kv_heads)](
            *projected, *(biases or (query,) * 3), *rotary, first.weight, second.weight, query, layer_block[0],
            layer_block[1], rows.table_BP, rows.lengths_B, rows.table_BP.shape[1], batch, first.eps,
            PARTS=parts, BIAS=bool(biases), NORM=norms is not None, CENTRED=first.centred, GATED=query.ndim == 4,
            HEADS=heads, KV=kv_heads, SIZE=size, ROTARY=rotary[0].shape[-1], D=triton.next_power_of_2(size), PAGE=page,
            num_warps=1, **launch_ahead(query),
        )  # fmt: skip
        return query

    def attend(self, query: Tensor | Unplaced, rows: DecodeRows, layer_block: Tensor, scaling: float) -> Tensor:
        """Attention over each row's pages, as [B, H · D]: shared pages, own pages, merged."""
        if isinstance(query, Unplaced):
            assert self._row_attention is not None
            return self._row_attention.attend(query, rows, layer_block)
        query_BHD, gate_BHD = (query, query) if query.ndim == 3 else query.unbind()
        batch, heads, size = query_BHD.shape
        kv_heads, page = layer_block.shape[2:4]
        share = heads // kv_heads
        shared_splits, own_splits = splits(batch, kv_heads)
        total = shared_splits + own_splits
        cut = (shared_splits, own_splits, 1 if batch <= FEW_ROWS else 2)
        partly = query_BHD.new_empty(batch, heads, total, size, dtype=torch.float32)
        weight = query_BHD.new_empty(batch, heads, total, dtype=torch.float32)
        common = {
            "KV": kv_heads, "SHARE": share, "SIZE": size, "D": max(16, triton.next_power_of_2(size)), "PAGE": page,
            "PRECISION": "ieee" if query_BHD.dtype == torch.float32 else "tf32", "num_warps": 4,
        }  # fmt: skip
        given = (
            query_BHD, layer_block[0], layer_block[1], rows.table_BP, rows.lengths_B, rows.shared_B, partly, weight,
            rows.table_BP.shape[1], scaling * LOG2_E, *cut,
        )  # fmt: skip

        def own() -> Tensor:
            attend_own[(own_splits, kv_heads, batch)](
                *given, M=max(16, triton.next_power_of_2(share)), **common, **launch_ahead(query_BHD), num_stages=3
            )
            return partly

        def shared() -> Tensor:
            attend_shared[(batch // 2, kv_heads, shared_splits)](
                *given, rows.tile_first_B, rows.tile_rows_B,
                M=max(16, triton.next_power_of_2(TILE_ROWS * share)), **common, num_stages=2,
            )  # fmt: skip
            return partly

        self.together(own, *([shared] if batch > 1 else []))
        out_BHD, most = torch.empty_like(query_BHD), triton.next_power_of_2(total)
        merge[(batch, heads)](
            partly, weight, rows.shared_B, gate_BHD, out_BHD, *cut,
            GATED=query.ndim == 4, HEADS=heads, SIZE=size, D=triton.next_power_of_2(size), PAGE=page, S=most,
            num_warps=1 if most <= 16 else 2, **launch_ahead(query_BHD),
        )  # fmt: skip
        return out_BHD.flatten(1)

    def mix(
        self,
        net: Any,
        x_BW: Tensor,
        windows_NWC: Tensor,
        states_NGKV: Tensor,
        slots_B: Tensor,
        waiting: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:
        """A delta net's projections in two products, its convolution, the rule, and its gated norm."""
        heads, groups, size, value = net.num_k_heads, net.num_v_heads, net.head_k_dim, net.head_v_dim
        if net.activation != "silu":
            return super().mix(net, x_BW, windows_NWC, states_NGKV, slots_B, waiting)
        x_BW, conv, channels, rows = x_BW.contiguous(), net.conv1d, net.conv_dim, x_BW.shape[0]
        ahead, width, keys = launch_ahead(x_BW), window_size(net), triton.next_power_of_2(size)
        (parts, mixed, gates), (number_parts, beta, decay) = self.together(
            partial(_products, x_BW, (product_of(net.in_proj_qkv), product_of(net.in_proj_z))),
            partial(_products, x_BW, (product_of(net.in_proj_b), product_of(net.in_proj_a)), few_outputs(x_BW.shape[1])),
        )
        columns_BC = x_BW.new_empty(rows, channels)
        seen_BN, out_BN = x_BW.new_empty(2, rows, groups * value).unbind()
        convolve_next[(rows, triton.cdiv(channels, COLUMNS))](
            mixed, windows_NWC, conv.weight, conv.weight if conv.bias is None else conv.bias, slots_B, columns_BC, rows,
            mixed.shape[-1], channels,
            PARTS=parts, BIAS=conv.bias is not None, WIDTH=width, W=triton.next_power_of_2(width + 1), BLOCK=COLUMNS,
            **ahead,
        )  # fmt: skip
        narrow = min(32, triton.next_power_of_2(value))
        delta_next[(rows, groups, triton.cdiv(value, narrow))](
            columns_BC, beta, decay, states_NGKV, *(waiting or (states_NGKV,) * 3), slots_B, net.A_log, net.dt_bias,
            seen_BN, rows, size**-0.5,
            PARTS=number_parts, MOST=0 if waiting is None else waiting[0].shape[1], HEADS=heads, SHARE=groups // heads,
            SIZE=size, VALUE=value, K=keys, V=narrow, num_warps=max(1, keys // 128), num_stages=1, **ahead,
        )  # fmt: skip
        gated_norm_next[(rows, triton.cdiv(groups, GROUPS))](
            seen_BN, gates, net.norm.weight, out_BN, rows, net.norm.variance_epsilon,
            PARTS=parts, FROM=channels if parts else 0, WIDTH=gates.shape[-1], GROUPS=groups, VALUE=value, R=GROUPS,
            V=triton.next_power_of_2(value), num_warps=4, **ahead,
        )  # fmt: skip
        return out_BN

    def draw(self, logits_BV: Tensor, rows: DecodeRows, forbidden_F: Tensor, stop_S: Tensor, truncated: bool) -> None:
        """Draw the next token of every row and move the rows on."""
        if truncated:
            super().draw(logits_BV, rows, forbidden_F, stop_S, truncated)
            return
        batch, vocab_size = logits_BV.shape
        chunks = triton.cdiv(vocab_size, CHUNK)
        blocked_V = self._blocked_ids(vocab_size, forbidden_F, stop_S)
        largest_BC = torch.empty(batch, chunks, dtype=torch.float32, device=logits_BV.device)
        where_BC = torch.empty(batch, chunks, dtype=torch.int64, device=logits_BV.device)
        mass_BC = torch.empty(batch, chunks, dtype=torch.int64, device=logits_BV.device)
        given = (logits_BV, blocked_V, rows.temperature_B, rows.stop_masked_B)
        sizes = {"VOCAB": vocab_size, "CHUNK": CHUNK, "CHUNKS": chunks, "C": triton.next_power_of_2(chunks)}
        scale = {"SCALE": 2.0 ** unit_bits(vocab_size), "LOG_SCALE": unit_bits(vocab_size) * math.log(2)}
        largest_logits[(batch, chunks)](*given, largest_BC, where_BC, **sizes)
        chunk_mass[(batch, chunks)](*given, largest_BC, mass_BC, **scale, **sizes)
        draw_tokens[(batch,)](
            *given, largest_BC, where_BC, mass_BC, rows.keys_B, rows.greedy_B, rows.tokens_B, rows.positions_B,
            rows.lengths_B, rows.counts_B, rows.packed_3B, rows.packed_3B.stride(0), **scale, **sizes, num_warps=8,
        )  # fmt: skip

    def _blocked_ids(self, vocab_size: int, forbidden_F: Tensor, stop_S: Tensor) -> Tensor:
        """For every token: 1 where it is never drawn, 2 where rows that ignore stop tokens do not draw it."""
        key = (forbidden_F.data_ptr(), stop_S.data_ptr())
        if key not in self._blocked:
            blocked_V = torch.zeros(vocab_size, dtype=torch.int8, device=forbidden_F.device)
            blocked_V[stop_S] = 2
            blocked_V[forbidden_F] = 1
            self._blocked = {key: blocked_V}
        return self._blocked[key]


def _queries(like: Tensor, batch: int, heads: int, gated: bool) -> Tensor:
    """Room for queries [B, H, D] and, of the half of ``heads``, for the gates behind them [2, B, H, D]."""
    size = like.shape[-1]
    return like.new_empty(2, batch, heads // 2, size) if gated else like.new_empty(batch, heads, size)


def _products(x_BK: Tensor, layers: Sequence[nn.Module], few: Tiling | None = None) -> tuple[int, Tensor, Tensor]:
    """Two linear layers of x: in parts and side by side, in one tensor twice, or (0 parts) each as it is.

    ``few``: for layers with few outputs, which run beside another product.
    """
    outputs = 128 if few is None else few.outputs
    weights: list[Any] = [getattr(layer, "weight", None) for layer in layers if getattr(layer, "bias", None) is None]
    if len(weights) == len(layers) and fits(layers, x_BK, outputs=outputs):
        parts_PBN = product_parts(x_BK, weights, few, ahead=few is None)
        return len(parts_PBN), parts_PBN, parts_PBN
    first, second = (layer(x_BK).contiguous() for layer in layers)
    return 0, first, second


def splits(batch: int, kv_heads: int) -> tuple[int, int]:
    """Into how many parts the shared pages of a tile and the own pages of a row are cut."""
    tiles = max(1, batch // TILE_ROWS)
    shared = min(8, max(1, SHARED_PROGRAMS // (tiles * kv_heads)))
    own = min(16, max(1, round(OWN_PROGRAMS / (batch * kv_heads))))
    return shared, own

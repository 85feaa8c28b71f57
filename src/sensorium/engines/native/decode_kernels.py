"""The operations of a decode step as kernels: one launch where torch takes five to fifteen.

They are Triton's, but for the attention of few rows, which is one CUDA launch (``RowAttention``).
"""

# mypy: disable-error-code="no-untyped-def"
import math
from collections.abc import Callable, Sequence
from ctypes import Structure, c_float, c_int, c_void_p
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import triton
from torch import Tensor, nn

from sensorium.engines.native.decode_state import TILE_ROWS, DecodeRows, TorchOps, Unplaced
from sensorium.engines.native.key_values import PAGE
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
from sensorium.kernels.device_code import DeviceCode, NoDeviceCode, addresses, launch, pointers
from sensorium.kernels.layer_ops import GatedMLP, LayerParts, NormWeights, product_of
from sensorium.kernels.layer_torch import FINE_SCALE
from sensorium.kernels.layer_triton import add_normed, gated, gated_finely, normed
from sensorium.kernels.matched_ops import unit_bits
from sensorium.models.delta_net import window_size

# They compute what ``TorchOps`` computes, with the same roundings; only sums are taken in another order.
# Attention is one launch where ``RowAttention`` takes it, and otherwise in three parts. Rows of a tile (members of a
# group) read the pages they share once, with all their queries; each row reads the pages of its own; both leave partial
# results with the logarithm of their weight, and a last kernel merges these. A row's entries are cut into a fixed number of
# splits, so that few rows still fill the GPU.


COLUMNS, GROUPS = 512, 8  # channels of a delta net's convolution, and heads of its norm, that one program computes
CHUNK = 4096  # entries of the vocabulary that one program of the sampler reads
# Programs of attention that keep an H200 busy, over shared pages and over own ones: of 3 to 16 splits of own pages 8 were
# fastest at 24 rows, of 1 to 6 3 at 64.
SHARED_PROGRAMS, OWN_PROGRAMS = 264, 400
FEW_ROWS = 128  # up to so many take shared pages one by one; more take two at a time, 4 µs a layer faster at 256 rows
LOG2_E = 1.4426950408889634


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


MOST_ROWS = 128  # that attend in one launch
READ_AGAIN = 128_000_000
"""Bytes of a layer that rows may read again, each for itself. µs of a layer's attention on an H200, with Qwen2.5-VL-3B's
heads, kernels one by one and in one launch: rows of W1, which share a short prompt, 9.7 and 6.7 at 8 rows, 12.0 and 7.8 at
32, 22.4 and 13.3 at 128; of W3's tail 7.7 and 5.3 at 1, 13.4 and 10.4 at 16, 23.3 and 16.8 at 64, 32.3 and 21.0 at 128.
Groups that share 4,160 entries: 22.5 and 12.9 at 8 (29 MB read again), 26.1 and 18.6 at 24 (87 MB), 27.1 and 28.7 at 32
(116 MB), 43.6 and 61.5 at 128 (466 MB)."""
WARPS, DEPTH, ENTRIES, MOST_SHARE = 4, 3, 16, 8  # as row_attention.cu has them
TRIAL_PAGES, LEAST_PAGES = 128, 5  # of all rows of a trial, and of each at least
BOUND = 0.02  # of the largest value: how far a trial may be from kernels one by one


class CAttention(Structure):
    """``struct attention`` of row_attention.cu."""

    _fields_: ClassVar = [
        *pointers("parts query_bias key_bias value_bias cos sin query_gain key_gain keys values table lengths out"),
        ("eps", c_float), ("factor", c_float), ("count", c_int), ("rows", c_int), ("width", c_int),
    ]  # fmt: skip


Plain = Callable[[Unplaced, DecodeRows, Tensor], Tensor]
"""Attention of unplaced rows to the pages of a layer, kernel by kernel."""


class RowAttention:
    """Attention of few rows as one launch: placing, attending and merging (``kernels/cuda/row_attention.cu``).

    None of these has much to do, and handing over from one kernel to the next takes as long as they do. Every row reads all
    of its pages, those that it shares with others too. They come from the GPU's cache, so only groups with long prompts are
    faster where a kernel reads what they share once. The launch is tried against kernels one by one with each number of
    rows.
    """

    def __init__(self, noted: Callable[[str], None], plain: Plain) -> None:
        self._noted, self._plain = noted, plain
        self._kernels: dict[tuple[int, ...], tuple[DeviceCode, c_void_p]] = {}
        self._tried: set[int] = set()
        self._usable = True

    def pays(self, rows: int, again: int) -> bool:
        """Whether so many rows, which then read so many bytes of a layer again, are faster so."""
        return self._usable and rows <= MOST_ROWS and again <= READ_AGAIN

    def takes(self, given: Unplaced, layer_block: Tensor) -> bool:
        """Whether these rows are attended to in one launch; with a number of rows that is new, after a trial."""
        rows = given.parts_PBN.shape[1]
        if not self._usable or not _known(given, layer_block):
            return False
        if rows not in self._tried and not torch.cuda.is_current_stream_capturing():
            self._try(given, layer_block)
        return rows in self._tried

    def attend(self, given: Unplaced, rows: DecodeRows, layer_block: Tensor) -> Tensor:
        """Put the new keys and values to the rows' pages; attention over each row's pages, as [B, H · D]."""
        parts, batch, _ = given.parts_PBN.shape
        layer, (_, _, kv_heads, _, size) = given.layer, layer_block.shape
        out_BN = layer_block.new_empty(batch, given.parts_PBN.shape[2] - 2 * kv_heads * size)
        heads = out_BN.shape[1] // size
        ctas = _ctas(batch, kv_heads)
        norms = layer.norms or (layer.before, layer.before)
        given_fields = CAttention(
            *addresses(
                given.parts_PBN, *(given.biases or (out_BN,) * 3), *given.rotary, norms[0].weight, norms[1].weight,
                layer_block[0], layer_block[1], rows.table_BP, rows.lengths_B, out_BN,
            ),
            norms[0].eps, layer.scaling * LOG2_E, parts, batch, rows.table_BP.shape[1],
        )  # fmt: skip
        flags = {"BIAS": bool(given.biases), "NORM": layer.norms is not None}
        kernel = self._kernel(HEADS=heads, KV=kv_heads, SIZE=size, PAGE=PAGE, SPLITS=ctas, **flags)
        launch(kernel, batch * kv_heads * ctas, 32 * WARPS, given_fields, _shared_bytes(size))
        return out_BN

    def _kernel(self, **numbers: int) -> c_void_p:
        key = tuple(numbers.values())
        if key not in self._kernels:
            code = DeviceCode("row_attention.cu", {name: int(number) for name, number in numbers.items()})
            self._kernels[key] = (code, code.kernel("row_attention_kernel", _shared_bytes(numbers["SIZE"])))
        return self._kernels[key][1]

    def _try(self, given: Unplaced, layer_block: Tensor) -> None:
        """Hold it against kernels one by one."""
        batch = given.parts_PBN.shape[1]
        rows, block = _trial(batch, layer_block)
        wavy = torch.sin(torch.arange(given.parts_PBN.numel(), device=block.device) * 1.3).view_as(given.parts_PBN)
        given = replace(given, parts_PBN=wavy)
        try:
            expected_block = block.clone()
            expected = self._plain(given, rows, expected_block)
            found = self.attend(given, rows, block)
            pairs = ((found, expected), (block, expected_block))
            errors = [(one.float() - other.float()).abs().max() / other.abs().max() for one, other in pairs]
            error = float(torch.stack(errors).max())  # no number, if there is one that is none
            wrong = "" if error <= BOUND else f"a trial of {batch} rows was {error:.2g} off (bound {BOUND:g})"
        except (NoDeviceCode, torch.OutOfMemoryError) as failure:
            wrong = str(failure).strip().split("\n")[0]
        if wrong:
            self._usable = False
            self._noted(
                f"attention in steps of at most {MOST_ROWS} rows takes several launches instead of one, so steps take "
                f"longer, by a tenth or less: {wrong}."
            )
        else:
            self._tried.add(batch)


def _ctas(batch: int, kv_heads: int) -> int:
    """CTAs for a row and key head: together not more than run at the same time. Large clusters leave gaps."""
    each = torch.cuda.get_device_properties().multi_processor_count / (batch * kv_heads)
    return 8 if each >= 8 else 4 if each >= 2.6 else 2 if each >= 1 else 1


def _shared_bytes(size: int) -> int:
    tile, found = 2 * ENTRIES * 2 * size, 2 * 8 * 4
    return WARPS * (DEPTH * tile + found) + 8 * (2 * size + 16)


def _known(given: Unplaced, layer_block: Tensor) -> bool:
    """Whether the kernel can be compiled for these sizes, and everything has the kind that it reads."""
    _, _, kv_heads, page, size = layer_block.shape
    heads = given.parts_PBN.shape[2] // size - 2 * kv_heads
    read = (layer_block, *given.biases, *given.rotary, *(norm.weight for norm in given.layer.norms or ()))
    if not all(each.dtype == torch.bfloat16 and each.is_contiguous() for each in read):
        return False
    if given.layer.gated or page != PAGE or size not in (64, 128) or heads % kv_heads or heads // kv_heads > MOST_SHARE:
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(layer_block.device)[0] >= 9


def _trial(batch: int, layer_block: Tensor) -> tuple[DecodeRows, Tensor]:
    """Rows of different lengths, each with pages of its own: the fewer rows, the longer."""
    device, pages = layer_block.device, max(LEAST_PAGES, TRIAL_PAGES // batch)
    shape = (2, 1 + batch * pages, *layer_block.shape[2:])
    block = torch.cos(torch.arange(torch.Size(shape).numel(), device=device) * 0.7).view(shape).to(layer_block.dtype)
    table_BP = 1 + torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
    zeros_B = torch.zeros(batch, dtype=torch.int64, device=device)
    lengths_B = (PAGE * pages - 1 - 37 * torch.arange(batch, device=device)) % (PAGE * pages)
    floats_B = torch.ones(batch, dtype=torch.float64, device=device)
    rows = DecodeRows(
        tokens_B=zeros_B, positions_B=zeros_B, lengths_B=lengths_B, counts_B=zeros_B,
        keys_B=zeros_B, greedy_B=zeros_B, stop_masked_B=zeros_B, top_k_B=zeros_B, slots_B=zeros_B, ends_B=zeros_B,
        shared_B=zeros_B, tile_first_B=zeros_B, tile_rows_B=zeros_B, table_BP=table_BP,
        temperature_B=floats_B, top_p_B=floats_B, packed_3B=floats_B[None].expand(3, -1),
    )  # fmt: skip
    return rows, block

"""The small operations of a decode step as Triton kernels: one launch where torch takes five to fifteen.

They compute what ``decode_ops.TorchOps`` computes, with the same roundings; only sums are taken in another order.
Attention is in three parts. Rows of a tile (members of a group) read the pages they share once, with all their queries;
each row reads the pages of its own; both leave partial results with the logarithm of their weight, and a last kernel
merges these. A row's entries are cut into a fixed number of splits, so that few rows still fill the GPU.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from sensorium.engines.native.attention_kernels import attend_own, attend_shared, merge
from sensorium.engines.native.decode_ops import TorchOps
from sensorium.engines.native.decode_state import TILE_ROWS, DecodeRows
from sensorium.engines.native.sampler import unit_bits
from sensorium.engines.native.sampler_kernels import chunk_mass, draw_tokens, largest_logits
from sensorium.models.layer_parts import NormWeights

CHUNK = 4096  # entries of the vocabulary that one program of the sampler reads
PROGRAMS = 528  # programs of attention that keep a GPU busy: four for each multiprocessor of an H200
LOG2_E = math.log2(math.e)


class TritonOps(TorchOps):
    """The operations as kernels; what is truncated (top-k, top-p) is drawn by torch, which sorts."""

    name = "triton"

    def __init__(self) -> None:
        super().__init__()
        self._blocked: dict[tuple[int, int], Tensor] = {}
        self._streams: list[torch.cuda.Stream] = []

    def together(self, first: Callable[[], Tensor], *others: Callable[[], Tensor]) -> list[Tensor]:
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
        out_BW = torch.empty_like(x_BW)
        width = x_BW.shape[-1]
        block = triton.next_power_of_2(width)
        _norm[(x_BW.shape[0],)](x_BW, x_BW, norm.weight, out_BW, x_BW, width, norm.eps, ADD=False, W=block, num_warps=8)
        return out_BW

    def add_norm(self, x_BW: Tensor, residual_BW: Tensor, norm: NormWeights) -> tuple[Tensor, Tensor]:
        """The norm of the sum, and the sum."""
        out_BW, summed_BW = torch.empty_like(x_BW), torch.empty_like(x_BW)
        width = x_BW.shape[-1]
        block = triton.next_power_of_2(width)
        _norm[(x_BW.shape[0],)](
            x_BW, residual_BW, norm.weight, out_BW, summed_BW, width, norm.eps, ADD=True, W=block, num_warps=8
        )
        return out_BW, summed_BW

    def gate(self, gate_BF: Tensor, up_BF: Tensor) -> Tensor:
        """SwiGLU."""
        out_BF = torch.empty_like(gate_BF)
        count = out_BF.numel()
        _gate[(triton.cdiv(count, 2048),)](gate_BF, up_BF, out_BF, count, BLOCK=2048, num_warps=8)
        return out_BF

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
        """Norm and rotate queries and keys, write keys and values to the rows' pages; the queries [B, H, D]."""
        _, _, kv_heads, page, size = layer_block.shape
        batch, heads = query_BN.shape[0], query_BN.shape[1] // size
        query_BHD = query_BN.new_empty(batch, heads, size)
        first, second = norms if norms is not None else (NormWeights(query_BN, 0.0), NormWeights(query_BN, 0.0))
        _place[(batch, heads + 2 * kv_heads)](
            query_BN, key_BN, value_BN, *rotary, first.weight, second.weight, query_BHD, layer_block[0], layer_block[1],
            rows.table_BP, rows.lengths_B, rows.table_BP.shape[1], first.eps,
            NORM=norms is not None, HEADS=heads, KV=kv_heads, SIZE=size, D=triton.next_power_of_2(size), PAGE=page,
            num_warps=1,
        )  # fmt: skip
        return query_BHD

    def attend(self, query_BHD: Tensor, rows: DecodeRows, layer_block: Tensor, scaling: float) -> Tensor:
        """Attention over each row's pages, as [B, H · D]: shared pages, own pages, merged."""
        batch, heads, size = query_BHD.shape
        kv_heads, page = layer_block.shape[2:4]
        share = heads // kv_heads
        shared_splits, own_splits = splits(batch, kv_heads)
        total = shared_splits + own_splits
        partial = query_BHD.new_empty(batch, heads, total, size, dtype=torch.float32)
        weight = query_BHD.new_empty(batch, heads, total, dtype=torch.float32)
        common = {
            "KV": kv_heads, "SHARE": share, "SIZE": size, "D": max(16, triton.next_power_of_2(size)), "PAGE": page,
            "TOTAL": total, "PRECISION": "ieee" if query_BHD.dtype == torch.float32 else "tf32",
        }  # fmt: skip
        pointers = (query_BHD, layer_block[0], layer_block[1], rows.table_BP, rows.lengths_B, rows.shared_B)
        rest = (partial, weight, rows.table_BP.shape[1], scaling * LOG2_E)

        def own() -> Tensor:
            attend_own[(batch, kv_heads, own_splits)](
                *pointers, *rest, SPLITS=own_splits, FIRST=shared_splits, M=max(16, triton.next_power_of_2(share)),
                **common, num_warps=4, num_stages=3,
            )  # fmt: skip
            return partial

        def shared() -> Tensor:
            attend_shared[(batch // 2, kv_heads, shared_splits)](
                *pointers, rows.tile_first_B, rows.tile_rows_B, *rest, SPLITS=shared_splits,
                M=max(16, triton.next_power_of_2(TILE_ROWS * share)), **common, num_warps=4, num_stages=2,
            )  # fmt: skip
            return partial

        self.together(own, *([shared] if batch > 1 else []))
        out_BHD = torch.empty_like(query_BHD)
        merge[(batch, heads)](
            partial, weight, rows.shared_B, out_BHD,
            HEADS=heads, SIZE=size, D=triton.next_power_of_2(size), TOTAL=total, SHARED=shared_splits,
            S=triton.next_power_of_2(total), num_warps=2,
        )  # fmt: skip
        return out_BHD.flatten(1)

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


def splits(batch: int, kv_heads: int) -> tuple[int, int]:
    """Into how many parts the shared pages of a tile and the own pages of a row are cut."""
    tiles = max(1, batch // TILE_ROWS)
    shared = min(8, max(1, PROGRAMS // 2 // (tiles * kv_heads)))
    own = min(16, max(1, PROGRAMS // (batch * kv_heads)))
    return shared, own


@triton.jit
def _norm(x, residual, weight, out, summed, width, eps, ADD: tl.constexpr, W: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, W)
    inside = place < width
    value = tl.load(x + row * width + place, mask=inside, other=0.0)
    kind = value.dtype
    if ADD:
        value = (tl.load(residual + row * width + place, mask=inside, other=0.0).to(tl.float32) + value.to(tl.float32)).to(
            kind
        )
        tl.store(summed + row * width + place, value, mask=inside)
    wide = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    rounded = (wide * scale).to(kind).to(tl.float32)
    gain = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + place, (gain * rounded).to(kind), mask=inside)


@triton.jit
def _gate(gate, up, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    opened = tl.load(gate + place, mask=inside, other=0.0)
    kind = opened.dtype
    wide = opened.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(kind).to(tl.float32)
    tl.store(out + place, (silu * tl.load(up + place, mask=inside, other=0.0).to(tl.float32)).to(kind), mask=inside)


@triton.jit
def _place(
    query, key, value, cos, sin, query_gain, key_gain, query_out, key_pages, value_pages, table, lengths, width, eps,
    NORM: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, D)
    inside = d < SIZE
    other = (d + SIZE // 2) % SIZE
    entry = tl.minimum(tl.load(lengths + row), width * PAGE - 1)
    page = tl.load(table + row * width + entry // PAGE).to(tl.int64)
    if head >= HEADS + KV:
        v = head - HEADS - KV
        copied = tl.load(value + row * KV * SIZE + v * SIZE + d, mask=inside, other=0.0)
        tl.store(value_pages + ((page * KV + v) * PAGE + entry % PAGE) * SIZE + d, copied, mask=inside)
    else:
        is_key = head >= HEADS
        k = head - HEADS
        if is_key:
            base = key + row * KV * SIZE + k * SIZE
            gain = key_gain
        else:
            base = query + row * HEADS * SIZE + head * SIZE
            gain = query_gain
        x = tl.load(base + d, mask=inside, other=0.0)
        turned = tl.load(base + other, mask=inside, other=0.0)
        kind = x.dtype
        x = x.to(tl.float32)
        turned = turned.to(tl.float32)
        if NORM:
            scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)
            own_gain = tl.load(gain + d, mask=inside, other=0.0).to(tl.float32)
            turned_gain = tl.load(gain + other, mask=inside, other=0.0).to(tl.float32)
            x = (own_gain * (x * scale).to(kind).to(tl.float32)).to(kind).to(tl.float32)
            turned = (turned_gain * (turned * scale).to(kind).to(tl.float32)).to(kind).to(tl.float32)
        turned = tl.where(d < SIZE // 2, -turned, turned)
        c = tl.load(cos + row * SIZE + d, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + row * SIZE + d, mask=inside, other=0.0).to(tl.float32)
        rotated = ((x * c).to(kind).to(tl.float32) + (turned * s).to(kind).to(tl.float32)).to(kind)
        if is_key:
            tl.store(key_pages + ((page * KV + k) * PAGE + entry % PAGE) * SIZE + d, rotated, mask=inside)
        else:
            tl.store(query_out + (row * HEADS + head) * SIZE + d, rotated, mask=inside)

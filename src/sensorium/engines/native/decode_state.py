"""The rows of a decode step at fixed addresses: what a CUDA graph reads, writes and moves on.

Row i of every tensor is row i of the batch. A batch of 5 rows in a bucket of 8 looks like this:

    lengths_B  [281 281 281 290 290   0   0   0]   cache entries before the token that is fed next
    table_BP   [ 4 5 6 7 8 0 …] …                  pages of each row; page 0 is scratch, padding rows live there
    shared_B   [256 256 256   0   0   0   0   0]   leading entries that rows of a tile have in common (whole pages)
    tile_first_B, tile_rows_B  [0 3 4 …], [3 1 1 0 …]   rows 0-2 are a tile: their common pages are read once
    slots_B    [  1   2   3   4   5   0   0   0]   states of delta nets, if there are any; slot 0 is scratch

The step itself advances tokens, positions, lengths and counts, so that steps follow each other without the host. Steps
are launched past the end of a response; keys and values beyond it are not read, but a state would be lost. So a row that
drew a stop token, or as many tokens as ``ends_B`` says, works on slot 0 from then on, and keeps its last token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from sensorium.engines.native.key_values import PAGE, attend, write_tokens
from sensorium.engines.native.sampler import SamplingRows, sample, signed64, uniforms
from sensorium.engines.protocol import Sampling
from sensorium.kernels.layer_ops import GatedMLP, LayerParts, NormWeights, wide_linear, wide_product
from sensorium.kernels.layer_torch import FINE_SCALE, gated_finely
from sensorium.models.delta_net import DeltaState, DeltaTokens, advance, gated, tokens_of
from sensorium.models.family import one_axis
from sensorium.models.policy import Policy
from sensorium.models.segment_layout import sent_to

TILE_ROWS = 8  # rows of a group that read their common pages together
INTEGERS = (
    "positions", "lengths", "counts", "keys", "greedy", "stop_masked", "top_k", "slots", "ends", "shared", "tile_first",
    "tile_rows",
)  # fmt: skip


@dataclass(frozen=True)
class RowLayout:
    """What the host knows of a row when a batch is laid out. ``source`` is where its last token stands on the device.

    ``slot`` has its states of delta nets, which it advances until ``end`` tokens are drawn.
    """

    source: int
    position: int
    length: int
    count: int
    key: int
    sampling: Sampling
    pages: Sequence[int]
    shared_pages: int
    group: object
    slot: int = 0
    end: int = 0


class DecodeState:
    """The tensors, for up to ``rows`` rows of ``pages`` pages each; ``routes_BLK`` where experts are recorded."""

    def __init__(
        self, rows: int, pages: int, vocab_size: int, device: torch.device, routes_BLK: Tensor | None = None
    ) -> None:
        self.routes_BLK = routes_BLK
        self.rows, self.pages = rows, pages
        self.vocab_size = vocab_size
        self.device = device
        self.tokens_B = torch.zeros(rows, dtype=torch.int64, device=device)
        self.integers_CB = torch.zeros(len(INTEGERS), rows, dtype=torch.int64, device=device)
        self.floats_CB = torch.ones(2, rows, dtype=torch.float64, device=device)
        self.table_BP = torch.zeros(rows, pages, dtype=torch.int32, device=device)
        self.packed_3B = torch.zeros(3, rows, dtype=torch.float64, device=device)

    def view(self, rows: int) -> "DecodeRows":
        """The first ``rows`` rows."""
        columns = {f"{name}_B": self.integers_CB[i, :rows] for i, name in enumerate(INTEGERS)}
        return DecodeRows(
            tokens_B=self.tokens_B[:rows],
            table_BP=self.table_BP[:rows],
            temperature_B=self.floats_CB[0, :rows],
            top_p_B=self.floats_CB[1, :rows],
            packed_3B=self.packed_3B[:, :rows],
            **columns,
        )

    def lay_out(self, rows: Sequence[RowLayout], bucket: int, latest_N: Tensor) -> None:
        """Write the rows into the first places of a bucket; their last tokens are taken from ``latest_N``."""
        assert len(rows) <= bucket <= self.rows
        columns = [[0] * len(INTEGERS) for _ in range(bucket)]
        floats, sources = [[1.0, 1.0] for _ in range(bucket)], [0] * bucket
        table = np.zeros((bucket, self.pages), np.int32)
        counts_R1 = np.array([[len(row.pages)] for row in rows])
        table[: len(rows)][np.arange(self.pages) < counts_R1] = np.fromiter(
            chain.from_iterable(row.pages for row in rows), np.int32
        )
        for i, row in enumerate(rows):
            sampling = row.sampling
            sources[i] = row.source
            columns[i][:9] = (
                row.position, row.length, row.count, signed64(row.key), int(sampling.temperature == 0),
                int(not sampling.stop_tokens), min(sampling.top_k, self.vocab_size) or self.vocab_size, row.slot, row.end,
            )  # fmt: skip
            floats[i] = [sampling.temperature or 1.0, sampling.top_p]
        for i in range(len(rows), bucket):
            columns[i][6] = self.vocab_size
        for place, (first, count, shared) in enumerate(_tiles(rows)):
            columns[place][10:] = (first, count)
            for i in range(first, first + count):
                columns[i][9] = shared
        self.tokens_B[:bucket] = latest_N[sent_to(self.device, torch.tensor(sources))]
        self.integers_CB[:, :bucket] = sent_to(self.device, torch.tensor(columns)).T
        self.floats_CB[:, :bucket] = sent_to(self.device, torch.tensor(floats, dtype=torch.float64)).T
        self.table_BP[:bucket] = sent_to(self.device, torch.from_numpy(table))


@dataclass(frozen=True)
class DecodeRows:
    """Views of the state's first rows: what one step works on. All are [B] but the table [B, P] and ``packed_3B``."""

    tokens_B: Tensor
    positions_B: Tensor
    lengths_B: Tensor
    counts_B: Tensor
    keys_B: Tensor
    greedy_B: Tensor
    stop_masked_B: Tensor
    top_k_B: Tensor
    slots_B: Tensor
    ends_B: Tensor
    shared_B: Tensor
    tile_first_B: Tensor
    tile_rows_B: Tensor
    table_BP: Tensor
    temperature_B: Tensor
    top_p_B: Tensor
    packed_3B: Tensor

    def sampling(self, forbidden_F: Tensor, stop_S: Tensor, truncated: bool) -> SamplingRows:
        """The sampling parameters as the sampler takes them; without truncation nothing is sorted."""
        return SamplingRows(
            forbidden_F=forbidden_F,
            stop_S=stop_S,
            temperature_B1=self.temperature_B[:, None].float(),
            greedy_B=self.greedy_B.bool(),
            stop_masked_B1=self.stop_masked_B[:, None].bool(),
            top_k_B1=self.top_k_B[:, None] if truncated else None,
            top_p_B1=self.top_p_B[:, None] if truncated else None,
        )

    def advance(self, tokens_B: Tensor, logprobs_B: Tensor, sampled_logprobs_B: Tensor) -> None:
        self.packed_3B.copy_(torch.stack((tokens_B.double(), logprobs_B, sampled_logprobs_B)))
        self.tokens_B.copy_(tokens_B)
        self.positions_B.add_(1)
        self.lengths_B.add_(1)
        self.counts_B.add_(1)

    def freeze_ended(self, before_B: Tensor, stop_S: Tensor) -> None:
        """Send rows that ended to the scratch slot. Those that are there keep the token ``before_B`` they had.

        So a row that drew a stop token is found to have ended also when it is laid out again.
        """
        self.tokens_B.copy_(torch.where(self.slots_B == 0, before_B, self.tokens_B))
        ended_B = (self.tokens_B[:, None] == stop_S).any(1) | (self.counts_B >= self.ends_B)
        self.slots_B.masked_fill_(ended_B, 0)


def read_again(rows: Sequence[RowLayout]) -> int:
    """Entries that are read more than once if every row reads all of its own: those that tiles share, but for the first."""
    return sum((count - 1) * shared for _, count, shared in _tiles(rows))


def _tiles(rows: Sequence[RowLayout]) -> list[tuple[int, int, int]]:
    """Neighbours of one group in tiles of ``TILE_ROWS``: (first row, how many, entries in common)."""
    tiles: list[tuple[int, int, int]] = []
    start = 0
    for i in range(1, len(rows) + 1):
        if i < len(rows) and rows[i].group is rows[start].group and i - start < TILE_ROWS:
            continue
        shared = rows[start].shared_pages * PAGE if i - start > 1 else 0
        tiles.append((start, i - start, shared))
        start = i
    return sorted(tiles, key=lambda tile: tile[1] < 2)  # tiles that share something first: half the rows bound their number


# Each takes the roundings of the stock modules, so that a fused step gives what they give. Axes: B rows, H query heads,
# K key heads, D head size, W hidden size, F inner size, V vocabulary.


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
    defers = False  # whether updates of delta nets' states wait beside them

    def __init__(self) -> None:
        self.branching = False
        """Whether ``together`` may use streams beside the current one: while a step is being captured."""
        self.apart = False
        """Whether rows of the step read the pages they share each for itself: what ``reads_apart`` said of its batch."""

    def together(self, first: Callable[[], Any], *others: Callable[[], Any]) -> list[Any]:
        """Results of work that does not depend on each other, in order."""
        return [work() for work in (first, *others)]

    def begin(self, policy: Policy, rows: DecodeRows, norm: NormWeights) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Of every row's last token: the residual stream, its norm, and the cosines and sines of its position."""
        embedded_BW = policy.adapter.language_model.embed_tokens(rows.tokens_B)
        rotary = policy.adapter.rotary(embedded_BW[:, None], rows.positions_B[None, :, None].expand(3, -1, 1))
        cos_BD, sin_BD = (part.reshape(embedded_BW.shape[0], -1) for part in one_axis(rotary))
        sum_BW = embedded_BW.float()
        return sum_BW, self.norm(sum_BW, norm), (cos_BD, sin_BD)

    def norm(self, x_BW: Tensor, norm: NormWeights) -> Tensor:
        """RMSNorm over the last axis in the weight's kind: float32 inside, rounded to x's kind before the weight.

        Not so before a centred one.
        """
        wide = x_BW.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
        return (norm.gain * (wide if norm.centred else wide.to(x_BW.dtype))).to(norm.weight.dtype)

    def add_norm(
        self, x_BW: Tensor, residual_BW: Tensor, norm: NormWeights, kind: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """The norm of the sum in the weight's kind or another, and the sum in the residual's kind."""
        summed_BW = residual_BW + x_BW
        finer = norm if kind is None else replace(norm, weight=norm.weight.to(kind))
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
        return gated_finely(gate_BF, up_BF)

    def half(self, weight: Tensor) -> Tensor:
        """A weight in float16."""
        return weight.half()

    def renew(self) -> None:
        """Weights changed in place: what was computed of them is computed again."""

    def gated(self, inner: GatedMLP, x_BW: Tensor) -> Tensor:
        """The inner values of a gated MLP; of float16 activations and wider weights as ``layer_torch.gated_finely``."""
        gate, up = inner.gate, inner.up
        if x_BW.dtype == torch.float16 and isinstance(gate, nn.Linear) and isinstance(up, nn.Linear):
            return self.gate_finely(*(wide_product(x_BW, self.half(layer.weight)) for layer in (gate, up)))
        return self.gate(*self.together(partial(inner.gate, x_BW), partial(inner.up, x_BW)))

    def reads_apart(self, rows: int, again: int) -> bool:
        """Whether rows that would read ``again`` bytes of a layer more do so to be faster."""
        return False

    def project(
        self, layer: LayerParts, x_BW: Tensor, rotary: tuple[Tensor, Tensor], rows: DecodeRows, layer_block: Tensor
    ) -> Tensor | Unplaced:
        """Queries, keys and values of a layer, normed and rotated; keys and values go to the rows' pages.

        Or what is left to ``attend`` to do.
        """
        # key and value are small: they take no longer than the query does if they run beside it
        query_BN, key_BN, value_BN = self.together(*(partial(part, x_BW) for part in (layer.query, layer.key, layer.value)))
        return self.place(query_BN, key_BN, value_BN, rotary, layer.norms, rows, layer_block, layer.gated)

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
        """Norm and rotate queries and keys, write keys and values to the rows' pages; the queries [B, H, D].

        ``layer_block`` is the layer's part of the pool: [2, pages, K, PAGE, D]. Angles may be those of a head's first
        numbers alone. ``gated``: each query has its gate behind it; then it is queries and opened gates, [2, B, H, D].
        """
        size, gate_BHD = layer_block.shape[-1], None
        query_BHD, key_BKD, value_BKD = (x.view(x.shape[0], -1, size) for x in (query_BN, key_BN, value_BN))
        if gated:
            query_BHD, gate_BHD = query_BHD[:, ::2], query_BHD[:, 1::2].sigmoid()
        if norms is not None:
            query_BHD, key_BKD = self.norm(query_BHD, norms[0]), self.norm(key_BKD, norms[1])
        cos_B1D, sin_B1D = (part[:, None] for part in rotary)
        query_BHD, key_BKD = _rotated(query_BHD, cos_B1D, sin_B1D), _rotated(key_BKD, cos_B1D, sin_B1D)
        self.write(key_BKD, value_BKD, rows, layer_block)
        return query_BHD if gate_BHD is None else torch.stack((query_BHD, gate_BHD))

    def write(self, key_BKD: Tensor, value_BKD: Tensor, rows: DecodeRows, layer_block: Tensor) -> None:
        """Write one entry of every row to its page; a row past its last page writes where nobody reads."""
        place_B = rows.lengths_B.clamp(max=rows.table_BP.shape[1] * PAGE - 1)
        page_B = rows.table_BP.gather(1, (place_B // PAGE)[:, None])[:, 0].long()
        for pages_NKPD, new_BKD in zip(layer_block.unbind(0), (key_BKD, value_BKD), strict=True):
            write_tokens(new_BKD, pages_NKPD, page_B, place_B % PAGE)

    def attend(self, query: Tensor | Unplaced, rows: DecodeRows, layer_block: Tensor, scaling: float) -> Tensor:
        """Attention over each row's pages, of what ``project`` gave, as [B, H · D]."""
        assert isinstance(query, Tensor)
        keys_NKPD, values_NKPD = layer_block.unbind(0)
        query_BHD, *gate_BHD = [query] if query.ndim == 3 else query.unbind()
        seen_BN = attend(query_BHD, keys_NKPD, values_NKPD, rows.table_BP, rows.lengths_B, scaling).flatten(1)
        return seen_BN * gate_BHD[0].flatten(1) if gate_BHD else seen_BN

    def mix(
        self,
        net: Any,
        x_BW: Tensor,
        windows_NWC: Tensor,
        states_NGKV: Tensor,
        slots_B: Tensor,
        waiting: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:
        """A delta net up to its output projection, [B, G · V], for one new token per row, as ``delta``.

        ``waiting``: updates, decays and counts beside the states (``StateSlots``); only kernels let updates wait.
        """
        assert waiting is None
        x_B1W = x_BW[:, None]
        tokens = tokens_of(net, net.in_proj_qkv(x_B1W), net.in_proj_b(x_B1W), net.in_proj_a(x_B1W))
        seen_B1GV = self.delta(net, tokens, windows_NWC, states_NGKV, slots_B)
        return gated(net, seen_B1GV, net.in_proj_z(x_B1W))[:, 0]

    def delta(self, net: Any, tokens: DeltaTokens, windows_NWC: Tensor, states_NGKV: Tensor, slots_B: Tensor) -> Tensor:
        """The result [B, 1, G, V] of a delta net for one new token per row; windows and states advance in their slots.

        Several rows may work on slot 0, whose states nobody reads.
        """
        before = DeltaState(windows_NWC.index_select(0, slots_B), states_NGKV.index_select(0, slots_B))
        out_B1GV, after = advance(net, tokens, before)
        windows_NWC.index_copy_(0, slots_B, after.window_BWC.to(windows_NWC.dtype))
        states_NGKV.index_copy_(0, slots_B, after.state_BGKV)
        return out_B1GV

    def draw(self, logits_BV: Tensor, rows: DecodeRows, forbidden_F: Tensor, stop_S: Tensor, truncated: bool) -> None:
        """Sample the next token of every row and advance the rows."""
        sampling = rows.sampling(forbidden_F, stop_S, truncated)
        drawn = sample(logits_BV.float(), sampling, uniforms(rows.keys_B, rows.counts_B))
        rows.advance(drawn.tokens_B, drawn.logprobs_B, drawn.sampled_logprobs_B)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads of which the first numbers are rotated, as many as there are angles."""
    turning, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turning.chunk(2, -1)
    return torch.cat((turning * cos + torch.cat((-second, first), -1) * sin, rest), -1)

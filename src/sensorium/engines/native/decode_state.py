"""The rows of a decode step at fixed addresses: what a CUDA graph reads, writes and moves on.

Row i of every tensor is row i of the batch. A batch of 5 rows in a bucket of 8 looks like this:

    lengths_B  [281 281 281 290 290   0   0   0]   cache entries before the token that is fed next
    table_BP   [ 4 5 6 7 8 0 …] …                  pages of each row; page 0 is scratch, padding rows live there
    shared_B   [256 256 256   0   0   0   0   0]   leading entries that rows of a tile have in common (whole pages)
    tile_first_B, tile_rows_B  [0 3 4 …], [3 1 1 0 …]   rows 0-2 are a tile: their common pages are read once

The step itself advances tokens, positions, lengths and counts, so that steps follow each other without the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sensorium.engines.native.key_values import PAGE
from sensorium.engines.native.sampler import SamplingRows, signed64
from sensorium.engines.protocol import Sampling
from sensorium.models.segment_layout import sent_to

TILE_ROWS = 8  # rows of a group that read their common pages together
INTEGERS = ("positions", "lengths", "counts", "keys", "greedy", "stop_masked", "top_k", "shared", "tile_first", "tile_rows")


@dataclass(frozen=True)
class RowLayout:
    """What the host knows of a row when a batch is laid out. ``source`` is where its last token stands on the device."""

    source: int
    position: int
    length: int
    count: int
    key: int
    sampling: Sampling
    pages: Sequence[int]
    shared_pages: int
    group: object


class DecodeState:
    """The tensors, for up to ``rows`` rows of ``pages`` pages each."""

    def __init__(self, rows: int, pages: int, vocab_size: int, device: torch.device) -> None:
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
        table = torch.zeros(bucket, self.pages, dtype=torch.int32)
        for i, row in enumerate(rows):
            sampling = row.sampling
            sources[i] = row.source
            columns[i][:7] = (
                row.position, row.length, row.count, signed64(row.key), int(sampling.temperature == 0),
                int(not sampling.stop_tokens), min(sampling.top_k, self.vocab_size) or self.vocab_size,
            )  # fmt: skip
            floats[i] = [sampling.temperature or 1.0, sampling.top_p]
            table[i, : len(row.pages)] = torch.tensor(row.pages, dtype=torch.int32)
        for i in range(len(rows), bucket):
            columns[i][6] = self.vocab_size
        for place, (first, count, shared) in enumerate(_tiles(rows)):
            columns[place][8:] = (first, count)
            for i in range(first, first + count):
                columns[i][7] = shared
        self.tokens_B[:bucket] = latest_N[sent_to(self.device, torch.tensor(sources))]
        self.integers_CB[:, :bucket] = sent_to(self.device, torch.tensor(columns)).T
        self.floats_CB[:, :bucket] = sent_to(self.device, torch.tensor(floats, dtype=torch.float64)).T
        self.table_BP[:bucket] = sent_to(self.device, table)


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
        """Advance the rows to the sampled tokens."""
        self.packed_3B.copy_(torch.stack((tokens_B.double(), logprobs_B, sampled_logprobs_B)))
        self.tokens_B.copy_(tokens_B)
        self.positions_B.add_(1)
        self.lengths_B.add_(1)
        self.counts_B.add_(1)


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

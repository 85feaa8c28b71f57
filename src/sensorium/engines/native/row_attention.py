"""Attention of few decode rows as one launch: placing, shared pages, own pages and merging.

With few rows none of these has much to do, and handing over from one kernel to the next takes as long as they do. The
kernel is ``compiled/cuda/row_attention.cu``.
"""

from collections.abc import Callable
from ctypes import Structure, c_float, c_int, c_void_p
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from sensorium.compiled.calls import addresses, pointers
from sensorium.compiled.device_code import DeviceCode, NoDeviceCode, Start, launch
from sensorium.engines.native.decode_ops import Unplaced
from sensorium.engines.native.decode_state import TILE_ROWS, DecodeRows
from sensorium.engines.native.pages import PAGE

MOST_ROWS = 32
LOG2_E = 1.4426950408889634
WARPS, DEPTH, ENTRIES, MOST_SPLITS, MOST_SHARE = 4, 3, 16, 8, 8  # as row_attention.cu has them
TRIAL_PAGES = 5  # that a row has in a trial
BOUND = 0.02  # of the largest value: how far a trial may be from kernels one by one


class CAttention(Structure):
    """``struct attention`` of row_attention.cu."""

    _fields_: ClassVar = [
        *pointers("parts query_bias key_bias value_bias cos sin query_gain key_gain keys values table lengths shared"),
        *pointers("tile_first tile_rows common common_weights done out"),
        ("eps", c_float), ("factor", c_float), ("count", c_int), ("rows", c_int), ("width", c_int),
    ]  # fmt: skip


Plain = Callable[[Unplaced, DecodeRows, Tensor], Tensor]
"""Attention of unplaced rows to the pages of a layer, kernel by kernel."""


class RowAttention:
    """The launch for batches of few rows, tried against kernels one by one with each number of rows."""

    def __init__(self, noted: Callable[[str], None], plain: Plain) -> None:
        self._noted, self._plain = noted, plain
        self._kernels: dict[tuple[int, ...], tuple[DeviceCode, c_void_p]] = {}
        self._scratch: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._tried: set[int] = set()
        self._usable = True

    def takes(self, given: Unplaced, layer_block: Tensor) -> bool:
        """Whether these rows are attended to in one launch; with a number of rows that is new, after a trial."""
        rows = given.parts_PBN.shape[1]
        if not self._usable or rows > MOST_ROWS or not _known(given, layer_block):
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
        splits = _splits(batch, kv_heads)
        norms = layer.norms or (layer.before, layer.before)
        told = CAttention(
            *addresses(
                given.parts_PBN, *(given.biases or (out_BN,) * 3), *given.rotary, norms[0].weight, norms[1].weight,
                layer_block[0], layer_block[1], rows.table_BP, rows.lengths_B, rows.shared_B, rows.tile_first_B,
                rows.tile_rows_B, *self._scratch_of(batch, heads, kv_heads, size), out_BN,
            ),
            norms[0].eps, layer.scaling * LOG2_E, parts, batch, rows.table_BP.shape[1],
        )  # fmt: skip
        kernel = self._kernel(
            HEADS=heads,
            KV=kv_heads,
            SIZE=size,
            PAGE=PAGE,
            SPLITS=splits,
            BIAS=bool(given.biases),
            NORM=layer.norms is not None,
        )
        launch(kernel, (batch // 2 + batch) * kv_heads * splits, 32 * WARPS, told, _shared_bytes(size), Start.AHEAD)
        return out_BN

    def _scratch_of(self, batch: int, heads: int, kv_heads: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
        if batch not in self._scratch:
            self._scratch[batch] = (
                torch.empty(batch, heads, size, device="cuda"),
                torch.empty(batch, heads, device="cuda"),
                torch.zeros(max(1, batch // 2), kv_heads, MOST_SPLITS, 2, dtype=torch.int32, device="cuda"),
            )
        return self._scratch[batch]

    def _kernel(self, **numbers: int) -> c_void_p:
        key = tuple(numbers.values())
        if key not in self._kernels:
            code = DeviceCode("row_attention.cu", {name: int(number) for name, number in numbers.items()})
            self._kernels[key] = (code, code.kernel("row_attention_kernel", _shared_bytes(numbers["SIZE"])))
        return self._kernels[key][1]

    def _try(self, given: Unplaced, layer_block: Tensor) -> None:
        """Hold it against kernels one by one: rows of different lengths, the first of which share a page."""
        batch = given.parts_PBN.shape[1]
        rows, block = _trial(batch, layer_block)
        wavy = torch.sin(torch.arange(given.parts_PBN.numel(), device=block.device) * 1.3).view_as(given.parts_PBN)
        given = replace(given, parts_PBN=wavy)
        try:
            expected_block = block.clone()
            expected = self._plain(given, rows, expected_block)
            found = self.attend(given, rows, block)
            pairs = ((found, expected), (block, expected_block))
            error = max(float((one.float() - other.float()).abs().max() / other.abs().max()) for one, other in pairs)
            wrong = "" if error <= BOUND else f"a trial of {batch} rows was {error:.2g} off (bound {BOUND:g})"
        except (NoDeviceCode, torch.OutOfMemoryError) as failure:
            wrong = str(failure).strip().split("\n")[0]
        if wrong:
            self._usable = False
            self._noted(f"attention of at most {MOST_ROWS} rows takes several launches, so steps take longer: {wrong}.")
        else:
            self._tried.add(batch)


def _splits(batch: int, kv_heads: int) -> int:
    """CTAs for a row and key head: together not more than run at the same time."""
    room = 2 * torch.cuda.get_device_properties().multi_processor_count
    return next((splits for splits in (MOST_SPLITS, 4, 2) if batch * kv_heads * splits <= room), 1)


def _shared_bytes(size: int) -> int:
    tile, found = 2 * ENTRIES * 2 * size, 2 * TILE_ROWS // WARPS * 8 * 4
    return WARPS * (DEPTH * tile + 8 * (2 * size + 16) + found)


def _known(given: Unplaced, layer_block: Tensor) -> bool:
    """Whether the kernel can be compiled for these sizes, and everything has the kind that it reads."""
    _, _, kv_heads, page, size = layer_block.shape
    heads = given.parts_PBN.shape[2] // size - 2 * kv_heads
    read = (layer_block, *given.biases, *given.rotary, *(norm.weight for norm in given.layer.norms or ()))
    if not all(each.dtype == torch.bfloat16 and each.is_contiguous() for each in read):
        return False
    if page != PAGE or size not in (64, 128) or heads % kv_heads or heads // kv_heads > MOST_SHARE:
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(layer_block.device)[0] >= 9


def _trial(batch: int, layer_block: Tensor) -> tuple[DecodeRows, Tensor]:
    """Rows with pages of their own; those of the first tile have one in common."""
    device, sharing = layer_block.device, min(batch, TILE_ROWS)
    shape = (2, 1 + batch * TRIAL_PAGES, *layer_block.shape[2:])
    block = torch.cos(torch.arange(torch.Size(shape).numel(), device=device) * 0.7).view(shape).to(layer_block.dtype)
    table_BP = 1 + torch.arange(batch * TRIAL_PAGES, dtype=torch.int32, device=device).view(batch, TRIAL_PAGES)
    numbers_B = torch.arange(batch, device=device)
    lengths_B = PAGE + numbers_B * 37 % (PAGE * (TRIAL_PAGES - 1))
    shared_B, tile_first_B, tile_rows_B = (torch.zeros_like(numbers_B) for _ in range(3))
    if sharing > 1:
        table_BP[:sharing, 0] = 1
        shared_B[:sharing] = PAGE
        tile_rows_B[0] = sharing
    rest = torch.zeros_like(numbers_B)
    floats = torch.ones_like(numbers_B, dtype=torch.float64)
    rows = DecodeRows(
        tokens_B=rest, positions_B=rest, lengths_B=lengths_B, counts_B=rest, keys_B=rest, greedy_B=rest, stop_masked_B=rest,
        top_k_B=rest, shared_B=shared_B, tile_first_B=tile_first_B, tile_rows_B=tile_rows_B, table_BP=table_BP,
        temperature_B=floats, top_p_B=floats, packed_3B=floats[None].expand(3, -1),
    )  # fmt: skip
    return rows, block

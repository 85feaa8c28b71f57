"""Attention of a decode step as one launch: placing, attending and merging (``kernels/cuda/row_attention.cu``).

None of these has much to do, and handing over from one kernel to the next takes as long as they do. Every row reads all of
its pages, those that it shares with others too. They come from the GPU's cache, so only groups with long prompts are
faster where a kernel reads what they share once (``kernels/decode_attention_triton.py``).
"""

from collections.abc import Callable
from ctypes import Structure, c_float, c_int, c_void_p
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from sensorium.engines.native.decode_state import DecodeRows, Unplaced
from sensorium.engines.native.key_values import PAGE
from sensorium.kernels.device_code import DeviceCode, NoDeviceCode, addresses, launch, pointers

MOST_ROWS = 128
READ_AGAIN = 128_000_000
"""Bytes of a layer that rows may read again, each for itself. µs of a layer's attention on an H200, with Qwen2.5-VL-3B's
heads, kernels one by one and in one launch: rows of W1, which share a short prompt, 9.7 and 6.7 at 8 rows, 12.0 and 7.8 at
32, 22.4 and 13.3 at 128; of W3's tail 7.7 and 5.3 at 1, 13.4 and 10.4 at 16, 23.3 and 16.8 at 64, 32.3 and 21.0 at 128.
Groups that share 4,160 entries: 22.5 and 12.9 at 8 (29 MB read again), 26.1 and 18.6 at 24 (87 MB), 27.1 and 28.7 at 32
(116 MB), 43.6 and 61.5 at 128 (466 MB)."""
LOG2_E = 1.4426950408889634
WARPS, DEPTH, ENTRIES, MOST_SPLITS, MOST_SHARE = 4, 3, 16, 8, 8  # as row_attention.cu has them
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
    """The launch, tried against kernels one by one with each number of rows."""

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
        splits = _splits(batch, kv_heads)
        norms = layer.norms or (layer.before, layer.before)
        given_fields = CAttention(
            *addresses(
                given.parts_PBN, *(given.biases or (out_BN,) * 3), *given.rotary, norms[0].weight, norms[1].weight,
                layer_block[0], layer_block[1], rows.table_BP, rows.lengths_B, out_BN,
            ),
            norms[0].eps, layer.scaling * LOG2_E, parts, batch, rows.table_BP.shape[1],
        )  # fmt: skip
        flags = {"BIAS": bool(given.biases), "NORM": layer.norms is not None}
        kernel = self._kernel(HEADS=heads, KV=kv_heads, SIZE=size, PAGE=PAGE, SPLITS=splits, **flags)
        launch(kernel, batch * kv_heads * splits, 32 * WARPS, given_fields, _shared_bytes(size))
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


def _splits(batch: int, kv_heads: int) -> int:
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

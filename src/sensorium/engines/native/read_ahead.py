"""Weights brought into the L2 cache while attention runs, which leaves most of the memory's bandwidth unused.

A decode step of few rows takes the time of reading its weights. Between two products stand attention and its small
kernels, some 10 µs a layer on an H200; meanwhile a kernel beside them asks for the beginning of every row of the weights
that come next. Nothing is computed with what it asks for, so no number changes.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

AHEAD_BYTES = 24 << 20  # of the weights that come next; half of an H200's L2 cache holds more
LINE_BYTES = 128
BLOCK = 1024


def read_ahead(weights: Sequence[Tensor]) -> None:
    """Ask for the beginnings of the rows of up to three weights [N, K], without waiting for them."""
    lines, left = [], AHEAD_BYTES
    for i, weight in enumerate(weights):
        rows, row_bytes = weight.shape[0], weight.shape[1] * weight.element_size()
        wanted = min(row_bytes, left // (len(weights) - i) // rows) // LINE_BYTES
        lines.append(wanted)
        left -= wanted * LINE_BYTES * rows
    counts = [weight.shape[0] * wanted for weight, wanted in zip(weights, lines, strict=True)]
    blocks = [triton.cdiv(count, BLOCK) for count in counts]
    if not all(blocks):
        return
    more = 3 - len(weights)
    widths = [weight.shape[1] for weight in weights]
    _read_ahead[(sum(blocks),)](
        *weights, *(weights[:1] * more), *lines, *([1] * more), *widths, *([0] * more), *counts, *([1] * more),
        blocks[0], sum(blocks[:2]), LINE=LINE_BYTES // weights[0].element_size(), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit
def _read_ahead(
    first, second, third, first_lines, second_lines, third_lines, first_width, second_width, third_width,
    first_count, second_count, third_count, second_from, third_from, LINE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    weight = first
    lines = first_lines
    width = first_width
    count = first_count
    start = 0
    if block >= third_from:
        weight = third
        lines = third_lines
        width = third_width
        count = third_count
        start = third_from
    elif block >= second_from:
        weight = second
        lines = second_lines
        width = second_width
        count = second_count
        start = second_from
    place = tl.minimum((block - start) * BLOCK + tl.arange(0, BLOCK), count - 1)
    address = weight + (place // lines).to(tl.int64) * width + (place % lines) * LINE
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )

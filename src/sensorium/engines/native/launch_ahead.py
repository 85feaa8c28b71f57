"""Kernels of a decode step that start while the one before them ends (programmatic dependent launch, from Hopper on).

A kernel says at once that the next may start, asks for the weights it will read, and waits for the one before it before it
reads or writes anything else. All kernels of the chain wait, so what an earlier one wrote is there as well. In a step of few
rows some 300 kernels of a few microseconds follow each other: what lies between them is a third of its time.
"""

# mypy: disable-error-code="no-untyped-def"

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def launch_ahead(x: Tensor) -> dict[str, Any]:
    """Options of a launch whose kernel calls ``after_previous``."""
    return {"AHEAD": True, "launch_pdl": True} if x.is_cuda and _possible(x.get_device()) else {"AHEAD": False}


@cache
def _possible(device: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit
def next_may_start(AHEAD: tl.constexpr):
    """The next kernel may be launched; it waits for this one's results by itself."""
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def after_previous(AHEAD: tl.constexpr):
    """Wait until the kernels before this one are done; before it, only weights may be touched."""
    if AHEAD:
        tl.extra.cuda.gdc_wait()


@triton.jit
def ask_for(pointers, AHEAD: tl.constexpr):
    """Ask for lines of memory to be brought into the L2 cache."""
    if AHEAD:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )

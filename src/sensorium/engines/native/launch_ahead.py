"""Kernels of a decode step launched while the one before them ends (programmatic dependent launch, from Hopper on).

A kernel of the chain says at its start that the next may be launched, and waits for the one before it before it reads or
writes anything. All of them wait, so what an earlier one wrote is there as well.
"""

# mypy: disable-error-code="no-untyped-def"

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def launch_ahead(x: Tensor) -> dict[str, Any]:
    """Options of a launch whose kernel calls ``after_previous`` first."""
    return {"AHEAD": True, "launch_pdl": True} if x.is_cuda and _possible(x.get_device()) else {"AHEAD": False}


@cache
def _possible(device: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit
def after_previous(AHEAD: tl.constexpr):
    """Let the next kernel be launched, and wait until those before this one are done."""
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

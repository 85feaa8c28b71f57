"""Random numbers keyed by what they are for, not by the order they are drawn in.

A response has a 64-bit key; its token t draws ``hash(key, t)``. The hash is integer arithmetic on the tensor's device, so
CPU and GPU give the same bits, and it can be captured in a graph.
"""

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_BITS = 52  # with half a unit added, 52 bits stay strictly inside (0, 1) in float64; 53 would round up to 1


def signed64(value: int) -> int:
    """The low 64 bits of an integer, as the signed number that an int64 tensor holds."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def uniforms(keys_B: Tensor, token_index_B: Tensor) -> Tensor:
    """One float64 in the open interval (0, 1) per row: a function of (key, token index) alone."""
    state_B = _mix(keys_B) + (token_index_B + 1) * signed64(_GOLDEN)
    return (_logical_shift(_mix(state_B), 64 - _BITS).to(torch.float64) + 0.5) * 2.0**-_BITS


def _mix(z: Tensor) -> Tensor:
    """The finaliser of splitmix64; int64 products wrap as unsigned ones do."""
    z = (z ^ _logical_shift(z, 30)) * signed64(_MIX_1)
    z = (z ^ _logical_shift(z, 27)) * signed64(_MIX_2)
    return z ^ _logical_shift(z, 31)


def _logical_shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)

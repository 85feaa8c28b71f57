"""Float32 numbers held in 16-bit halves: a bfloat16 weight with its remainder, and moments rounded at random.

    master     0x3F80_8001   1.0039064…  what the optimizer moves
    weight     0x3F81        1.0078125   the master rounded to bfloat16, ties away from zero: what the model computes with
    remainder      -0x7FFF               master's bits minus the weight's, as 16 bits

Weight and remainder together are the master, bit for bit, in half the memory of a copy. Ties go away from zero because
to-even would leave 65,537 remainders: one more than 16 bits hold.
"""

import torch
from torch import Tensor

HALF = 0x8000
MASK = 0xFFFFFFFF


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """(weight as bfloat16, remainder as int16) of a float32 master."""
    bits = master.contiguous().view(torch.int32)
    weight = (bits + HALF) >> 16
    remainder = bits - (weight << 16)
    return weight.to(torch.int16).view(torch.bfloat16), remainder.to(torch.int16)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The float32 master of a weight and its remainder."""
    bits = (weight.contiguous().view(torch.int16).to(torch.int32) << 16) + remainder
    return bits.view(torch.float32)


def rounded_at_random(values: Tensor, noise: Tensor) -> Tensor:
    """Float32 values as bfloat16: up with the probability of the part that is cut off, so that small changes add up.

    ``noise`` is uniform in 0 … 65535. A decay of 0.001 a step is less than half of bfloat16's last bit: rounded to the
    nearest, a second moment would never fall.
    """
    return ((values.contiguous().view(torch.int32) + noise) >> 16).to(torch.int16).view(torch.bfloat16)


def noise_bits(shape: torch.Size, key: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two times 16 random bits for every element, a function of its place and ``key`` alone (int32)."""
    x = (torch.arange(shape.numel(), dtype=torch.int64, device=device) + (key & MASK)) & MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    x = (x ^ (x >> 16)).view(shape)
    return (x & 0xFFFF).to(torch.int32), (x >> 16).to(torch.int32)


def noise_key(step: int, place: int) -> int:
    """A key for one step of one tensor; keys of neighbours are far apart."""
    x = (step * 0x9E3779B1 + place * 0x85EBCA77 + 0x165667B1) & MASK
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & MASK
    return (x ^ (x >> 12)) & MASK

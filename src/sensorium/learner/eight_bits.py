"""Moments of AdamW in 8 bits: codes on a logarithmic scale, and the largest value of every 256 numbers in float32.

    block       0.5     -0.03125      0         the largest is 0.5
    codes       127     128 + 95      0         eight codes are a factor of two: 0.5 · 2^((95 - 127) / 8) = 0.03125

A first moment has a sign and 127 sizes, down to 2^-15.75 of the largest; a second moment 255 sizes, down to 2^-31.75, whose
root goes as far. Neighbouring codes are 9 % apart, and a number between two becomes one of them at random, so that it is
right on average and small changes add up. On a linear scale small numbers of a block would become 0 or far too large, and
a step divides the one moment by the other's root. So a second moment that is not 0 never becomes 0.
"""

import torch
from torch import Tensor

BLOCK = 256
PER_OCTAVE = 8
FIRST, SECOND = 127, 255  # the codes of the largest value
SIGN = 128


def blocks_of(count: int) -> int:
    """Blocks of so many numbers."""
    return -(-count // BLOCK)


def pack(values: Tensor, levels: int, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Codes in the shape of the float32 values, and the largest of each block; ``noise`` is uniform in 0 … 65535."""
    blocks = _in_blocks(values.flatten())
    top_N1 = blocks.abs().amax(1, keepdim=True)
    share = blocks.abs() / top_N1.clamp(min=torch.finfo(torch.float32).tiny)
    below = (levels + PER_OCTAVE * share.log2()).floor().clamp(0, levels - 1)  # log2(0) is minus infinity
    scale = sizes(levels, values.device)
    low, high = scale[below.int()], scale[below.int() + 1]
    up = _in_blocks(noise.flatten()).float() < (share - low) / (high - low) * 65536
    codes = below.to(torch.uint8) + up.to(torch.uint8)
    if levels == SECOND:
        codes = torch.where(blocks > 0, codes.clamp(min=1), codes)
    else:
        codes = torch.where(blocks < 0, codes + SIGN, codes)
    return codes.flatten()[: values.numel()].view(values.shape), top_N1[:, 0]


def unpack(codes: Tensor, tops_N: Tensor, levels: int) -> Tensor:
    """Float32 values of codes."""
    blocks = _in_blocks(codes.flatten())
    size = blocks if levels == SECOND else blocks % SIGN
    values = sizes(levels, codes.device)[size.int()] * tops_N[:, None]
    if levels == FIRST:
        values = torch.where(blocks >= SIGN, -values, values)
    return values.flatten()[: codes.numel()].view(codes.shape)


def sizes(levels: int, device: torch.device) -> Tensor:
    """What the codes 0 … ``levels`` stand for, as shares of the largest value."""
    exponents = (torch.arange(levels + 1, dtype=torch.float64) - levels) / PER_OCTAVE
    shares = exponents.exp2()
    shares[0] = 0
    return shares.float().to(device)


def _in_blocks(flat: Tensor) -> Tensor:
    missing = -len(flat) % BLOCK
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, BLOCK)

"""Discounted sums to the end of a segment, for all positions at once."""

import torch
from torch import Tensor


def discounted(values_P: Tensor, segments_P: Tensor, discount: float) -> Tensor:
    """Σ_k discount^k · x_{p+k} within the segment of p; positions of a segment are neighbours and share a number.

    By doubling: a sum over 2d positions is that over the first d plus discount^d times that over the next d.
    """
    sums_P = values_P.double()
    _, lengths = torch.unique_consecutive(segments_P, return_counts=True)
    longest = int(lengths.max()) if len(lengths) else 0
    reach = 1
    while reach < longest:
        together = segments_P[:-reach] == segments_P[reach:]
        further = torch.where(together, discount**reach * sums_P[reach:], 0)
        sums_P = torch.cat([sums_P[:-reach] + further, sums_P[-reach:]])
        reach *= 2
    return sums_P


def last_of(segments_P: Tensor) -> Tensor:
    """Which positions are the last of their segment."""
    last_P = torch.ones_like(segments_P, dtype=torch.bool)
    last_P[:-1] = segments_P[1:] != segments_P[:-1]
    return last_P

"""Whether numbers differ at all, and their mean and spread. Sums of the same terms in another order do not differ."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NOISE = 1e-12
"""Relative to max(1, |x|): what the order of summation can change in float64 and no reward means."""

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""


@dataclass(frozen=True)
class Moments:
    """Mean, unbiased standard deviation, and whether the values vary at all (one value, or none, does not)."""

    mean: Tensor
    std: Tensor
    varied: Tensor


def differ(one: Tensor, other: Tensor) -> Tensor:
    """Where two numbers are apart by more than the noise of summation.

    NaN and infinities differ from everything, themselves included, so that they are never taken for "no difference".
    """
    scale = torch.maximum(one.abs(), other.abs()).clamp(min=1)
    gap = (one - other).abs()
    return ~(gap <= NOISE * scale) | ~gap.isfinite()


def alike(values: Sequence[float]) -> bool:
    """True if no two of the values differ, by the same rule."""
    given = torch.tensor(values, dtype=torch.float64)
    return len(given) < 2 or not bool(differ(given.amin(), given.amax()))


def moments(values: Tensor, members: Tensor) -> Moments:
    """Of the members only, along the last axis."""
    counts = members.sum(-1)
    mean = torch.where(members, values, 0).sum(-1) / counts.clamp(min=1)
    deviations = torch.where(members, values - mean.unsqueeze(-1), 0)
    std = (deviations.square().sum(-1) / (counts - 1).clamp(min=1)).sqrt()
    lowest = torch.where(members, values, torch.inf).amin(-1)
    highest = torch.where(members, values, -torch.inf).amax(-1)
    return Moments(mean, std, (counts > 1) & differ(lowest, highest))

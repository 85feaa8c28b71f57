"""Values as deviations from their mean in units of their spread. Without variance, or alone, a value is exactly 0."""

import torch
from torch import Tensor

from sensorium.algorithms.variance import EPSILON, Moments, moments


def whiten(values_N: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8), for values of positions."""
    spread = _moments(values_N)
    return _unless_constant(spread, (values_N - spread.mean) * torch.rsqrt(spread.std.square() + 1e-8))


def standardise(values_S: Tensor) -> Tensor:
    """(x - mean) / (std + 1e-6), for values of episodes."""
    spread = _moments(values_S)
    return _unless_constant(spread, (values_S - spread.mean) / (spread.std + EPSILON))


def _moments(values: Tensor) -> Moments:
    if not len(values):
        values = values.new_zeros(1)
    return moments(values, torch.ones_like(values, dtype=torch.bool))


def _unless_constant(spread: Moments, scaled: Tensor) -> Tensor:
    return torch.where(spread.varied, scaled, 0)

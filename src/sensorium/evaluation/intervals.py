"""Confidence intervals for shares and means, plain Python."""

from collections.abc import Sequence
from math import sqrt

Z95 = 1.959963984540054


def wilson(successes: float, trials: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's interval of a share; sound near 0 and 1 and for few trials."""
    if trials <= 0:
        raise ValueError("an interval needs at least one trial")
    share = successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / (1 + z * z / trials)
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(values: Sequence[float], z: float = Z95) -> tuple[float, float]:
    """95 % interval of the mean of per-task shares: Wilson where every value is 0 or 1, else by the standard error."""
    if all(value in (0.0, 1.0) for value in values):
        return wilson(sum(values), len(values), z)
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
    half = z * sqrt(variance / len(values))
    return max(0.0, mean - half), min(1.0, mean + half)

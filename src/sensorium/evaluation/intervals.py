"""Confidence intervals for shares, means and paired differences, plain Python. The task is the unit, never the sample."""

from collections.abc import Sequence
from math import comb, sqrt

Z95 = 1.959963984540054


def wilson(successes: float, trials: float, z: float = Z95) -> tuple[float, float]:
    """Wilson's interval of a share; sound near 0 and 1 and for few trials."""
    if trials <= 0:
        raise ValueError("an interval needs at least one trial")
    share = successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / (1 + z * z / trials)
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(values: Sequence[float], samples: int = 1, z: float = Z95) -> tuple[float, float]:
    """95 % interval of the mean of per-task shares, each of ``samples`` samples that may be alike.

    Wilson's, for as many independent trials as the spread among tasks is worth: one a task where its samples always agree,
    up to ``samples`` a task where tasks differ no more than by chance.
    """
    tasks, total = len(values), sum(values)
    if tasks == 1 or all(value in (0.0, 1.0) for value in values):
        return wilson(total, tasks, z)
    mean = total / tasks
    variance = sum((value - mean) ** 2 for value in values) / (tasks - 1)
    most = tasks * samples
    trials = min(most, tasks * mean * (1 - mean) / variance) if variance > 0 else most
    return wilson(mean * trials, trials, z)


def paired_interval(differences: Sequence[float], z: float = Z95) -> tuple[float, float]:
    """95 % interval of the mean of per-task differences, each within [-1, 1].

    By Bonett and Price (2012): one task won and one lost are added, then the normal interval is taken. So it is sound for
    few tasks, and has a width where no task changed. It needs no random numbers.
    """
    if not differences:
        raise ValueError("an interval needs at least one task")
    count = len(differences) + 2
    mean = sum(differences) / count
    variance = (sum(value * value for value in differences) + 2) / count - mean * mean
    half = z * sqrt(variance / count)
    return max(-1.0, mean - half), min(1.0, mean + half)


def sign_test(one: int, other: int) -> float:
    """McNemar's exact two-sided p: how often chance alone would share out ``one + other`` changed tasks as unevenly."""
    changed = one + other
    tail = sum(comb(changed, i) for i in range(min(one, other) + 1))
    return min(1.0, 2 * tail / 2**changed)

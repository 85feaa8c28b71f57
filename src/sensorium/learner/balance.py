"""Which rank computes which group: so that all have about as much to do, and the same division every time."""

from collections.abc import Sequence


def divide(costs: Sequence[float], ranks: int) -> list[int]:
    """The rank of each group. The costliest groups are given out first, each to the rank with the least so far.

    Example: costs 5, 3, 3, 2, 2 over two ranks go to ranks 0, 1, 1, 0, 1: sums 7 and 8.
    """
    loads = [0.0] * ranks
    chosen = [0] * len(costs)
    for group in sorted(range(len(costs)), key=lambda group: (-costs[group], group)):
        rank = min(range(ranks), key=lambda rank: (loads[rank], rank))
        chosen[group] = rank
        loads[rank] += costs[group]
    return chosen

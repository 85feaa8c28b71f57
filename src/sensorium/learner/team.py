"""The processes that train one model together, as one of them sees them.

Every rank knows the whole update: its tokens, advantages and counts. It packs and computes the groups that are its own,
writes what it finds at their places in vectors of the whole update, and the vectors are summed:

    groups                  g0   g1   g2   g3
    computed by rank         0    1    1    0
    log-probs on rank 0     a a  . .  . .  d d     (. is 0)
    after ``sum``           a a  b b  c c  d d     on both ranks

So weights, losses and metrics are those of one process, whatever the number of ranks. Where neighbours share tokens
(``tokens``), groups are divided among such token groups, and each rank finds what its own tokens say. ``Team`` itself is a
single process; ``learner/sharded`` has the team of several.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sensorium.learner.packing import Packing
from sensorium.learner.sequence_parallel import TokenGroup


class Team:
    """One process: all groups are its own, and there is nobody to sum with."""

    rank = 0
    size = 1
    tokens: TokenGroup | None = None
    """The ranks that share the tokens of every micro-batch of this one; None: it computes them alone."""

    def owned(self, costs: Sequence[float]) -> list[bool]:
        """Which groups are computed here, given what each costs."""
        return [True] * len(costs)

    def level(self, packing: Packing) -> Packing:
        """A packing with as many micro-batches of each kind as the other ranks have, since all run the same modules."""
        return packing

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        return tensor

    def largest(self, *numbers: float) -> tuple[float, ...]:
        """The largest of each number over all ranks."""
        return numbers

    def total(self, *numbers: float) -> tuple[float, ...]:
        """The sum of each number over all ranks."""
        return numbers

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor to read into, spread over the ranks where there are several."""
        return torch.empty(shape, dtype=dtype)

    def norm(self, shards: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        """The norm of all gradients together: of those that are spread over the ranks, and of those that each has whole."""
        return sum_of_squares([*shards, *whole]).sqrt().float()


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device | None = None) -> Tensor:
    """Of all elements, in float64: a sum in float32 would depend on how the ranks divide it."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(list(tensors), 2, dtype=torch.float64)
    return torch.stack([norm.to(device) for norm in norms]).square().sum()


ALONE = Team()


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

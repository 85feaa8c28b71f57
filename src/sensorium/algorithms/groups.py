"""Groups of any size as one matrix, so that every group is computed at once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sensorium.algorithms.variance import Moments, moments


@dataclass(frozen=True)
class Groups:
    """Where each of S episodes stands in a matrix with a row for every group.

    Axes: K groups, G members of the largest. ``present_KG`` is false where a smaller group has no member.
    """

    rows_S: Tensor
    columns_S: Tensor
    present_KG: Tensor

    @property
    def sizes(self) -> Tensor:
        """How many members every group has, as [K, 1]."""
        return self.present_KG.double().sum(1, keepdim=True)

    def lay_out(self, values_S: Tensor) -> Tensor:
        """A value of every episode as [K, G], 0 where there is no member."""
        laid_KG = torch.zeros(self.present_KG.shape, dtype=torch.float64, device=values_S.device)
        return laid_KG.index_put((self.rows_S, self.columns_S), values_S.double())

    def back(self, values_KG: Tensor) -> Tensor:
        """The value of every episode from [K, G], or from [K, 1] for a value of its group."""
        return values_KG.expand(self.present_KG.shape)[self.rows_S, self.columns_S]

    def moments(self, values_KG: Tensor) -> Moments:
        """Mean, spread and variation of every group, as [K, 1]."""
        return moments(values_KG.unsqueeze(1), self.present_KG.unsqueeze(1))


def grouped(groups_S: Tensor) -> Groups:
    """The groups of episodes that name theirs, in any order."""
    _, rows_S, sizes_K = torch.unique(groups_S, return_inverse=True, return_counts=True)
    order_S = rows_S.argsort(stable=True)
    within_S = torch.arange(len(rows_S), device=rows_S.device) - (sizes_K.cumsum(0) - sizes_K)[rows_S[order_S]]
    columns_S = torch.empty_like(rows_S).index_put((order_S,), within_S)
    largest = int(sizes_K.max()) if len(sizes_K) else 1
    present_KG = torch.arange(largest, device=rows_S.device) < sizes_K.unsqueeze(1)
    return Groups(rows_S, columns_S, present_KG)


def varied(scores_S: Tensor, groups_S: Tensor) -> Tensor:
    """Episodes in whose group the scores vary."""
    groups = grouped(groups_S)
    return groups.back(groups.moments(groups.lay_out(scores_S)).varied)

"""RLOO: an episode's reward against the mean of the others, n/(n-1)·(R - mean)."""

import torch
from torch import Tensor

from sensorium.algorithms.channels import compared
from sensorium.algorithms.episodes import Credit, Episodes
from sensorium.algorithms.groups import grouped


def estimate(episodes: Episodes) -> Credit:
    """Every token gets its episode's value; a group without variance gives exactly 0."""
    return compared(episodes, _compare)


def _compare(scores_S: Tensor, groups_S: Tensor, lengths_S: Tensor) -> Tensor:
    groups = grouped(groups_S)
    scores_KG = groups.lay_out(scores_S)
    own = groups.moments(scores_KG)
    scale_K1 = groups.sizes / (groups.sizes - 1).clamp(min=1)
    return groups.back(torch.where(own.varied, scale_K1 * (scores_KG - own.mean), 0))

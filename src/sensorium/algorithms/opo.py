"""OPO: an episode's reward against the group's mean weighted by length, R - Σ(length·R)/Σlength."""

import torch
from torch import Tensor

from sensorium.algorithms.channels import compared
from sensorium.algorithms.episodes import Credit, Episodes
from sensorium.algorithms.groups import grouped


def estimate(episodes: Episodes) -> Credit:
    """Lengths are in tokens the model wrote (a span's are its own); a group without variance gives exactly 0."""
    return compared(episodes, _compare)


def _compare(scores_S: Tensor, groups_S: Tensor, lengths_S: Tensor) -> Tensor:
    groups = grouped(groups_S)
    scores_KG, lengths_KG = groups.lay_out(scores_S), groups.lay_out(lengths_S)
    total_K1 = lengths_KG.sum(1, keepdim=True).clamp(min=1)
    baseline_K1 = (lengths_KG * scores_KG).sum(1, keepdim=True) / total_K1
    return groups.back(torch.where(groups.moments(scores_KG).varied, scores_KG - baseline_K1, 0))

"""GRPO: an episode's reward against the rest of its group, (R - mean) / (std + 1e-6), std unbiased.

Divided by the group's own std an advantage cannot exceed (n-1)/√n. Divided by the std of the others it could be anything:
of [1, 0.5, 0.5 + 1e-7] the first is 7 million of the others' stds away. So leave-one-out is held to √n, the most that a
reward can be away from the mean of the others in units of the whole group's std. Rewards of 0 and 1 never get there.
"""

from functools import partial

import torch
from torch import Tensor

from sensorium.algorithms.channels import compared
from sensorium.algorithms.episodes import Credit, Episodes
from sensorium.algorithms.groups import grouped
from sensorium.algorithms.variance import EPSILON, moments


def estimate(episodes: Episodes, *, std: bool = True, leave_one_out: bool = False) -> Credit:
    """``std=False`` does not divide (Dr.GRPO); ``leave_one_out`` takes mean and std over the other members."""
    return compared(episodes, partial(compare, std=std, leave_one_out=leave_one_out))


def compare(scores_S: Tensor, groups_S: Tensor, lengths_S: Tensor, *, std: bool, leave_one_out: bool) -> Tensor:
    """A group without variance gives exactly 0; where the others' scores do not vary, they are not divided by.

    With ``leave_one_out`` and ``std`` no value is beyond ±√n, n the size of the group.
    """
    groups = grouped(groups_S)
    scores_KG = groups.lay_out(scores_S)
    own = base = groups.moments(scores_KG)
    if leave_one_out:
        itself_GG = torch.eye(scores_KG.shape[1], dtype=torch.bool, device=scores_KG.device)
        base = moments(scores_KG.unsqueeze(1), groups.present_KG.unsqueeze(1) & ~itself_GG)
    values_KG = scores_KG - base.mean
    if std:
        values_KG = torch.where(base.varied, values_KG / (base.std + EPSILON), values_KG)
    if std and leave_one_out:
        bound_K1 = groups.sizes.sqrt()
        values_KG = torch.where(values_KG.isfinite(), values_KG.clamp(-bound_K1, bound_K1), values_KG)
    return groups.back(torch.where(own.varied, values_KG, 0))

"""Pass@k: only the best of a group is credited, with its lead over the second, (r1 - r2) / (std + 1e-6)."""

import torch
from torch import Tensor

from sensorium.algorithms.channels import compared
from sensorium.algorithms.episodes import Credit, Episodes
from sensorium.algorithms.groups import grouped
from sensorium.algorithms.variance import EPSILON, differ


def estimate(episodes: Episodes) -> Credit:
    """Everyone else gets exactly 0, and so does a best that is shared."""
    return compared(episodes, _compare)


def _compare(scores_S: Tensor, groups_S: Tensor, lengths_S: Tensor) -> Tensor:
    groups = grouped(groups_S)
    laid_KG = groups.lay_out(scores_S)
    own = groups.moments(laid_KG)
    scores_KG = torch.where(groups.present_KG, laid_KG, -torch.inf)
    first_K1, best_K1 = scores_KG.max(1, keepdim=True)
    second_K1 = scores_KG.scatter(1, best_K1, -torch.inf).amax(1, keepdim=True)
    leads_K1 = own.varied & differ(first_K1, second_K1)
    lead_K1 = torch.where(leads_K1, (first_K1 - second_K1) / (own.std + EPSILON), 0)
    lead_K1 = torch.where(own.std.isfinite(), lead_K1, torch.nan)  # a reward that is no number is not hidden by a tie
    return groups.back(torch.zeros_like(laid_KG).scatter(1, best_K1, lead_K1))

"""GPG: plain policy gradient with (N / number of non-zero)·(R - mean), the first factor over all N episodes of the step."""

import torch
from torch import Tensor

from sensorium.algorithms.channels import compared
from sensorium.algorithms.episodes import Credit, Episodes
from sensorium.algorithms.groups import grouped
from sensorium.algorithms.tokens import TokenLoss, Tokens
from sensorium.algorithms.variance import differ


def estimate(episodes: Episodes) -> Credit:
    """Counts episodes whose reward is not zero, at least one; a group without variance gives exactly 0."""
    return compared(episodes, _compare)


def _compare(scores_S: Tensor, groups_S: Tensor, lengths_S: Tensor) -> Tensor:
    groups = grouped(groups_S)
    scores_KG = groups.lay_out(scores_S)
    own = groups.moments(scores_KG)
    paid = differ(scores_S, torch.zeros_like(scores_S)).double().sum()
    factor = len(scores_S) / paid.clamp(min=1)
    return groups.back(torch.where(own.varied, factor * (scores_KG - own.mean), 0))


def loss(tokens: Tokens) -> TokenLoss:
    """-A·log p: nothing is clipped."""
    return TokenLoss(-tokens.advantages_N * tokens.logprobs_N, torch.zeros_like(tokens.logprobs_N, dtype=torch.bool))

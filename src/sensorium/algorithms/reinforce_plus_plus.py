"""REINFORCE++: the return to go, Σ γ^k·r over the model's tokens, whitened over all of the step's. No critic."""

from functools import partial

import torch

from sensorium.algorithms import grpo
from sensorium.algorithms.channels import spans
from sensorium.algorithms.episodes import Credit, Episodes
from sensorium.algorithms.groups import varied
from sensorium.algorithms.scan import discounted
from sensorium.algorithms.whitening import whiten
from sensorium.algorithms.written import over_written, placed


def estimate(episodes: Episodes, *, gamma: float) -> Credit:
    """Each token gets what was paid from it on, discounted token by token."""
    return over_written(episodes, partial(_returns, gamma=gamma))


def estimate_with_baseline(episodes: Episodes) -> Credit:
    """R - mean of the group on every token, whitened likewise; a group without variance gives exactly 0."""
    rewards_S, groups_S, written_P = episodes.rewards_S, episodes.groups_S, episodes.written_P
    values_S = grpo.compare(rewards_S, groups_S, episodes.lengths_S, std=False, leave_one_out=False)
    sequences_N = episodes.sequences_P[written_P]
    # whitening shifts by the tokens' mean, which would pay a group that has nothing to compare
    whitened_N = torch.where(varied(rewards_S, groups_S)[sequences_N], whiten(values_S[sequences_N]), 0)
    return Credit(placed(whitened_N, written_P, 0.0) + spans(episodes))


def _returns(episodes: Episodes, *, gamma: float) -> Credit:
    return Credit(whiten(discounted(episodes.rewards_P, episodes.sequences_P, gamma)) + spans(episodes))

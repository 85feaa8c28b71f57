"""Generalised advantage estimation over every position, the environment's included; a critic gives the values.

δ_t = r_t + γ·V_{t+1} - V_t and A_t = Σ_k (γλ)^k·δ_{t+k}; targets are A + V. A is whitened over what the model wrote.
"""

import torch
from torch import Tensor

from sensorium.algorithms.channels import spans
from sensorium.algorithms.episodes import Credit, Episodes
from sensorium.algorithms.scan import discounted, last_of
from sensorium.algorithms.whitening import whiten
from sensorium.algorithms.written import placed


def estimate(episodes: Episodes, *, gamma: float, lam: float) -> Credit:
    """After the last position V is 0, or the value of the whole where the episode was truncated."""
    values_P, after_S = values_of(episodes)
    raw_P = generalised(episodes.rewards_P, values_P, episodes.sequences_P, after_S, gamma=gamma, lam=lam)
    whitened_P = placed(whiten(raw_P[episodes.written_P]), episodes.written_P, 0.0)
    return Credit(whitened_P + spans(episodes), raw_P + values_P)


def values_of(episodes: Episodes) -> tuple[Tensor, Tensor]:
    """The critic's values at all positions, and after every episode's last: 0 where it ended by itself."""
    assert episodes.values_P is not None, "this estimator needs a critic's values"
    assert episodes.after_S is not None, "this estimator needs a critic's values"
    return episodes.values_P.double(), torch.where(episodes.truncated_S, episodes.after_S.double(), 0)


def generalised(
    rewards_N: Tensor, values_N: Tensor, sequences_N: Tensor, after_S: Tensor, *, gamma: float, lam: float
) -> Tensor:
    """A over a list of positions, each followed by the next of its episode and the last by ``after_S``."""
    next_N = torch.where(last_of(sequences_N), after_S[sequences_N], values_N.roll(-1))
    return discounted(rewards_N.double() + gamma * next_N - values_N, sequences_N, gamma * lam)

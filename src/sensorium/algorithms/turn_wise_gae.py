"""GAE from turn to turn: a turn is one step, and all its tokens share its advantage.

With e_t the last token of turn t: δ_t = r_t + Γ·V[e_{t+1}] - V[e_t], A_t = δ_t + Γ·λ_turn·A_{t+1}, r_t all that the turn's
tokens were paid. A is whitened over turns; the critic's targets A_t + V[e_t] are asked at turn ends only.
"""

from functools import partial

import torch

from sensorium.algorithms.channels import spans
from sensorium.algorithms.episodes import Credit, Episodes
from sensorium.algorithms.gae import generalised, values_of
from sensorium.algorithms.scan import last_of
from sensorium.algorithms.whitening import whiten
from sensorium.algorithms.written import over_written, placed


def estimate(episodes: Episodes, *, turn_gamma: float, turn_lam: float) -> Credit:
    """After the last turn V is 0, or the value of the whole where the episode was truncated."""
    return over_written(episodes, partial(_estimate, turn_gamma=turn_gamma, turn_lam=turn_lam))


def _estimate(episodes: Episodes, *, turn_gamma: float, turn_lam: float) -> Credit:
    values_P, after_S = values_of(episodes)
    ends_P = last_of(episodes.turns_P)
    _, turns_P = torch.unique_consecutive(episodes.turns_P, return_inverse=True)
    values_T, sequences_T = values_P[ends_P], episodes.sequences_P[ends_P]
    rewards_T = torch.zeros_like(values_T).index_add(0, turns_P, episodes.rewards_P.double())
    raw_T = generalised(rewards_T, values_T, sequences_T, after_S, gamma=turn_gamma, lam=turn_lam)
    return Credit(whiten(raw_T)[turns_P] + spans(episodes), placed(raw_T + values_T, ends_P, torch.nan))

"""GAE twice: from turn to turn, then from token to token inside a turn, which ends in the turn's advantage.

With e_t the last token of turn t: δ_t = r[e_t] + Γ·V[e_{t+1}] - V[e_t] and A_t = δ_t + Γ·λ_turn·A_{t+1}; the last token of
the turn is paid A_t + V[e_t], so its own δ is A_t. Before it δ_p = r_p + γ·V_{p+1} - V_p and A_p = δ_p + γλ·A_{p+1}.
"""

from torch import Tensor

from sensorium.algorithms.channels import spans
from sensorium.algorithms.episodes import Credit, Episodes
from sensorium.algorithms.gae import generalised, values_of
from sensorium.algorithms.scan import discounted, last_of
from sensorium.algorithms.whitening import whiten
from sensorium.algorithms.written import over_written


def estimate(episodes: Episodes, *, gamma: float, lam: float, turn_gamma: float, turn_lam: float) -> Credit:
    """Whitened over what the model wrote; targets are A + V before whitening. Truncated episodes go on in ``after_S``."""

    def whitened(written: Episodes) -> Credit:
        raw_P = unwhitened(written, gamma=gamma, lam=lam, turn_gamma=turn_gamma, turn_lam=turn_lam)
        return Credit(whiten(raw_P) + spans(written), raw_P + values_of(written)[0])

    return over_written(episodes, whitened)


def unwhitened(episodes: Episodes, *, gamma: float, lam: float, turn_gamma: float, turn_lam: float) -> Tensor:
    """A as the two levels give it, for episodes without the environment's positions; exactly A_t at a turn's end."""
    values_P, after_S = values_of(episodes)
    rewards_P, turns_P = episodes.rewards_P.double(), episodes.turns_P
    ends_P = last_of(turns_P)
    sequences_T = episodes.sequences_P[ends_P]
    turn_level_T = generalised(rewards_P[ends_P], values_P[ends_P], sequences_T, after_S, gamma=turn_gamma, lam=turn_lam)
    inside_P = rewards_P + gamma * values_P.roll(-1) - values_P
    return discounted(inside_P.masked_scatter(ends_P, turn_level_T), turns_P, gamma * lam)

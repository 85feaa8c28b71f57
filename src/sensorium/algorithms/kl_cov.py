"""KL-Cov: the plain ratio loss, and the tokens of highest covariance are held to their old log-probs."""

import torch

from sensorium.algorithms.covariance import covariances, first_share
from sensorium.algorithms.ratio import log_ratio
from sensorium.algorithms.tokens import TokenLoss, Tokens


def loss(tokens: Tokens, *, cov_share: float = 2e-4, cov_kl_coef: float = 1.0, ratio_cap: float = 20.0) -> TokenLoss:
    """-A·min(ratio, cap), and + coef·|log-ratio| at the share of the update's tokens with the highest covariance. No clip.

    A token without advantage can be among those, so this loss has a gradient even where no advantage is.
    """
    update, places_N = tokens.update, tokens.places_N
    assert update is not None, "kl_cov looks at the whole update: Tokens.update is missing"
    assert places_N is not None, "kl_cov needs to know where its tokens stand: Tokens.places_N is missing"
    gap_N = log_ratio(tokens.logprobs_N, tokens.old_N)
    held_N = first_share(-covariances(update), cov_share, update.kept_U)[places_N]
    ratio_N = torch.exp(gap_N)
    loss_N = -tokens.advantages_N * ratio_N.clamp(max=ratio_cap) + torch.where(held_N, cov_kl_coef * gap_N.abs(), 0)
    return TokenLoss(loss_N, (ratio_N > ratio_cap) & (tokens.advantages_N != 0))

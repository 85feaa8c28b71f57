"""Clip-Cov: PPO's clip, and a few tokens of high covariance, drawn at random, stay out so that the entropy holds."""

import math

import torch

from sensorium.algorithms.clip import surrogate
from sensorium.algorithms.covariance import covariances, first_share
from sensorium.algorithms.ratio import log_ratio
from sensorium.algorithms.tokens import TokenLoss, Tokens


def loss(
    tokens: Tokens,
    *,
    cov_share: float = 2e-4,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 10.0,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> TokenLoss:
    """The clip loss, and 0 at a share of the update's tokens: drawn from those in (low, high) that are not clipped."""
    update, places_N = tokens.update, tokens.places_N
    assert update is not None, "clip_cov looks at the whole update: Tokens.update is missing"
    assert places_N is not None, "clip_cov needs to know where its tokens stand: Tokens.places_N is missing"
    ratio_N = torch.exp(log_ratio(tokens.logprobs_N, tokens.old_N))
    ratio_U = torch.exp(log_ratio(update.logprobs_U, update.old_U))
    out = surrogate(ratio_N, tokens.advantages_N, clip_low, clip_high, dual_clip)
    clipped_U = surrogate(ratio_U, update.advantages_U, clip_low, clip_high, dual_clip).clipped_N
    cov_U = covariances(update)
    candidates_U = (cov_U > cov_low) & (cov_U < cov_high) & ~clipped_U
    keys_U = update.uniforms_U.masked_fill(~candidates_U, math.inf)
    drawn_U = first_share(keys_U, cov_share, update.kept_U) & candidates_U
    drawn_N = drawn_U[places_N]
    return TokenLoss(out.loss_N.masked_fill(drawn_N, 0), out.clipped_N | drawn_N)

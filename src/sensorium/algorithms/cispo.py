"""CISPO: the policy gradient with a clipped importance weight; the clip bounds a token's gradient and never removes it."""

import torch

from sensorium.algorithms.ratio import log_ratio
from sensorium.algorithms.tokens import TokenLoss, Tokens


def loss(tokens: Tokens, *, clip_low: float = 1.0, clip_high: float = 4.0) -> TokenLoss:
    """-A·w·logp with w = clip(ratio, 1-low, 1+high), without gradient. Clipped are the tokens whose weight is."""
    ratio_N = torch.exp(log_ratio(tokens.logprobs_N.detach(), tokens.old_N))
    weight_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(-tokens.advantages_N * weight_N * tokens.logprobs_N, weight_N != ratio_N)

"""DPPO with total variation: a token is left alone once its probability, not its ratio, has moved far enough."""

import torch

from sensorium.algorithms.ratio import log_ratio
from sensorium.algorithms.tokens import TokenLoss, Tokens


def loss(tokens: Tokens, *, clip_low: float = 0.15, clip_high: float = 0.15, ratio_cap: float = 20.0) -> TokenLoss:
    """-A·min(ratio, cap)·logp, the weight without gradient, where p - p_old <= high (A > 0) or >= -low (A < 0); else 0."""
    advantages_N, logprobs_N = tokens.advantages_N, tokens.logprobs_N.detach()
    weight_N = torch.exp(log_ratio(logprobs_N, tokens.old_N)).clamp(max=ratio_cap)
    moved_N = torch.exp(logprobs_N) - torch.exp(tokens.old_N)
    far_N = torch.where(advantages_N > 0, moved_N > clip_high, (advantages_N < 0) & (moved_N < -clip_low))
    loss_N = -advantages_N * weight_N * tokens.logprobs_N
    return TokenLoss(loss_N.masked_fill(far_N, 0), far_N)

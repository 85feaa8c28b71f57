"""The clipped policy loss of PPO, with separate lower and upper range and an optional dual clip."""

import torch
from torch import Tensor

from sensorium.algorithms.ratio import log_ratio
from sensorium.algorithms.tokens import TokenLoss, Tokens


def loss(tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None) -> TokenLoss:
    """max(-A·ratio, -A·clip(ratio, 1-low, 1+high)); for A < 0 at most -c·A when ``dual_clip`` is c."""
    advantages_N = tokens.advantages_N
    out = surrogate(torch.exp(log_ratio(tokens.logprobs_N, tokens.old_N)), advantages_N, clip_low, clip_high)
    if dual_clip is None:
        return out
    ceiling_N = -dual_clip * advantages_N
    over_N = (advantages_N < 0) & (out.loss_N > ceiling_N)
    return TokenLoss(torch.where(over_N, ceiling_N, out.loss_N), out.clipped_N | over_N)


def surrogate(ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float) -> TokenLoss:
    """max(-A·ratio, -A·clip(ratio, 1-low, 1+high)), for a ratio of any kind."""
    free_N = -advantages_N * ratio_N
    bound_N = -advantages_N * ratio_N.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(torch.maximum(free_N, bound_N), bound_N > free_N)

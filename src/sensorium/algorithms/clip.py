"""The clipped policy loss of PPO, with separate lower and upper range and an optional dual clip."""

import torch

from sensorium.algorithms.tokens import TokenLoss, Tokens


def loss(tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None) -> TokenLoss:
    """max(-A·ratio, -A·clip(ratio, 1-low, 1+high)); for A < 0 at most -c·A when ``dual_clip`` is c."""
    advantages_N = tokens.advantages_N
    ratio_N = torch.exp(tokens.logprobs_N - tokens.old_N)
    free_N = -advantages_N * ratio_N
    bound_N = -advantages_N * ratio_N.clamp(1 - clip_low, 1 + clip_high)
    loss_N = torch.maximum(free_N, bound_N)
    clipped_N = bound_N > free_N
    if dual_clip is not None:
        ceiling_N = -dual_clip * advantages_N
        over_N = (advantages_N < 0) & (loss_N > ceiling_N)
        loss_N = torch.where(over_N, ceiling_N, loss_N)
        clipped_N = clipped_N | over_N
    return TokenLoss(loss_N, clipped_N)

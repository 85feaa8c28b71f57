"""The clipped policy loss of PPO, with separate lower and upper range and a dual clip.

PPO's clip leaves one side open: a token with A < 0 that became likelier keeps the gradient -A·ratio, and a single ratio of
e^19 drowns the whole update. The dual clip bounds it: past a ratio of c the token's loss is -c·A and its gradient is gone.
"""

import torch
from torch import Tensor

from sensorium.algorithms.ratio import log_ratio
from sensorium.algorithms.tokens import TokenLoss, Tokens


def loss(tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = 10.0) -> TokenLoss:
    """max(-A·ratio, -A·clip(ratio, 1-low, 1+high)); for A < 0 at most -c·A, c = ``dual_clip`` (None: no bound)."""
    ratio_N = torch.exp(log_ratio(tokens.logprobs_N, tokens.old_N))
    return surrogate(ratio_N, tokens.advantages_N, clip_low, clip_high, dual_clip)


def surrogate(
    ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenLoss:
    """The clipped loss for a ratio of any kind, a token's or a sequence's."""
    free_N = -advantages_N * ratio_N
    bound_N = -advantages_N * ratio_N.clamp(1 - clip_low, 1 + clip_high)
    out = TokenLoss(torch.maximum(free_N, bound_N), bound_N > free_N)
    if dual_clip is None:
        return out
    ceiling_N = -dual_clip * advantages_N
    over_N = (advantages_N < 0) & (out.loss_N > ceiling_N)
    return TokenLoss(torch.where(over_N, ceiling_N, out.loss_N), out.clipped_N | over_N)

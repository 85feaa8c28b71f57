"""GMPO: the geometric mean of a sequence's token ratios, each clipped before the mean is taken."""

import torch
from torch import Tensor

from sensorium.algorithms.ratio import log_ratio
from sensorium.algorithms.sequences import sequence_means
from sensorium.algorithms.tokens import TokenLoss, Tokens


def loss(tokens: Tokens, *, clip_low: float = 0.4, clip_high: float = 0.4, dual_clip: float | None = 10.0) -> TokenLoss:
    """-A·exp(mean over the sequence of c), c = s·min(s·d, s·clip(d, -low, high)), s = sign A, d the log-ratio.

    For A < 0 the exponential is bounded by ``dual_clip``, past which the gradient is gone. At every token the mean has the
    gradient of the token's own c. So the mean over a sequence with one advantage has the value and gradient of the
    sequence's loss; where advantages differ, each token follows its own.
    """
    update = tokens.update
    assert update is not None, "gmpo looks at whole sequences: Tokens.update is missing"
    bound_U, _ = _bound(update.logprobs_U, update.old_U, update.advantages_U, clip_low, clip_high)
    means_S = sequence_means(bound_U, update.sequences_U, update.counts_S)
    means_N = means_S[tokens.sequences_N].to(tokens.logprobs_N.dtype)
    bound_N, clipped_N = _bound(tokens.logprobs_N, tokens.old_N, tokens.advantages_N, clip_low, clip_high)
    ratio_N = torch.exp(means_N + (bound_N - bound_N.detach()))
    if dual_clip is not None:
        over_N = (tokens.advantages_N < 0) & (ratio_N > dual_clip)
        ratio_N, clipped_N = ratio_N.masked_fill(over_N, dual_clip), clipped_N | over_N
    return TokenLoss(-tokens.advantages_N * ratio_N, clipped_N)


def _bound(logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Log-ratios bounded on the side that the advantage pulls to, and where they are; 0 where nothing pulls."""
    gap_N = log_ratio(logprobs_N, old_N)
    bound_N = gap_N.clamp(-low, high)
    sign_N = torch.sign(advantages_N)
    clipped_N = sign_N * bound_N < sign_N * gap_N
    return torch.where(sign_N == 0, 0, torch.where(clipped_N, bound_N, gap_N)), clipped_N

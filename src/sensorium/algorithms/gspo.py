"""GSPO: PPO's clip on the ratio of a whole sequence, which is the geometric mean of its tokens' ratios."""

import torch

from sensorium.algorithms.clip import surrogate
from sensorium.algorithms.ratio import log_ratio
from sensorium.algorithms.sequences import sequence_means
from sensorium.algorithms.tokens import TokenLoss, Tokens


def loss(tokens: Tokens, *, clip_low: float = 3e-4, clip_high: float = 4e-4, dual_clip: float | None = 10.0) -> TokenLoss:
    """max(-A·s, -A·clip(s, 1-low, 1+high)), s = exp(mean of the sequence's log-ratios); for A < 0 at most -c·A.

    At every token s has that value and the gradient of the token's own log-prob. So the mean over a sequence has the value
    and gradient of the sequence's loss, wherever its tokens are computed.
    """
    update = tokens.update
    assert update is not None, "gspo looks at whole sequences: Tokens.update is missing"
    means_S = sequence_means(log_ratio(update.logprobs_U, update.old_U), update.sequences_U, update.counts_S)
    means_N = means_S[tokens.sequences_N].to(tokens.logprobs_N.dtype)
    ratio_N = torch.exp(means_N + (tokens.logprobs_N - tokens.logprobs_N.detach()))
    return surrogate(ratio_N, tokens.advantages_N, clip_low, clip_high, dual_clip)

"""Log-ratios of two policies on sampled tokens."""

from torch import Tensor

LOG_RATIO_LIMIT = 20.0


def log_ratio(above_N: Tensor, below_N: Tensor) -> Tensor:
    """log(above / below) from log-probs, clamped to ±20 so that its exponential is finite; no gradient beyond."""
    return (above_N - below_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

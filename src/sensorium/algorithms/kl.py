"""Estimators of the KL divergence from per-token log-probs of sampled tokens."""

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0


def penalty(logprobs_N: Tensor, reference_N: Tensor, estimator: str) -> Tensor:
    """KL(current ‖ reference) per token, for the loss; tokens were sampled from (about) current.

    ``abs``, ``k2`` and ``k3`` differentiate themselves; ``…_straight_through`` has the value of the named estimator and the
    gradient of k2. Plain k1 has no gradient in expectation and is refused.
    """
    named, _, suffix = estimator.partition("_")
    if named not in _ESTIMATORS or suffix not in ("", "straight_through") or estimator == "k1":
        raise ValueError(f"KL estimator '{estimator}' cannot be used in a loss; take abs, k2, k3 or k1_straight_through.")
    value_N = _ESTIMATORS[named](logprobs_N, reference_N)
    if not suffix:
        return value_N
    gradient_N = k2(logprobs_N, reference_N)
    return value_N.detach() + (gradient_N - gradient_N.detach())


def k1(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """-x with x = reference - current."""
    return logprobs_N - reference_N


def absolute(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """|x|."""
    return (logprobs_N - reference_N).abs()


def k2(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """½x²."""
    return 0.5 * (reference_N - logprobs_N).square()


def k3(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """e^x - x - 1, never negative; x is clamped to ±20 and the result to 10, for the exponential's sake."""
    x_N = (reference_N - logprobs_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.expm1(x_N) - x_N).clamp(-K3_LIMIT, K3_LIMIT)


_ESTIMATORS = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3}

"""Estimators of the KL divergence from per-token log-probs of sampled tokens.

An estimator's name stands in ``KLSection`` of ``recipe/schema.py``, too.
"""

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from sensorium.algorithms.losses import LOG_RATIO_LIMIT, log_ratio

K3_LIMIT = 10.0
STRAIGHT_THROUGH = "_straight_through"


def penalty(logprobs_N: Tensor, reference_N: Tensor, estimator: str) -> Tensor:
    """KL(current ‖ reference) per token, for the loss; tokens were sampled from (about) current.

    ``abs``, ``k2`` and ``k3`` differentiate themselves; ``…_straight_through`` has the value of the named estimator and the
    gradient of k2. Plain k1 has no gradient in expectation and is refused.
    """
    named = estimator.removesuffix(STRAIGHT_THROUGH)
    if named not in _ESTIMATORS or estimator == "k1":
        raise ValueError(f"KL estimator '{estimator}' cannot be used in a loss; take abs, k2, k3 or k1_straight_through.")
    value_N = _ESTIMATORS[named](logprobs_N, reference_N)
    if named == estimator:
        return value_N
    gradient_N = k2(logprobs_N, reference_N)
    return value_N.detach() + (gradient_N - gradient_N.detach())


def in_reward(logprobs_N: Tensor, reference_N: Tensor, estimator: str) -> Tensor:
    """KL(current ‖ reference) per token, to be taken off the reward: without gradient, log-ratios clamped to ±20.

    All estimators will do; ``…_straight_through`` forms have the value of the one they name.
    """
    named = estimator.removesuffix(STRAIGHT_THROUGH)
    if named not in _ESTIMATORS:
        raise ValueError(f"KL estimator '{estimator}' is unknown; take k1, abs, k2 or k3.")
    near_N = logprobs_N.detach().clamp(reference_N - LOG_RATIO_LIMIT, reference_N + LOG_RATIO_LIMIT)
    return _ESTIMATORS[named](near_N, reference_N)


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
    x_N = log_ratio(reference_N, logprobs_N)
    return (torch.expm1(x_N) - x_N).clamp(-K3_LIMIT, K3_LIMIT)


# By the names that `KLSection.estimator` in recipe/schema.py takes, with their signs and gradients.
_ESTIMATORS = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3}


STEEPEST = 0.2


@dataclass
class AdaptiveKL:
    """The coefficient, moved towards the one that holds the KL at ``target``. Only ``coef`` changes and is state."""

    coef: float
    target: float
    horizon: float

    def update(self, observed: float, episodes: int) -> None:
        """coef *= 1 + clip(observed/target - 1, ±0.2)·episodes/horizon, after a step of so many episodes."""
        if STEEPEST * episodes >= self.horizon:
            raise ValueError(
                f"a KL horizon of {self.horizon:g} is too short for steps of {episodes} episodes: one step could take the "
                f"whole coefficient away. Set algorithm.kl.horizon well above {STEEPEST * episodes:g}."
            )
        if not isfinite(observed):
            raise ValueError(f"the KL to the reference is {observed}; the coefficient cannot follow it.")
        error = min(max(observed / self.target - 1, -STEEPEST), STEEPEST)
        self.coef *= 1 + error * episodes / self.horizon

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on where ``state`` was taken."""
        self.coef = state["coef"]

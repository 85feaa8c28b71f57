"""Engine against learner: how far their log-probs differ, and the importance weights or rejections that correct it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sensorium.algorithms.losses import LOG_RATIO_LIMIT, log_ratio, sequence_means, sequence_sums

# ρ = old / engine. Everything here is without gradient and over whole sequences, so it is computed once a step.


def weights(
    old_N: Tensor,
    engine_N: Tensor,
    sequences_N: Tensor,
    counts_S: Tensor,
    *,
    weights: str,
    mode: str,
    low: float,
    high: float,
) -> Tensor:
    """The weight of every token: ``truncate`` min(ρ, high); ``band`` ρ inside [low, high] and 0 outside.

    ρ is the token's own, or one for all tokens of a sequence: the product of theirs (``sequence``) or their ``geometric``
    mean. Logs of ρ are clamped to ±20. A token without a log-prob of the engine (NaN) weighs 1 and counts in no sequence.
    """
    gap_N, absent_N, counts_S = _known(old_N.detach().double() - engine_N.double(), engine_N, sequences_N, counts_S)
    if weights == "token":
        log_N = gap_N
    elif weights == "sequence":
        log_N = sequence_sums(gap_N, sequences_N, counts_S)[sequences_N]
    elif weights == "geometric":
        log_N = sequence_means(gap_N, sequences_N, counts_S)[sequences_N]
    else:
        raise ValueError(f"unknown correction weights '{weights}'; take token, sequence or geometric.")
    ratio_N = log_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if mode == "truncate":
        ratio_N = ratio_N.clamp(max=high)
    elif mode == "band":
        ratio_N = ratio_N.masked_fill((ratio_N < low) | (ratio_N > high), 0)
    else:
        raise ValueError(f"unknown correction mode '{mode}'; take truncate or band.")
    return ratio_N.masked_fill(absent_N, 1).to(old_N.dtype)


def _known(gap_N: Tensor, engine_N: Tensor, sequences_N: Tensor, counts_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gaps with 0 where the engine has no log-prob, where that is, and how many tokens of each sequence have one."""
    absent_N = engine_N.isnan()
    absent_S = torch.zeros_like(counts_S).index_add(0, sequences_N, absent_N.to(counts_S.dtype))
    return gap_N.masked_fill(absent_N, 0), absent_N, counts_S - absent_S


def rejected(
    old_N: Tensor, engine_N: Tensor, sequences_N: Tensor, counts_S: Tensor, *, by: str, estimator: str, above: float
) -> Tensor:
    """Which sequences have a mean or largest estimate of KL(engine ‖ old) above a bound > 0; never one without tokens.

    With x = log ρ clamped to ±20: k2 ½x², k3 e^x - x - 1. k1 = -x has a sign and drifts either way, so its size counts:
    |mean x| (the geometric mean of ρ outside [e^-above, e^above]), or the largest |x|.
    """
    x_N = log_ratio(old_N.detach().double(), engine_N.double())
    x_N, _, counts_S = _known(x_N, engine_N, sequences_N, counts_S)
    if estimator == "k1":
        estimate_N = -x_N
    elif estimator == "k2":
        estimate_N = 0.5 * x_N.square()
    elif estimator == "k3":
        estimate_N = torch.expm1(x_N) - x_N
    else:
        raise ValueError(f"unknown estimator '{estimator}' for rejection; take k1, k2 or k3.")
    if by == "mean":
        found_S = sequence_means(estimate_N, sequences_N, counts_S).abs()
    elif by == "max":
        zeros_S = torch.zeros(len(counts_S), dtype=x_N.dtype, device=x_N.device)
        found_S = zeros_S.scatter_reduce(0, sequences_N, estimate_N.abs(), "amax")
    else:
        raise ValueError(f"sequences cannot be rejected by '{by}'; take mean or max.")
    return found_S > above


@dataclass(frozen=True)
class Mismatch:
    """``prob_error``: mean of exp|gap|, 1 is perfect; ``kl``: mean KL(engine ‖ old); ``maximum``: the largest |gap|.

    The KL is the mean of e^x - x - 1, x the gap within ±20. Unlike ``kl.k3`` of a loss it has no bound at 10, which would
    hide a part of it as soon as a token is 13 times likelier to the learner.

    ``sequence_max`` and ``sequence_min``: the extremes over sequences of old / engine, the geometric mean of a sequence's
    tokens; 1 is perfect. ``effective_share``: what share of the tokens is left, in effect, if each weighs old / engine.
    """

    prob_error: float
    kl: float
    maximum: float
    sequence_max: float
    sequence_min: float
    effective_share: float


def effective_share(weights_N: Tensor) -> Tensor:
    """(Σw)² / (n·Σw²): 1 where all weigh alike, 1/n where one weighs alone, 0 where none weighs anything."""
    weights_N = weights_N.double()
    squares = len(weights_N) * weights_N.square().sum()
    return torch.where(squares > 0, weights_N.sum().square() / squares.clamp(min=torch.finfo(torch.float64).tiny), 0)


def mismatch(old_N: Tensor, engine_N: Tensor, sequences_N: Tensor, counts_S: Tensor) -> Mismatch:
    """Measure the mismatch over all tokens of an update that the engine sampled; the others have NaN."""
    known_N = ~engine_N.isnan()
    absent_S = torch.zeros_like(counts_S).index_add(0, sequences_N, (~known_N).to(counts_S.dtype))
    old_N, engine_N, sequences_N = old_N[known_N], engine_N[known_N], sequences_N[known_N]
    counts_S = counts_S - absent_S
    old_N, engine_N = old_N.to(torch.float64), engine_N.to(torch.float64)
    gap_N = old_N - engine_N
    ratio_S = sequence_means(gap_N, sequences_N, counts_S)[counts_S > 0].exp()
    size_N = gap_N.abs()
    x_N = log_ratio(old_N, engine_N)
    kl, effective = (torch.expm1(x_N) - x_N).mean(), effective_share(x_N.exp())
    measured = [size_N.exp().mean(), kl, size_N.max(), ratio_S.max(), ratio_S.min(), effective]
    return Mismatch(*torch.stack(measured).tolist())

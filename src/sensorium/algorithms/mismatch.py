"""How far the learner's log-probs are from the engine's on the tokens the engine sampled."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sensorium.algorithms.ratio import log_ratio
from sensorium.algorithms.sequences import sequence_means


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

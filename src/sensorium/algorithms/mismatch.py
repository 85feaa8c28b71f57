"""How far the learner's log-probs are from the engine's on the tokens the engine sampled."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sensorium.algorithms.kl import k3


@dataclass(frozen=True)
class Mismatch:
    """``prob_error``: mean of exp|gap|, 1 is perfect; ``kl``: mean KL(engine ‖ old); ``maximum``: the largest |gap|."""

    prob_error: float
    kl: float
    maximum: float


def mismatch(old_N: Tensor, engine_N: Tensor) -> Mismatch:
    """Measure the mismatch over all tokens of an update."""
    old_N, engine_N = old_N.to(torch.float64), engine_N.to(torch.float64)
    gap_N = (old_N - engine_N).abs()
    measured = torch.stack([gap_N.exp().mean(), k3(engine_N, old_N).mean(), gap_N.max()])
    prob_error, kl, maximum = measured.tolist()
    return Mismatch(prob_error, kl, maximum)

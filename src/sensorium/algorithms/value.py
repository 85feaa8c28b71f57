"""The critic's loss."""

import torch
from torch import Tensor


def value_loss(values_P: Tensor, old_P: Tensor, targets_P: Tensor, *, clip: float | None) -> tuple[Tensor, Tensor]:
    """½·max((v - R)², (clip(v, old - c, old + c) - R)²) at every position, and where the clip took the gradient away.

    ``old_P`` are the critic's values before the step's updates; positions without a target are the caller's to leave out.
    """
    free_P = 0.5 * (values_P - targets_P).square()
    if clip is None:
        return free_P, torch.zeros_like(free_P, dtype=torch.bool)
    bound_P = 0.5 * (values_P.clamp(old_P - clip, old_P + clip) - targets_P).square()
    return torch.maximum(free_P, bound_P), bound_P > free_P

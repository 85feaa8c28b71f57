"""Which tokens of an update move its entropy most: the covariance of advantage and log-prob, token by token."""

import torch
from torch import Tensor

from sensorium.algorithms.tokens import UpdateTokens


def covariances(update: UpdateTokens) -> Tensor:
    """(A - mean A)·(logp - mean logp) with means over all tokens of the update that are kept, in float64."""
    advantages_U, logprobs_U, kept_U = update.advantages_U.double(), update.logprobs_U.double(), _kept(update)
    return (advantages_U - advantages_U[kept_U].mean()) * (logprobs_U - logprobs_U[kept_U].mean())


def first_share(keys_U: Tensor, share: float, kept_U: Tensor | None = None) -> Tensor:
    """Marks the given share of the kept tokens, at least one, that has the smallest keys; of equal keys the earlier one."""
    chosen_U = torch.zeros_like(keys_U, dtype=torch.bool)
    kept_U = torch.ones_like(chosen_U) if kept_U is None else kept_U
    number = max(int(share * int(kept_U.sum())), 1)
    chosen_U[keys_U.masked_fill(~kept_U, torch.inf).argsort(stable=True)[:number]] = True
    return chosen_U & kept_U


def _kept(update: UpdateTokens) -> Tensor:
    return torch.ones_like(update.advantages_U, dtype=torch.bool) if update.kept_U is None else update.kept_U

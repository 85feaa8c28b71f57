"""Which tokens of an update move its entropy most: the covariance of advantage and log-prob, token by token."""

import torch
from torch import Tensor

from sensorium.algorithms.tokens import UpdateTokens


def covariances(update: UpdateTokens) -> Tensor:
    """(A - mean A)·(logp - mean logp) with means over the whole update, in float64."""
    advantages_U, logprobs_U = update.advantages_U.double(), update.logprobs_U.double()
    return (advantages_U - advantages_U.mean()) * (logprobs_U - logprobs_U.mean())


def first_share(keys_U: Tensor, share: float) -> Tensor:
    """Marks the given share of the tokens, at least one, that has the smallest keys; of equal keys the earlier one."""
    number = max(int(share * len(keys_U)), 1)
    chosen_U = torch.zeros_like(keys_U, dtype=torch.bool)
    chosen_U[keys_U.argsort(stable=True)[:number]] = True
    return chosen_U

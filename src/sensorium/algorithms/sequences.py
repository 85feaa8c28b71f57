"""Sums and means over the tokens of each sequence, in float64: rounding is far below what a loss in float32 can show."""

import torch
from torch import Tensor


def sequence_sums(values_N: Tensor, sequences_N: Tensor, counts_S: Tensor) -> Tensor:
    """The sum of each sequence's tokens; 0 where it has none."""
    zeros_S = torch.zeros(len(counts_S), dtype=torch.float64, device=values_N.device)
    return zeros_S.index_add(0, sequences_N, values_N.double())


def sequence_means(values_N: Tensor, sequences_N: Tensor, counts_S: Tensor) -> Tensor:
    """The mean of each sequence's tokens; 0 where it has none."""
    return sequence_sums(values_N, sequences_N, counts_S) / counts_S.clamp(min=1)

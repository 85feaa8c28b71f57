"""How token losses become one number: a weight per sequence, from counts of the whole update.

The loss is Σ over tokens of weight[sequence] · loss: a sum, so it does not depend on micro-batching, packing or ranks.
"""

import torch
from torch import Tensor


def sequence_weights(aggregation: str, counts_S: Tensor, *, constant: float = 1.0) -> Tensor:
    """The weight of each sequence's tokens, given how many tokens every sequence of the update has.

    With N tokens in S sequences (those without tokens do not count): token_mean 1/N; sequence_mean_token_mean 1/(S·n_s);
    sequence_mean_token_sum 1/S; constant 1/(S·constant), for a constant like the longest response (Dr.GRPO).
    """
    counts_S = counts_S.to(torch.float64)
    present_S = counts_S > 0
    sequences = present_S.sum().clamp(min=1)
    if aggregation == "token_mean":
        weights_S = torch.ones_like(counts_S) / counts_S.sum().clamp(min=1)
    elif aggregation == "sequence_mean_token_mean":
        weights_S = 1 / (sequences * counts_S.clamp(min=1))
    elif aggregation == "sequence_mean_token_sum":
        weights_S = torch.ones_like(counts_S) / sequences
    elif aggregation == "constant":
        weights_S = torch.ones_like(counts_S) / (sequences * constant)
    else:
        raise ValueError(f"unknown aggregation '{aggregation}'")
    return torch.where(present_S, weights_S, 0).to(torch.float32)

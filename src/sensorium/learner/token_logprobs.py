"""Log-probs and entropies of tokens from logits, with gradients.

The policy is softmax(logits / temperature + bias); forbidden ids have the bias ``FORBIDDEN``. Axes: M tokens, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

# Stands for minus infinity, but makes 0 when multiplied by a probability of 0.
FORBIDDEN = -1e30


class TokenLogprobs(torch.autograd.Function):
    """(logits, targets) → log-probs of the targets and entropies, keeping nothing but the probabilities."""

    @staticmethod
    def forward(
        ctx: Any, logits_MV: Tensor, targets_M: Tensor, bias_V: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        scaled_MV = torch.add(bias_V, logits_MV, alpha=1 / temperature)
        scaled_MV -= scaled_MV.amax(1, keepdim=True)
        chosen_M = scaled_MV.gather(1, targets_M[:, None])[:, 0]
        probs_MV = scaled_MV.exp()
        sums_M = probs_MV.sum(1)
        logs_M = sums_M.log()
        probs_MV /= sums_M[:, None]
        entropies_M = logs_M - scaled_MV.mul_(probs_MV).sum(1)
        ctx.temperature = temperature
        ctx.save_for_backward(probs_MV, targets_M, entropies_M)
        ctx.set_materialize_grads(False)
        return chosen_M - logs_M, entropies_M

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        probs_MV, targets_M, entropies_M = ctx.saved_tensors
        logprobs_M, entropy_M = gradients
        result_MV = None
        if logprobs_M is not None:
            result_MV = probs_MV * (-logprobs_M / ctx.temperature)[:, None]
            result_MV.scatter_add_(1, targets_M[:, None], (logprobs_M / ctx.temperature)[:, None])
        if entropy_M is not None:
            slope_MV = _entropy_gradient(probs_MV, entropies_M, entropy_M / ctx.temperature)
            result_MV = slope_MV if result_MV is None else result_MV.add_(slope_MV)
        return result_MV, None, None, None


def _entropy_gradient(probs_MV: Tensor, entropies_M: Tensor, pull_M: Tensor) -> Tensor:
    """dH/dz = -p·(log p + H), pulled."""
    slope_MV = torch.xlogy(probs_MV, probs_MV).addcmul_(probs_MV, entropies_M[:, None])
    return slope_MV.mul_(-pull_M[:, None])

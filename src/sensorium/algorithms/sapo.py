"""SAPO: a sigmoid of the ratio in place of the clip, steeper where the advantage is negative."""

import torch

from sensorium.algorithms.ratio import log_ratio
from sensorium.algorithms.tokens import TokenLoss, Tokens


def loss(tokens: Tokens, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> TokenLoss:
    """-A·σ(τ·(ratio - 1))·4/τ, τ by the advantage's sign. Its slope at ratio 1 is -A; nothing is ever cut off."""
    advantages_N = tokens.advantages_N
    ratio_N = torch.exp(log_ratio(tokens.logprobs_N, tokens.old_N))
    tau_N = torch.full_like(ratio_N, tau_negative).masked_fill(advantages_N > 0, tau_positive)
    gate_N = torch.sigmoid(tau_N * (ratio_N - 1)) * 4 / tau_N
    return TokenLoss(-advantages_N * gate_N, torch.zeros_like(ratio_N, dtype=torch.bool))

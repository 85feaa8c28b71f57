"""Supervised learning: the negative log-likelihood of what was written; advantages play no part."""

import torch

from sensorium.algorithms.tokens import TokenLoss, Tokens


def loss(tokens: Tokens) -> TokenLoss:
    """-log p of every token."""
    return TokenLoss(-tokens.logprobs_N, torch.zeros_like(tokens.logprobs_N, dtype=torch.bool))

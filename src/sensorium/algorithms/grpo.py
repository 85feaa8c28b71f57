"""GRPO: an episode's reward against the rest of its group."""

import torch
from torch import Tensor

EPSILON = 1e-6


def advantages(rewards_G: Tensor, *, std: bool = True, leave_one_out: bool = False) -> Tensor:
    """Advantages of a group, in float64: (R - mean) / (std + 1e-6), std unbiased; ``std=False`` does not divide (Dr.GRPO).

    ``leave_one_out`` takes mean and std over the others, and does not divide where their std is zero or undefined.
    A group without variance (or of one) gives exactly zero.
    """
    rewards_G = rewards_G.to(torch.float64)
    size = rewards_G.numel()
    if size < 2 or bool(rewards_G.min() == rewards_G.max()):
        return torch.zeros_like(rewards_G)
    if not leave_one_out:
        centred_G = rewards_G - rewards_G.mean()
        return centred_G / (rewards_G.std() + EPSILON) if std else centred_G
    self_GG = torch.eye(size, dtype=torch.bool, device=rewards_G.device)
    others_GO = rewards_G.expand(size, size)[~self_GG].view(size, size - 1)
    centred_G = rewards_G - others_GO.mean(1)
    if not std or size < 3:
        return centred_G
    varied_G = others_GO.amin(1) != others_GO.amax(1)
    return torch.where(varied_G, centred_G / (others_GO.std(1) + EPSILON), centred_G)

"""What a policy loss is given and what it returns: flat vectors over tokens the model wrote."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """Tokens of a micro-batch. ``sequences_N`` is the index of each token's episode within the update.

    ``logprobs_N`` are current and carry the gradient; ``old_N`` are the learner's before the step's updates.
    """

    logprobs_N: Tensor
    old_N: Tensor
    advantages_N: Tensor
    sequences_N: Tensor


@dataclass(frozen=True)
class TokenLoss:
    """Loss per token, before aggregation, and which tokens were clipped (True: the clip took the gradient away)."""

    loss_N: Tensor
    clipped_N: Tensor

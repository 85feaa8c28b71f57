"""What a policy loss is given and what it returns: flat vectors over tokens the model wrote."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class UpdateTokens:
    """Every sampled token of the update in canonical order (axis U), for losses that look beyond a micro-batch.

    ``logprobs_U`` are current, without gradient. ``uniforms_U`` are random numbers in [0, 1) keyed by seed, step, update
    and token, so that a random choice depends neither on packing nor on what ran before. ``kept_U`` is false for tokens of
    rejected sequences, which count in no mean and no share; None: all are kept.
    """

    logprobs_U: Tensor
    old_U: Tensor
    advantages_U: Tensor
    sequences_U: Tensor
    counts_S: Tensor
    uniforms_U: Tensor
    kept_U: Tensor | None = None


@dataclass(frozen=True)
class Tokens:
    """Tokens of a micro-batch. ``sequences_N`` is the index of each token's episode within the update.

    ``logprobs_N`` are current and carry the gradient; ``old_N`` are the learner's before the step's updates. ``places_N``
    says where the tokens stand in ``update``, which is complete as far as the loss's trait ``over`` asks: its tokens' own
    sequences (``sequence``) or everything (``update``); None for losses over single tokens.
    """

    logprobs_N: Tensor
    old_N: Tensor
    advantages_N: Tensor
    sequences_N: Tensor
    places_N: Tensor | None = None
    update: UpdateTokens | None = None


@dataclass(frozen=True)
class TokenLoss:
    """Loss per token, before aggregation, and which tokens were clipped: their gradient is gone (cispo: it is bounded)."""

    loss_N: Tensor
    clipped_N: Tensor

"""What an estimator is given and what it returns: the scored episodes of a step as flat vectors.

An estimator is a function of ``Episodes`` and its settings that returns ``Credit``: a value for every position. It works in
float64 and knows nothing of models, packing or rewards' names; what it needs beyond rewards (a critic's values, greedy
rewards) is said in ``recipe.traits``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TermScores:
    """What one reward term paid each episode, before its weight."""

    name: str
    weight: float
    scores_S: Tensor


@dataclass(frozen=True)
class SpanScores:
    """What one term paid for a part of the response only, before its weight: NaN where an episode has no such part.

    ``covers_P`` marks the part's positions; the score moves these and no others. The weight is that of the advantage that
    comes of it: an estimator that divides by a spread would divide a weight of the scores away.
    """

    name: str
    weight: float
    scores_S: Tensor
    covers_P: Tensor


@dataclass(frozen=True)
class Episodes:
    """The episodes of a step. Axes: S episodes, ordered by group; P positions, ordered by episode and time.

    Positions are the tokens the model wrote (``written_P`` all true); estimators that ask for observations also get those
    of the environment's tokens between two responses. ``sequences_P`` and ``turns_P`` say whose a position is: turns are
    counted through the whole step and an observation belongs to the turn it opens. ``rewards_P`` holds episode and turn
    scores at their places, span scores not included. ``values_P`` is the critic's value of the prefix before a position,
    ``after_S`` that of the whole episode; truncated ones bootstrap from it. ``correct_S``: 1 right, -1 wrong, NaN unknown.
    """

    groups_S: Tensor
    truncated_S: Tensor
    sequences_P: Tensor
    turns_P: Tensor
    written_P: Tensor
    rewards_P: Tensor
    values_P: Tensor | None = None
    after_S: Tensor | None = None
    greedy_S: Tensor | None = None
    correct_S: Tensor | None = None
    terms: tuple[TermScores, ...] = ()
    spans: tuple[SpanScores, ...] = ()

    @property
    def rewards_S(self) -> Tensor:
        """What each episode was paid in all, span scores not included."""
        zeros_S = torch.zeros(len(self.groups_S), dtype=torch.float64, device=self.rewards_P.device)
        return zeros_S.index_add(0, self.sequences_P, self.rewards_P.double())

    @property
    def lengths_S(self) -> Tensor:
        """How many tokens the model wrote in each episode."""
        zeros_S = torch.zeros(len(self.groups_S), dtype=torch.float64, device=self.rewards_P.device)
        return zeros_S.index_add(0, self.sequences_P, self.written_P.double())


@dataclass(frozen=True)
class Credit:
    """Advantages (0 where the model did not write) and, with a critic, what it should have said (NaN: not asked there)."""

    advantages_P: Tensor
    targets_P: Tensor | None = None

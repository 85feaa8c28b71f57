"""From a value per episode to its positions. The score of a span is a channel of its own and moves the span only."""

from collections.abc import Callable

import torch
from torch import Tensor

from sensorium.algorithms.episodes import Credit, Episodes
from sensorium.algorithms.whitening import standardise

Compare = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From scores_S, groups_S and lengths_S to a value for every episode."""


def compared(episodes: Episodes, compare: Compare) -> Credit:
    """Credit of a group estimator: its value on everything the model wrote, and that of every span on the span."""
    values_S = compare(episodes.rewards_S, episodes.groups_S, episodes.lengths_S)
    return Credit(everywhere(episodes, values_S) + spans(episodes, compare))


def everywhere(episodes: Episodes, values_S: Tensor) -> Tensor:
    """The value of its episode at every position the model wrote."""
    return torch.where(episodes.written_P, values_S[episodes.sequences_P], 0)


def spans(episodes: Episodes, compare: Compare | None = None) -> Tensor:
    """What the spans' scores add, at their positions only: compared among the episodes that have the span.

    Without ``compare`` a score is standardised over the whole step. Lengths are those of the span.
    """
    added_P = torch.zeros(len(episodes.sequences_P), dtype=torch.float64, device=episodes.sequences_P.device)
    for span in episodes.spans:
        covered_P = span.covers_P & episodes.written_P
        lengths_S = torch.zeros_like(span.scores_S, dtype=torch.float64)
        lengths_S = lengths_S.index_add(0, episodes.sequences_P, covered_P.double())
        values_S = among_members(span.scores_S, episodes.groups_S, lengths_S, compare or _over_the_step)
        added_P = added_P + span.weight * torch.where(covered_P, values_S[episodes.sequences_P], 0)
    return added_P


def among_members(scores_S: Tensor, groups_S: Tensor, lengths_S: Tensor, compare: Compare) -> Tensor:
    """Compare the episodes that have a score; 0 for those that have none (NaN)."""
    has_S = ~scores_S.isnan()
    values_S = torch.zeros_like(scores_S, dtype=torch.float64)
    values_S[has_S] = compare(scores_S[has_S].double(), groups_S[has_S], lengths_S[has_S])
    return values_S


def _over_the_step(scores_S: Tensor, groups_S: Tensor, lengths_S: Tensor) -> Tensor:
    return standardise(scores_S)

"""GDPO: every reward term against its group apart, Σ_k weight_k·GRPO(term k), then standardised over all episodes."""

from functools import partial

import torch
from torch import Tensor

from sensorium.algorithms import grpo
from sensorium.algorithms.channels import among_members, everywhere, spans
from sensorium.algorithms.episodes import Credit, Episodes
from sensorium.algorithms.groups import varied
from sensorium.algorithms.whitening import standardise


def estimate(episodes: Episodes, *, std: bool = True, leave_one_out: bool = False) -> Credit:
    """``std`` and ``leave_one_out`` as in GRPO. A group in which no term varies, or all cancel, gives exactly 0."""
    compare = partial(grpo.compare, std=std, leave_one_out=leave_one_out)

    def compare_span(scores_S: Tensor, groups_S: Tensor, lengths_S: Tensor) -> Tensor:
        return torch.where(varied(scores_S, groups_S), standardise(compare(scores_S, groups_S, lengths_S)), 0)

    groups_S, lengths_S = episodes.groups_S, episodes.lengths_S
    summed_S = torch.zeros_like(lengths_S)
    for term in episodes.terms:
        summed_S = summed_S + term.weight * among_members(term.scores_S, groups_S, lengths_S, compare)
    # standardising shifts by the step's mean, which would pay a group that has nothing to compare
    values_S = torch.where(varied(summed_S, groups_S), standardise(summed_S), 0)
    return Credit(everywhere(episodes, values_S) + spans(episodes, compare_span))

"""GDPO: every reward term against its group apart, Σ_k weight_k·GRPO(term k), then standardised over all episodes."""

from functools import partial

import torch
from torch import Tensor

from sensorium.algorithms import grpo
from sensorium.algorithms.channels import among_members, everywhere, spans
from sensorium.algorithms.episodes import Credit, Episodes
from sensorium.algorithms.groups import with_signal
from sensorium.algorithms.whitening import standardise


def estimate(episodes: Episodes, *, std: bool = True, leave_one_out: bool = False) -> Credit:
    """``std`` and ``leave_one_out`` as in GRPO. A group in which no term varies gives exactly 0."""
    compare = partial(grpo.compare, std=std, leave_one_out=leave_one_out)

    def compare_span(scores_S: Tensor, groups_S: Tensor, lengths_S: Tensor) -> Tensor:
        return _standardised(compare(scores_S, groups_S, lengths_S), groups_S)

    groups_S, lengths_S = episodes.groups_S, episodes.lengths_S
    summed_S = torch.zeros_like(lengths_S)
    for term in episodes.terms:
        summed_S = summed_S + term.weight * among_members(term.scores_S, groups_S, lengths_S, compare)
    return Credit(everywhere(episodes, _standardised(summed_S, groups_S)) + spans(episodes, compare_span))


def _standardised(values_S: Tensor, groups_S: Tensor) -> Tensor:
    return torch.where(with_signal(values_S, groups_S), standardise(values_S), 0)

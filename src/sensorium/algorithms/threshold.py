"""After the estimator: a good answer is never pushed down.

In a group, those with the largest ``correct_S`` are the best answers. If they are not wrong (at least 0), the advantages of
those among them that were paid more than 0 are raised to at least 0. Answers of unknown correctness (NaN) stand outside.
"""

from dataclasses import replace

import torch

from sensorium.algorithms.episodes import Credit, Episodes
from sensorium.algorithms.groups import grouped
from sensorium.algorithms.variance import NOISE


def optimize_threshold(episodes: Episodes, credit: Credit) -> Credit:
    """The same credit with every negative advantage of a group's best and paid answers at 0."""
    assert episodes.correct_S is not None, "optimize_threshold needs to know which answers are correct"
    groups = grouped(episodes.groups_S)
    correct_S = torch.where(episodes.correct_S.isnan(), -torch.inf, episodes.correct_S.double())
    laid_KG = torch.where(groups.present_KG, groups.lay_out(correct_S), -torch.inf)
    best_S = groups.back(laid_KG.amax(1, keepdim=True))
    good_S = (best_S >= 0) & (correct_S == best_S) & (episodes.rewards_S > NOISE)
    raised_P = credit.advantages_P.clamp(min=0)
    return replace(credit, advantages_P=torch.where(good_S[episodes.sequences_P], raised_P, credit.advantages_P))

"""Estimators that look at the model's own tokens only, as if there were no others."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from sensorium.algorithms.episodes import Credit, Episodes


def written_only(episodes: Episodes) -> Episodes:
    """The same episodes without the environment's positions."""
    written_P = episodes.written_P
    return replace(
        episodes,
        sequences_P=episodes.sequences_P[written_P],
        turns_P=episodes.turns_P[written_P],
        written_P=written_P[written_P],
        rewards_P=episodes.rewards_P[written_P],
        values_P=None if episodes.values_P is None else episodes.values_P[written_P],
        spans=tuple(replace(span, covers_P=span.covers_P[written_P]) for span in episodes.spans),
    )


def over_written(episodes: Episodes, estimate: Callable[[Episodes], Credit]) -> Credit:
    """Estimate on the model's tokens; at the environment's, advantages are 0 and targets not asked."""
    credit = estimate(written_only(episodes))
    targets_P = None if credit.targets_P is None else placed(credit.targets_P, episodes.written_P, torch.nan)
    return Credit(placed(credit.advantages_P, episodes.written_P, 0.0), targets_P)


def placed(values_N: Tensor, where_P: Tensor, fill: float) -> Tensor:
    """Values at the chosen positions, ``fill`` at the others."""
    return torch.full(where_P.shape, fill, dtype=torch.float64, device=where_P.device).masked_scatter(where_P, values_N)

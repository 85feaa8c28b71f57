"""From selected groups to what is trained: the advantage of every sampled token."""

from collections.abc import Sequence

import torch

from sensorium.learner.learner import Sample
from sensorium.recipe.names import resolve
from sensorium.recipe.schema import AdvantageSection
from sensorium.vocabulary.episode import Episode, Group, Status


def credit(groups: Sequence[Group], section: AdvantageSection, *, mask_truncated: bool) -> list[list[Sample]]:
    """The advantage of every sampled token, by the recipe's estimator. Masked episodes still count in the baseline."""
    estimator = resolve("advantage", section.name)
    samples = []
    for group in groups:
        rewards_G = torch.tensor([e.reward for e in group.episodes], dtype=torch.float64)
        advantages_G = estimator(rewards_G, std=section.std, leave_one_out=section.leave_one_out)
        members = [
            Sample(episode, _broadcast(episode, float(advantage)))
            for episode, advantage in zip(group.episodes, advantages_G, strict=True)
            if not (mask_truncated and episode.status == Status.TRUNCATED)
        ]
        if members:
            samples.append(members)
    return samples


def _broadcast(episode: Episode, advantage: float) -> tuple[torch.Tensor, ...]:
    return tuple(torch.full((len(turn.response.tokens),), advantage) for turn in episode.turns)

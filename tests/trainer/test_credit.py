"""What the members of a group are credited with."""

import torch

from sensorium.recipe.schema import AdvantageSection
from sensorium.trainer.credit import credit
from sensorium.vocabulary import Status

from .scored import episode, group


def test_a_group_paid_alike_gets_exactly_zero() -> None:
    alike = group(*(episode(i, 0.1 + 0.2) for i in range(7)))
    samples = credit([alike], AdvantageSection(), mask_truncated=False)
    assert all(torch.equal(a, torch.zeros(3)) for s in samples[0] for a in s.advantages)


def test_better_episodes_get_larger_advantages_on_every_token() -> None:
    samples = credit([group(episode(0, 1.0), episode(1, 0.0))], AdvantageSection(), mask_truncated=False)
    winner, loser = (s.advantages[0] for s in samples[0])
    assert (winner > 0).all()
    assert torch.allclose(winner, -loser)
    assert winner.shape == (3,)


def test_masked_truncated_episodes_count_in_the_baseline_but_are_not_trained() -> None:
    members = group(episode(0, 1.0), episode(1, 0.0, status=Status.TRUNCATED), episode(2, 0.0))
    samples = credit([members], AdvantageSection(std=False), mask_truncated=True)
    assert [s.episode.id for s in samples[0]] == ["e0", "e2"]
    assert torch.allclose(samples[0][0].advantages[0], torch.full((3,), 1 / 3))

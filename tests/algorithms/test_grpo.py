"""GRPO where its numbers are known: published vectors, and the leave-one-out form that must not divide by nothing."""

import pytest

from sensorium.algorithms import advantages
from tests.algorithms.batches import of_rewards, per_episode


def grpo_of(*groups: list[float], **settings: bool) -> list[float]:
    batch = of_rewards(*groups, tokens=3)
    return per_episode(batch, advantages.grpo(batch.episodes(), **settings).advantages_P)


def test_known_vectors() -> None:
    assert grpo_of([0.55, 0.0, -0.5, -1.5]) == pytest.approx([1.0474, 0.4161, -0.1578, -1.3057], abs=1e-4)
    got = grpo_of([0.55, 0.5, 0.5 + 0.1 / 3, 0.5 + 0.05 / 3])
    assert got == pytest.approx([1.1618, -1.1618, 0.3873, -0.3873], abs=1e-4)


def test_leave_one_out_does_not_divide_by_a_zero_spread() -> None:
    got = grpo_of([1.0] + [0.0] * 7, [0.5], [1.0, 0.0], leave_one_out=True)
    assert got[0] == 1.0
    assert got[1:8] == pytest.approx([-0.378] * 7, abs=1e-3)
    assert got[8:] == [0.0, 1.0, -1.0]


def test_the_others_spread_by_summation_noise_only_is_zero() -> None:
    got = grpo_of([1.0, 0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1], leave_one_out=True)
    assert got[0] == pytest.approx(0.4, rel=1e-12)


def test_without_std_a_tiny_difference_stays_tiny() -> None:
    assert grpo_of([1.0, 1.0 + 1e-9], std=False) == pytest.approx([-5e-10, 5e-10], rel=1e-3)

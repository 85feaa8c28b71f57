"""The threshold step: a group's best answers, if correct and paid, are not pushed down."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given

from sensorium.algorithms import advantages
from sensorium.algorithms.advantages import optimize_threshold
from tests.algorithms.batches import Batch, batches, of_rewards, per_episode

NAN = float("nan")


def thresholded(rewards: list[float], correct: list[float]) -> list[float]:
    batch = of_rewards(rewards, tokens=2)
    batch = Batch(tuple(replace(p, correct=c) for p, c in zip(batch.played, correct, strict=True)))
    episodes = batch.episodes()
    return per_episode(batch, optimize_threshold(episodes, advantages.grpo(episodes)).advantages_P)


def test_known_vectors() -> None:
    got = thresholded([0.55, 0.5, 0.5 + 0.1 / 3, 0.5 + 0.05 / 3], [1, 1, 1, 1])
    assert got == pytest.approx([1.1618, 0, 0.3873, 0], abs=1e-4)
    got = thresholded([0.55, 0.0, -0.5, -1.5], [1, 1, -1, NAN])
    assert got == pytest.approx([1.0474, 0.4161, -0.1578, -1.3057], abs=1e-4)


def test_who_is_left_alone() -> None:
    assert thresholded([0.1, 0.5], [-1, -1])[0] < 0  # the best of the group is wrong
    assert thresholded([0.1, 0.5], [-1, 1])[0] < 0  # not among the best
    assert thresholded([0.1, 0.5], [NAN, 1])[0] < 0  # unknown
    assert thresholded([-0.1, 0.5], [1, 1])[0] < 0  # not paid
    assert thresholded([0.1, 0.5], [NAN, NAN])[0] < 0
    assert thresholded([0.1, 0.5], [1, NAN])[0] == 0


@given(batches())
def test_equals_a_plain_loop(batch: Batch) -> None:
    episodes = batch.episodes()
    credit = advantages.grpo(episodes)
    expected = []
    for (i, _), advantage in zip(batch.positions, credit.advantages_P.tolist(), strict=True):
        own = batch.played[i]
        known = [p.correct for p in batch.played if p.group == own.group and not math.isnan(p.correct)]
        good = bool(known) and max(known) >= 0 and own.correct == max(known) and own.reward > 1e-12
        expected.append(max(advantage, 0.0) if good else advantage)
    assert optimize_threshold(episodes, credit).advantages_P.tolist() == expected


def test_targets_stay() -> None:
    episodes = of_rewards([0.1, 0.5]).episodes()
    credit = replace(advantages.grpo(episodes), targets_P=torch.ones(2))
    assert optimize_threshold(episodes, credit).targets_P is credit.targets_P

"""Estimators that go through an episode in time, against loops that go through it backwards."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sensorium.algorithms import advantages
from sensorium.algorithms.advantages import Credit, last_of, written_only
from tests.algorithms import plain
from tests.algorithms.batches import Batch, Played, Position, batches

unit = st.sampled_from([0.0, 1.0]) | st.floats(0, 1)
NAN = float("nan")


def close(got: torch.Tensor | None, expected: list[float]) -> None:
    assert got is not None
    assert got.dtype == torch.float64
    assert got.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9, nan_ok=True)


def check(got: Credit, batch: Batch, advantages: list[float], targets: list[float] | None) -> None:
    """Advantages (NaN: not written) without the spans', and targets, at all positions."""
    main = [0.0 if math.isnan(a) else a for a in advantages]
    close(got.advantages_P, plain.with_spans(batch, main, plain.over_the_step))
    if targets is None:
        assert got.targets_P is None
    else:
        close(got.targets_P, targets)


def at_written(batch: Batch, values: list[float]) -> list[float]:
    """A value of every written position at all positions, NaN elsewhere."""
    given_values = iter(values)
    return [next(given_values) if p.written else NAN for _, p in batch.positions]


@given(batches(), unit)
def test_reinforce_plus_plus(batch: Batch, gamma: float) -> None:
    returns = []
    for played in batch.played:
        rewards = [p.reward for p in played.written]
        returns += plain.gae(rewards, [0.0] * len(rewards), 0.0, gamma, 1.0)
    got = advantages.reinforce_plus_plus(batch.episodes(), gamma=gamma)
    check(got, batch, at_written(batch, plain.whitened(returns)), None)


@given(batches(), unit, unit)
def test_gae_goes_over_observations_too(batch: Batch, gamma: float, lam: float) -> None:
    raw = []
    for played in batch.played:
        rewards, values = [p.reward for p in played.positions], [p.value for p in played.positions]
        raw += plain.gae(rewards, values, plain.bootstrap(played), gamma, lam)
    white = plain.whitened([a for a, (_, p) in zip(raw, batch.positions, strict=True) if p.written])
    targets = [a + p.value for a, (_, p) in zip(raw, batch.positions, strict=True)]
    check(advantages.gae(batch.episodes(), gamma=gamma, lam=lam), batch, at_written(batch, white), targets)


@given(batches(), unit, unit)
def test_masked_gae_goes_over_written_positions(batch: Batch, gamma: float, lam: float) -> None:
    raw, values = [], []
    for played in batch.played:
        own = [p.value for p in played.written]
        raw += plain.gae([p.reward for p in played.written], own, plain.bootstrap(played), gamma, lam)
        values += own
    targets = at_written(batch, [a + v for a, v in zip(raw, values, strict=True)])
    got = advantages.masked_gae(batch.episodes(), gamma=gamma, lam=lam)
    check(got, batch, at_written(batch, plain.whitened(raw)), targets)


@given(batches(), unit, unit)
def test_turn_wise_gae_goes_over_turn_ends(batch: Batch, turn_gamma: float, turn_lam: float) -> None:
    raw, lengths, ends = [], [], []
    for played in batch.played:
        turns = plain.turns_of(played)
        rewards = [math.fsum(played.written[k].reward for k in turn) for turn in turns]
        values = [played.written[turn[-1]].value for turn in turns]
        raw += plain.gae(rewards, values, plain.bootstrap(played), turn_gamma, turn_lam)
        lengths += [len(turn) for turn in turns]
        ends += values
    white = [a for a, n in zip(plain.whitened(raw), lengths, strict=True) for _ in range(n)]
    targets = [t for a, v, n in zip(raw, ends, lengths, strict=True) for t in [NAN] * (n - 1) + [a + v]]
    got = advantages.turn_wise_gae(batch.episodes(), turn_gamma=turn_gamma, turn_lam=turn_lam)
    check(got, batch, at_written(batch, white), at_written(batch, targets))


@given(batches(), unit, unit, unit, unit)
def test_bi_level_gae(batch: Batch, gamma: float, lam: float, turn_gamma: float, turn_lam: float) -> None:
    raw = [a for played in batch.played for a in plain.bi_level(played, gamma, lam, turn_gamma, turn_lam)]
    values = [p.value for played in batch.played for p in played.written]
    targets = at_written(batch, [a + v for a, v in zip(raw, values, strict=True)])
    got = advantages.bi_level_gae(batch.episodes(), gamma=gamma, lam=lam, turn_gamma=turn_gamma, turn_lam=turn_lam)
    check(got, batch, at_written(batch, plain.whitened(raw)), targets)


@given(batches(inside=False))
def test_bi_level_gae_without_discounts_is_masked_gae(batch: Batch) -> None:
    ours = advantages.bi_level_gae(batch.episodes(), gamma=1, lam=1, turn_gamma=1, turn_lam=1)
    masked = advantages.masked_gae(batch.episodes(), gamma=1, lam=1)
    close(ours.advantages_P, masked.advantages_P.tolist())
    close(ours.targets_P, masked.targets_P.tolist())


def test_bi_level_gae_with_a_turn_discount_is_not_masked_gae() -> None:
    batch = two_turns(truncated=True)
    ours = advantages.bi_level_gae(batch.episodes(), gamma=1, lam=1, turn_gamma=0.9, turn_lam=1)
    masked = advantages.masked_gae(batch.episodes(), gamma=1, lam=1)
    assert not torch.allclose(ours.advantages_P, masked.advantages_P)


@given(batches(), unit, unit, unit, unit)
def test_a_turn_end_gets_exactly_the_turn_s_advantage(batch, gamma, lam, turn_gamma, turn_lam) -> None:
    episodes = written_only(batch.episodes())
    raw_P = advantages.unwhitened(episodes, gamma=gamma, lam=lam, turn_gamma=turn_gamma, turn_lam=turn_lam)
    ends_P = last_of(episodes.turns_P)
    values_P, after_S = advantages.values_of(episodes)
    turns_T = advantages.generalised(
        episodes.rewards_P[ends_P], values_P[ends_P], episodes.sequences_P[ends_P], after_S, gamma=turn_gamma, lam=turn_lam
    )
    assert raw_P[ends_P].tolist() == turns_T.tolist()
    expected = []
    for played in batch.played:
        ends = [played.written[turn[-1]] for turn in plain.turns_of(played)]
        paid, values = [p.reward for p in ends], [p.value for p in ends]
        expected += plain.gae(paid, values, plain.bootstrap(played), turn_gamma, turn_lam)
    close(turns_T, expected)


def two_turns(truncated: bool) -> Batch:
    """Values 1 to 4 over two turns of two tokens, the second turn unpaid, an observation of value 9 between them."""
    positions = (
        Position(0, True, 0.0, 1.0),
        Position(0, True, 1.0, 2.0),
        Position(1, False, 0.0, 9.0),
        Position(1, True, 0.0, 3.0),
        Position(1, True, 0.0, 4.0),
    )
    return Batch((Played(0, truncated, positions, after=5.0),))


def test_by_hand_a_turn_without_reward_is_still_a_turn() -> None:
    got = advantages.turn_wise_gae(two_turns(False).episodes(), turn_gamma=0.5, turn_lam=1.0)
    close(got.targets_P, [NAN, 1.0, NAN, NAN, 0.0])  # 1 + 0.5·0; 0
    got = advantages.turn_wise_gae(two_turns(True).episodes(), turn_gamma=0.5, turn_lam=1.0)
    close(got.targets_P, [NAN, 2.25, NAN, NAN, 2.5])  # 1 + 0.5·2.5; 0.5·5


def test_by_hand_bi_level_targets() -> None:
    got = advantages.bi_level_gae(two_turns(True).episodes(), gamma=0.5, lam=1.0, turn_gamma=0.5, turn_lam=1.0)
    close(got.targets_P, [1.125, 2.25, NAN, 1.25, 2.5])


def test_by_hand_gae_sees_the_observation() -> None:
    got = advantages.gae(two_turns(False).episodes(), gamma=0.5, lam=0.0)
    close(got.targets_P, [1.0, 5.5, 1.5, 2.0, 0.0])
    got = advantages.masked_gae(two_turns(False).episodes(), gamma=0.5, lam=0.0)
    close(got.targets_P, [1.0, 2.5, NAN, 2.0, 0.0])


@given(batches(spans=False), unit, unit)
def test_the_value_after_an_episode_counts_only_where_it_was_truncated(batch: Batch, gamma: float, lam: float) -> None:
    ended = Batch(tuple(Played(p.group, False, p.positions, after=NAN) for p in batch.played))
    zero = Batch(tuple(Played(p.group, True, p.positions, after=0.0) for p in batch.played))
    for estimate in (advantages.gae, advantages.masked_gae):
        one, other = (estimate(b.episodes(), gamma=gamma, lam=lam) for b in (ended, zero))
        assert one.advantages_P.tolist() == other.advantages_P.tolist()

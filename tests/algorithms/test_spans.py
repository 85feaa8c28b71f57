"""The score of a span moves the tokens of its span, and nothing else."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sensorium.algorithms.advantages import Credit, Episodes
from sensorium.recipe.estimators_and_losses import estimator_traits
from sensorium.recipe.registry import NAMES, resolve
from tests.algorithms.batches import Batch, Span, batches, of_rewards

SETTINGS = {"std": True, "leave_one_out": False, "gamma": 0.9, "lam": 0.8, "turn_gamma": 0.7, "turn_lam": 0.6}
NAN = float("nan")
every_estimator = pytest.mark.parametrize("name", NAMES["advantage"])


def estimate(name: str, episodes: Episodes) -> Credit:
    settings = {key: SETTINGS[key] for key in estimator_traits(name).settings}
    return resolve("advantage", name)(episodes, **settings)


@every_estimator
@given(batches(), st.floats(-3, 3))
def test_a_span_changes_no_position_outside_it_and_no_target(name: str, batch: Batch, shift: float) -> None:
    episodes = batch.episodes()
    got, without = estimate(name, episodes), estimate(name, replace(episodes, spans=()))
    covered_P = torch.zeros_like(episodes.written_P)
    for span in episodes.spans:
        covered_P |= span.covers_P
    moved_P = got.advantages_P != without.advantages_P
    assert not (moved_P & ~(covered_P & episodes.written_P)).any()
    if got.targets_P is not None:
        assert torch.equal(got.targets_P.nan_to_num(99), without.targets_P.nan_to_num(99))
    shifted = tuple(replace(span, scores_S=span.scores_S + shift) for span in episodes.spans)
    again = estimate(name, replace(episodes, spans=shifted))
    outside_P = ~(covered_P & episodes.written_P)
    assert torch.equal(got.advantages_P[outside_P], again.advantages_P[outside_P])


@every_estimator
def test_a_span_moves_its_tokens(name: str) -> None:
    plain = of_rewards([0.0, 1.0, 0.5], [2.0, 2.5], tokens=3)
    covers = (False, True, False) * 5
    batch = replace(plain, spans=(Span((1.0, 0.0, NAN, 0.3, 0.3), covers),))
    moved = estimate(name, batch.episodes()).advantages_P - estimate(name, plain.episodes()).advantages_P
    assert moved.view(5, 3)[:, [0, 2]].eq(0).all()
    first, second, absent, *alike = moved.view(5, 3)[:, 1].tolist()
    assert first > 0
    assert second == 0 if name == "pass_at_k" else second < 0
    assert absent == 0.0  # it has no such part
    if estimator_traits(name).compares and not name.startswith("reinforce"):
        assert alike == [0.0, 0.0]  # no variance in its group


@every_estimator
def test_a_span_that_everybody_was_paid_alike_for_moves_nothing(name: str) -> None:
    plain = of_rewards([0.0, 1.0], [2.0, 2.5], tokens=2)
    batch = replace(plain, spans=(Span((0.1 + 0.2, 0.3, 0.3, NAN), (True,) * 8), Span((NAN,) * 4, (True,) * 8)))
    one, other = (estimate(name, b.episodes()).advantages_P for b in (plain, batch))
    assert torch.equal(one, other)


@every_estimator
def test_a_span_moves_its_tokens_by_its_weight(name: str) -> None:
    plain = of_rewards([0.0, 1.0, 0.5], [2.0, 2.5], tokens=3)
    span = Span((1.0, 0.0, NAN, 0.3, 0.6), (False, True, False) * 5)
    episodes = replace(plain, spans=(span,)).episodes()
    without = estimate(name, plain.episodes()).advantages_P
    halved = replace(episodes, spans=tuple(replace(one, weight=0.5) for one in episodes.spans))
    whole, half = (estimate(name, one).advantages_P - without for one in (episodes, halved))
    assert whole.any()
    assert torch.allclose(half, whole / 2)

"""KL estimators in the loss and in the reward, and the adaptive coefficient, against plain loops in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sensorium.algorithms import kl
from sensorium.algorithms.kl import AdaptiveKL

logprob = st.floats(-8, 0)
pairs = st.lists(st.tuples(logprob, logprob), min_size=1, max_size=16)


def plain_kl(name: str, logp: float, ref: float) -> tuple[float, float]:
    x = ref - logp
    values = {
        "k1": (-x, 1.0),
        "abs": (abs(x), math.copysign(1.0, -x) if x else 0.0),
        "k2": (0.5 * x * x, -x),
        "k3": (math.exp(x) - x - 1, 1 - math.exp(x)) if math.exp(x) - x - 1 < 10 else (10.0, 0.0),
    }
    value, slope = values[name.removesuffix("_straight_through")]
    return (value, -x) if name.endswith("_straight_through") else (value, slope)


@given(pairs, st.sampled_from(["abs", "k2", "k3", "k1_straight_through", "k3_straight_through"]))
def test_estimators_in_the_loss_equal_a_plain_loop(rows: list[tuple[float, float]], name: str) -> None:
    logp, ref = torch.tensor(rows, dtype=torch.float64).T
    logp.requires_grad_()
    out = kl.penalty(logp, ref, name)
    out.sum().backward()
    expected = [plain_kl(name, *row) for row in rows]
    assert out.tolist() == pytest.approx([v for v, _ in expected], rel=1e-9, abs=1e-9)
    assert logp.grad.tolist() == pytest.approx([s for _, s in expected], rel=1e-9, abs=1e-9)


@given(pairs, st.sampled_from(["k1", "abs", "k2", "k3", "k1_straight_through", "k3_straight_through"]))
def test_estimators_in_the_reward_equal_a_plain_loop_without_gradient(rows: list[tuple[float, float]], name: str) -> None:
    logp, ref = torch.tensor(rows, dtype=torch.float64).T
    out = kl.in_reward(logp.requires_grad_(), ref, name)
    assert out.tolist() == pytest.approx([plain_kl(name, *row)[0] for row in rows], rel=1e-9, abs=1e-9)
    assert not out.requires_grad


def test_k3_survives_a_log_ratio_of_thousands() -> None:
    logp = torch.tensor([-5000.0, 0.0], requires_grad=True)
    out = kl.penalty(logp, torch.tensor([0.0, -5000.0]), "k3")
    out.sum().backward()
    assert out.tolist() == [10.0, 10.0]
    assert torch.isfinite(logp.grad).all()


@pytest.mark.parametrize(("name", "expected"), [("k1", [-20, 20]), ("abs", [20, 20]), ("k2", [200, 200]), ("k3", [10, 10])])
def test_a_log_ratio_of_thousands_counts_as_twenty_in_the_reward(name: str, expected: list[float]) -> None:
    assert kl.in_reward(torch.tensor([-5000.0, 0.0]), torch.tensor([0.0, -5000.0]), name).tolist() == expected


@pytest.mark.parametrize("name", ["k1", "k4", "k3_straight", "mse"])
def test_estimators_that_make_no_loss_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        kl.penalty(torch.zeros(1), torch.zeros(1), name)


@pytest.mark.parametrize("name", ["k4", "k3_straight", "mse", "_straight_through"])
def test_unknown_estimators_are_refused_in_the_reward(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        kl.in_reward(torch.zeros(1), torch.zeros(1), name)


steps = st.lists(st.tuples(st.floats(0, 10), st.integers(0, 500)), max_size=20)


@given(st.floats(0.001, 1), st.floats(0.01, 1), st.floats(101, 1e5), steps, st.integers(0, 20))
def test_the_coefficient_follows_the_formula_and_goes_on_from_a_checkpoint(
    coef: float, target: float, horizon: float, seen: list[tuple[float, int]], stop: int
) -> None:
    control = AdaptiveKL(coef, target, horizon)
    for i, (observed, episodes) in enumerate(seen):
        if i == stop:
            state = control.state_dict()
            control = AdaptiveKL(9.0, target, horizon)
            control.load_state_dict(state)
        control.update(observed, episodes)
        share = observed / target - 1
        if share > 0.2:
            share = 0.2
        if share < -0.2:
            share = -0.2
        coef *= 1 + share * episodes / horizon
    assert control.coef == pytest.approx(coef, rel=1e-12)
    assert control.coef > 0


def test_a_drifting_policy_raises_the_coefficient_and_a_still_one_lowers_it() -> None:
    control = AdaptiveKL(0.1, target=0.05, horizon=1000)
    control.update(0.05, 100)
    assert control.coef == pytest.approx(0.1)
    control.update(5.0, 100)
    assert control.coef == pytest.approx(0.102)
    control.update(0.0, 100)
    assert control.coef == pytest.approx(0.102 * 0.98)


@pytest.mark.parametrize("observed", [0.0, 0.1, 9.0])
def test_a_horizon_that_could_turn_the_coefficient_around_is_refused(observed: float) -> None:
    with pytest.raises(ValueError, match=r"algorithm\.kl\.horizon"):
        AdaptiveKL(0.1, target=0.1, horizon=10).update(observed, 64)


@pytest.mark.parametrize("observed", [float("nan"), float("inf")])
def test_a_kl_that_is_no_number_moves_no_coefficient(observed: float) -> None:
    control = AdaptiveKL(0.1, target=0.05, horizon=1000)
    with pytest.raises(ValueError, match="KL"):
        control.update(observed, 1)
    assert control.coef == 0.1

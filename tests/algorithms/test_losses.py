"""Losses over single tokens against plain loops in float64, values and derivatives."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sensorium.algorithms import losses
from sensorium.algorithms.losses import Tokens
from tests.algorithms.updates import Token, Update, differences, flat, ranges, ratio, slopes, updates, whole


def assert_equal(
    out_of: Callable[[Tokens], object], update: Update, plain: Callable[[Token], tuple[float, float, bool]], edge: Callable
) -> None:
    """Value everywhere; derivative and clipping where no edge is near (there either side's derivative is right)."""
    tokens = whole(update)
    out = out_of(tokens)
    found = zip(out.loss_N.tolist(), slopes(out, tokens).tolist(), out.clipped_N.tolist(), strict=True)
    for token, (value, slope, clipped) in zip(flat(update), found, strict=True):
        expected_value, expected_slope, expected_clipped = plain(token)
        assert value == pytest.approx(expected_value, rel=1e-9, abs=1e-12)
        if edge(token) > 1e-9:
            assert slope == pytest.approx(expected_slope, rel=1e-9, abs=1e-12)
            assert clipped == expected_clipped


def plain_clip(token: Token, low: float, high: float, dual: float | None = None) -> tuple[float, float, bool]:
    """Loss, its derivative by the log-prob, and whether the clip took that away."""
    a, r = token.advantage, ratio(token)
    free, bound = -a * r, -a * min(max(r, 1 - low), 1 + high)
    value, slope, clipped = (free, -a * r, False) if free >= bound else (bound, 0.0, True)
    if dual is not None and a < 0 and value > -dual * a:
        value, slope, clipped = -dual * a, 0.0, True
    return value, slope, clipped


@given(updates(), ranges, ranges, st.none() | st.floats(1.1, 5))
def test_clip_equals_a_plain_loop(update: Update, low: float, high: float, dual: float | None) -> None:
    assert_equal(
        lambda tokens: losses.clip(tokens, clip_low=low, clip_high=high, dual_clip=dual),
        update,
        lambda token: plain_clip(token, low, high, dual),
        lambda token: min(abs(ratio(token) - edge) for edge in (1 - low, 1 + high, dual or 1e9)),
    )


def plain_cispo(token: Token, low: float, high: float) -> tuple[float, float, bool]:
    weight = min(max(ratio(token), 1 - low), 1 + high)
    return -token.advantage * weight * token.logp, -token.advantage * weight, weight != ratio(token)


@given(updates(), ranges, ranges)
def test_cispo_equals_a_plain_loop(update: Update, low: float, high: float) -> None:
    assert_equal(
        lambda tokens: losses.cispo(tokens, clip_low=low, clip_high=high),
        update,
        lambda token: plain_cispo(token, low, high),
        lambda token: min(abs(ratio(token) - 1 + low), abs(ratio(token) - 1 - high)),
    )


def plain_sapo(token: Token, positive: float, negative: float) -> tuple[float, float, bool]:
    tau = positive if token.advantage > 0 else negative
    gate = 1 / (1 + math.exp(-tau * (ratio(token) - 1)))
    slope = -token.advantage * 4 * gate * (1 - gate) * ratio(token)
    return -token.advantage * gate * 4 / tau, slope, False


@given(updates(), st.floats(0.5, 3), st.floats(0.5, 3))
def test_sapo_equals_a_plain_loop(update: Update, positive: float, negative: float) -> None:
    assert_equal(
        lambda tokens: losses.sapo(tokens, tau_positive=positive, tau_negative=negative),
        update,
        lambda token: plain_sapo(token, positive, negative),
        lambda token: 1.0,
    )


def plain_dppo(token: Token, low: float, high: float, cap: float) -> tuple[float, float, bool]:
    moved = math.exp(token.logp) - math.exp(token.old)
    if (token.advantage > 0 and moved > high) or (token.advantage < 0 and moved < -low):
        return 0.0, 0.0, True
    weight = min(ratio(token), cap)
    return -token.advantage * weight * token.logp, -token.advantage * weight, False


@given(updates(), ranges, ranges, st.floats(1, 20))
def test_dppo_equals_a_plain_loop(update: Update, low: float, high: float, cap: float) -> None:
    def edge(token: Token) -> float:
        moved = math.exp(token.logp) - math.exp(token.old)
        return min(abs(moved - high), abs(moved + low))

    near = [[token for token in sequence if edge(token) > 1e-9] for sequence in update]
    if any(near):
        assert_equal(
            lambda tokens: losses.dppo(tokens, clip_low=low, clip_high=high, ratio_cap=cap),
            near,
            lambda token: plain_dppo(token, low, high, cap),
            lambda token: 1.0,
        )


def test_dppo_looks_at_how_far_the_probability_moved_and_not_the_ratio() -> None:
    logprobs_N = torch.tensor([0.3, 0.7, 0.001, 0.5, 0.9], dtype=torch.float64).log().requires_grad_()
    old_N = torch.tensor([0.2, 0.4, 0.00001, 0.7, 0.4], dtype=torch.float64).log()
    advantages_N = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    tokens = Tokens(logprobs_N, old_N, advantages_N, torch.zeros(5).long())
    out = losses.dppo(tokens, clip_low=0.1, clip_high=0.25, ratio_cap=20.0)
    assert slopes(out, tokens).tolist() == pytest.approx([-1.5, 0.0, -20.0, 0.0, 2.25])
    assert out.clipped_N.tolist() == [False, True, False, True, False]


@given(updates())
def test_likelihood_is_minus_log_p_whatever_the_advantage(update: Update) -> None:
    assert_equal(losses.likelihood, update, lambda token: (-token.logp, -1.0, False), lambda token: 1.0)


@pytest.mark.parametrize("name", ["clip", "sapo"])
@given(updates(), ranges, ranges)
def test_slopes_are_those_of_the_plain_value(name: str, update: Update, low: float, high: float) -> None:
    """Finite differences of the plain loop, so that an error in the hand-made derivative cannot hide one in the loss."""

    def plain(token: Token) -> float:
        return plain_clip(token, low, high, 10.0)[0] if name == "clip" else plain_sapo(token, 1 + low, 1 + high)[0]

    tokens = whole(update)
    settings = (
        {"clip_low": low, "clip_high": high} if name == "clip" else {"tau_positive": 1 + low, "tau_negative": 1 + high}
    )
    out = {"clip": losses.clip, "sapo": losses.sapo}[name](tokens, **settings)
    for token, slope in zip(flat(update), slopes(out, tokens).tolist(), strict=True):
        if min(abs(ratio(token) - edge) for edge in (1 - low, 1 + high, 10)) < 1e-2:
            continue
        expected = differences(lambda at, t=token: plain(Token(at[0], t.old, t.advantage, t.uniform)), [token.logp])
        assert [slope] == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("function", [losses.clip, losses.sapo])
def test_gradcheck_on_smooth_stretches(function: Callable) -> None:
    old_N = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5], dtype=torch.float64)
    advantages_N = torch.tensor([1.0, -2.0, 0.5, -1.0, 3.0], dtype=torch.float64)
    logprobs_N = (old_N + torch.tensor([0.1, -0.1, 0.9, 0.9, -0.9], dtype=torch.float64)).requires_grad_()
    torch.autograd.gradcheck(
        lambda x_N: function(Tokens(x_N, old_N, advantages_N, torch.zeros(5).long())).loss_N, logprobs_N
    )


@pytest.mark.parametrize("function", [losses.clip, losses.cispo, losses.sapo, losses.dppo])
def test_a_log_ratio_of_thousands_stays_finite(function: Callable) -> None:
    logprobs_N = torch.tensor([0.0, 0.0, 0.0, -5000.0, -5000.0, -5000.0], requires_grad=True)
    old_N = torch.tensor([-5000.0, -5000.0, -5000.0, 0.0, 0.0, 0.0])
    tokens = Tokens(logprobs_N, old_N, torch.tensor([1.0, 0.0, -1.0] * 2), torch.zeros(6).long())
    out = function(tokens)
    assert torch.isfinite(out.loss_N).all()
    assert torch.isfinite(slopes(out, tokens)).all()

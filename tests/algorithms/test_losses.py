"""Per-token losses, KL estimators and mismatch against plain loops in float64, values and gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sensorium.algorithms import clip, kl, likelihood
from sensorium.algorithms.mismatch import mismatch
from sensorium.algorithms.tokens import Tokens

logprob = st.floats(-8, 0)
triples = st.lists(st.tuples(logprob, logprob, st.floats(-3, 3)), min_size=1, max_size=16)


def tokens_of(rows: list[tuple[float, float, float]]) -> Tokens:
    columns = torch.tensor(rows, dtype=torch.float64).T
    return Tokens(columns[0].requires_grad_(), columns[1], columns[2], torch.zeros(len(rows), dtype=torch.long))


def plain_clip(logp: float, old: float, a: float, low: float, high: float, dual: float | None) -> tuple[float, float]:
    """Loss and its derivative by the log-prob."""
    ratio = math.exp(logp - old)
    free, bound = -a * ratio, -a * min(max(ratio, 1 - low), 1 + high)
    value, slope = (free, -a * ratio) if free >= bound else (bound, 0.0)
    if dual is not None and a < 0 and value > -dual * a:
        value, slope = -dual * a, 0.0
    return value, slope


@given(triples, st.floats(0, 0.5), st.floats(0, 0.5), st.none() | st.floats(1.1, 5))
def test_clip_equals_a_plain_loop(rows: list, low: float, high: float, dual: float | None) -> None:
    tokens = tokens_of(rows)
    out = clip.loss(tokens, clip_low=low, clip_high=high, dual_clip=dual)
    out.loss_N.sum().backward()
    expected = [plain_clip(*row, low, high, dual) for row in rows]
    assert out.loss_N.tolist() == pytest.approx([v for v, _ in expected], rel=1e-9, abs=1e-12)
    for got, clipped, (_, slope), (logp, old, a) in zip(
        tokens.logprobs_N.grad.tolist(), out.clipped_N.tolist(), expected, rows, strict=True
    ):
        ratio = math.exp(logp - old)
        if min(abs(ratio - 1 + low), abs(ratio - 1 - high), abs(ratio - (dual or 1e9))) < 1e-9 or abs(a) < 1e-300:
            continue  # at an edge either side's derivative is right
        assert got == pytest.approx(slope, rel=1e-9, abs=1e-12)
        assert clipped == (slope == 0.0)


def test_a_first_update_is_not_clipped_and_has_the_policy_gradient() -> None:
    logp = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    out = clip.loss(Tokens(logp, logp.detach(), torch.tensor([0.5, -2.0], dtype=torch.float64), torch.zeros(2)))
    out.loss_N.sum().backward()
    assert logp.grad.tolist() == [-0.5, 2.0]
    assert not out.clipped_N.any()


@given(triples)
def test_likelihood_is_minus_log_p_whatever_the_advantage(rows: list) -> None:
    tokens = tokens_of(rows)
    likelihood.loss(tokens).loss_N.sum().backward()
    assert likelihood.loss(tokens).loss_N.tolist() == [-row[0] for row in rows]
    assert tokens.logprobs_N.grad.tolist() == [-1.0] * len(rows)


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


@given(
    st.lists(st.tuples(logprob, logprob), min_size=1, max_size=16),
    st.sampled_from(["abs", "k2", "k3", "k1_straight_through", "k3_straight_through"]),
)
def test_kl_estimators_equal_a_plain_loop(rows: list[tuple[float, float]], name: str) -> None:
    logp, ref = torch.tensor(rows, dtype=torch.float64).T
    logp.requires_grad_()
    out = kl.penalty(logp, ref, name)
    out.sum().backward()
    expected = [plain_kl(name, *row) for row in rows]
    assert out.tolist() == pytest.approx([v for v, _ in expected], rel=1e-9, abs=1e-9)
    assert logp.grad.tolist() == pytest.approx([s for _, s in expected], rel=1e-9, abs=1e-9)


def test_k3_survives_a_log_ratio_of_thousands() -> None:
    logp = torch.tensor([-5000.0, 0.0], requires_grad=True)
    out = kl.penalty(logp, torch.tensor([0.0, -5000.0]), "k3")
    out.sum().backward()
    assert out.tolist() == [10.0, 10.0]
    assert torch.isfinite(logp.grad).all()


@pytest.mark.parametrize("name", ["k1", "k4", "k3_straight", "mse"])
def test_estimators_that_make_no_loss_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        kl.penalty(torch.zeros(1), torch.zeros(1), name)


@given(st.lists(st.tuples(logprob, logprob), min_size=1, max_size=16))
def test_mismatch_equals_a_plain_loop(rows: list[tuple[float, float]]) -> None:
    old, engine = torch.tensor(rows, dtype=torch.float64).T
    got = mismatch(old, engine)
    gaps = [abs(o - e) for o, e in rows]
    assert got.prob_error == pytest.approx(sum(math.exp(g) for g in gaps) / len(rows), rel=1e-9)
    assert got.kl == pytest.approx(sum(plain_kl("k3", e, o)[0] for o, e in rows) / len(rows), rel=1e-9, abs=1e-12)
    assert got.maximum == pytest.approx(max(gaps), rel=1e-12)

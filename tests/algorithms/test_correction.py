"""Mismatch between engine and learner: what is measured, the weights and the rejection, against plain loops."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from sensorium.algorithms.correction import mismatch, rejected, weights

logprob = st.floats(-8, 0)
pair = st.tuples(logprob, logprob) | logprob.map(lambda p: (p, p))
sequences = st.lists(st.lists(pair, max_size=6), min_size=1, max_size=6).filter(any)
Sequences = list[list[tuple[float, float]]]


def tensors(rows: Sequences) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    old_N, engine_N = torch.tensor([row for sequence in rows for row in sequence], dtype=torch.float64).T
    counts_S = torch.tensor([len(sequence) for sequence in rows])
    return old_N, engine_N, torch.repeat_interleave(counts_S), counts_S


def plain_weight(sequence: list[tuple[float, float]], token: tuple[float, float], level: str) -> float:
    logs = [old - engine for old, engine in sequence]
    log = {"token": token[0] - token[1], "sequence": math.fsum(logs), "geometric": math.fsum(logs) / len(logs)}[level]
    return math.exp(min(max(log, -20), 20))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "band"])
@given(sequences, st.floats(0.1, 0.9), st.floats(1.1, 5))
def test_weights_equal_a_plain_loop(level: str, mode: str, rows: Sequences, low: float, high: float) -> None:
    plain = [plain_weight(sequence, token, level) for sequence in rows for token in sequence]
    assume(all(min(abs(w - low), abs(w - high)) > 1e-9 for w in plain))
    if mode == "truncate":
        expected = [min(w, high) for w in plain]
    else:
        expected = [w if low <= w <= high else 0.0 for w in plain]
    got_N = weights(*tensors(rows), weights=level, mode=mode, low=low, high=high)
    assert got_N.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "band"])
def test_an_engine_that_agrees_weighs_exactly_one_and_is_never_rejected(level: str, mode: str) -> None:
    logprobs_N, sequences_N, counts_S = torch.tensor([-1.0, -2.5, -0.1]), torch.tensor([0, 0, 2]), torch.tensor([2, 0, 1])
    given_N = weights(logprobs_N, logprobs_N, sequences_N, counts_S, weights=level, mode=mode, low=0.5, high=2.0)
    assert given_N.tolist() == [1.0, 1.0, 1.0]
    assert given_N.dtype == torch.float32
    for by in ("mean", "max"):
        for estimator in ("k1", "k2", "k3"):
            out_S = rejected(logprobs_N, logprobs_N, sequences_N, counts_S, by=by, estimator=estimator, above=1e-12)
            assert not out_S.any()


def test_weights_carry_no_gradient_and_survive_log_ratios_of_thousands() -> None:
    old_N = torch.tensor([0.0, -5000.0], requires_grad=True)
    given = (old_N, torch.tensor([-5000.0, 0.0]), torch.tensor([0, 1]), torch.tensor([1, 1]))
    for level in ("token", "sequence", "geometric"):
        out_N = weights(*given, weights=level, mode="truncate", low=0.0, high=1e12)
        assert out_N.tolist() == pytest.approx([math.exp(20), math.exp(-20)])
        assert not out_N.requires_grad


def plain_rejected(sequence: list[tuple[float, float]], by: str, estimator: str) -> float:
    estimates = []
    for old, engine in sequence:
        x = old - engine
        estimates.append({"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[estimator])
    if by == "mean":
        return abs(math.fsum(estimates) / len(estimates))
    return max(abs(e) for e in estimates)


@pytest.mark.parametrize("by", ["mean", "max"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@given(sequences, st.floats(0.01, 10))
def test_rejection_equals_a_plain_loop(by: str, estimator: str, rows: Sequences, above: float) -> None:
    found = [plain_rejected(sequence, by, estimator) if sequence else None for sequence in rows]
    assume(all(value is None or abs(value - above) > 1e-9 for value in found))
    got_S = rejected(*tensors(rows), by=by, estimator=estimator, above=above)
    assert got_S.dtype == torch.bool
    assert got_S.tolist() == [value is not None and value > above for value in found]


def test_drift_either_way_is_rejected_by_k1() -> None:
    given = tensors([[(-1.0, -2.0)], [(-2.0, -1.0)], [(-1.0, -2.0), (-2.0, -1.0)], []])
    assert rejected(*given, by="mean", estimator="k1", above=0.5).tolist() == [True, True, False, False]
    assert rejected(*given, by="max", estimator="k1", above=0.5).tolist() == [True, True, True, False]


@pytest.mark.parametrize(("key", "value"), [("weights", "none"), ("mode", "mask")])
def test_unknown_weights_are_refused(key: str, value: str) -> None:
    settings = {"weights": "token", "mode": "truncate", "low": 0.5, "high": 2.0} | {key: value}
    with pytest.raises(ValueError, match=value):
        weights(*tensors([[(-1.0, -1.0)]]), **settings)


@pytest.mark.parametrize(("key", "value"), [("by", "sum"), ("estimator", "abs")])
def test_unknown_ways_to_reject_are_refused(key: str, value: str) -> None:
    settings = {"by": "mean", "estimator": "k3", "above": 1.0} | {key: value}
    with pytest.raises(ValueError, match=value):
        rejected(*tensors([[(-1.0, -1.0)]]), **settings)


@given(sequences)
def test_mismatch_equals_a_plain_loop(rows: Sequences) -> None:
    got = mismatch(*tensors(rows))
    gaps = [[old - engine for old, engine in sequence] for sequence in rows if sequence]
    every = [gap for sequence in gaps for gap in sequence]
    ratios = [math.exp(math.fsum(sequence) / len(sequence)) for sequence in gaps]
    assert got.prob_error == pytest.approx(math.fsum(math.exp(abs(g)) for g in every) / len(every), rel=1e-9)
    k3 = [math.exp(g) - g - 1 for g in every]
    assert got.kl == pytest.approx(math.fsum(k3) / len(every), rel=1e-9, abs=1e-12)
    assert got.maximum == pytest.approx(max(abs(g) for g in every), rel=1e-12)
    assert got.sequence_max == pytest.approx(max(ratios), rel=1e-9)
    assert got.sequence_min == pytest.approx(min(ratios), rel=1e-9)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "band"])
def test_a_token_that_no_engine_sampled_weighs_one_and_counts_in_no_sequence(level: str, mode: str) -> None:
    """Observed text that is trained (loss_mask: false) has NaN for the engine's log-prob."""
    settings = {"weights": level, "mode": mode, "low": 0.1, "high": 9.0}
    known: Sequences = [[(-1.0, -1.5), (-2.0, -1.7)], [(-1.0, -2.0)]]
    given: Sequences = [[known[0][0], (-3.0, math.nan), known[0][1]], [(-4.0, math.nan), known[1][0]]]
    first, second, third = weights(*tensors(known), **settings).tolist()
    assert weights(*tensors(given), **settings).tolist() == pytest.approx([first, 1.0, second, 1.0, third])
    for by in ("mean", "max"):
        kept = {"by": by, "estimator": "k2", "above": 0.2}
        assert rejected(*tensors(given), **kept).tolist() == rejected(*tensors(known), **kept).tolist() == [False, True]

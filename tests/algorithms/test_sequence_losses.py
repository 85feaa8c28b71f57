"""Losses over whole sequences: their token surrogates against the sequence formulas, values and derivatives."""

import math

import pytest
from hypothesis import assume, given
from torch import Tensor

from sensorium.algorithms import losses
from sensorium.algorithms.losses import TokenLoss, Tokens
from tests.algorithms.updates import Token, Update, differences, flat, per_sequence, ranges, slopes, updates, whole

DUAL = 2.5
"""Low, so that it is met."""


def gspo_of_sequence(gaps: list[float], advantage: float, low: float, high: float, dual: float) -> float:
    """The paper's loss of one sequence with one advantage, and the dual clip."""
    ratio = math.exp(sum(gaps) / len(gaps))
    value = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
    return min(value, -dual * advantage) if advantage < 0 else value


def gmpo_of_sequence(gaps: list[float], advantage: float, low: float, high: float, dual: float) -> float:
    """The paper's loss of one sequence with one advantage, and the dual clip."""
    ratio = math.exp(sum(bounded(gap, advantage, low, high) for gap in gaps) / len(gaps))
    return -advantage * (min(ratio, dual) if advantage < 0 else ratio)


def bounded(gap: float, advantage: float, low: float, high: float) -> float:
    sign = (advantage > 0) - (advantage < 0)
    return sign * min(sign * gap, sign * min(max(gap, -low), high))


def on_an_edge(update: Update, low: float, high: float, margin: float, dual: float = math.inf) -> bool:
    """Whether a token or a sequence is near a kink of either loss."""
    means = [sum(t.gap for t in sequence) / len(sequence) for sequence in update if sequence]
    held = [[bounded(t.gap, t.advantage, low, high) for t in sequence] for sequence in update if sequence]
    ratios = [math.exp(mean) for mean in means]
    near = [min(abs(r - edge) for edge in (1 - low, 1 + high, dual)) for r in ratios]
    near += [abs(math.exp(sum(gaps) / len(gaps)) - dual) for gaps in held]
    near += [min(abs(token.gap + low), abs(token.gap - high)) for token in flat(update)]
    return min(near) < margin


def run(name: str, tokens: Tokens, low: float, high: float, dual: float | None) -> TokenLoss:
    return {"gspo": losses.gspo, "gmpo": losses.gmpo}[name](tokens, clip_low=low, clip_high=high, dual_clip=dual)


def total(name: str, update: Update, logprobs: list[float], low: float, high: float, dual: float) -> float:
    """The mean over sequences of the formula, at other log-probs than the update's."""
    formula = {"gspo": gspo_of_sequence, "gmpo": gmpo_of_sequence}[name]
    given, values = iter(logprobs), []
    for sequence in update:
        if sequence:
            values.append(formula([next(given) - t.old for t in sequence], sequence[0].advantage, low, high, dual))
    return sum(values) / len(values)


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
@pytest.mark.parametrize("dual", [None, DUAL])
@given(updates(shared=True), ranges, ranges)
def test_with_one_advantage_it_is_the_sequence_formula(
    name: str, dual: float | None, update: Update, low: float, high: float
) -> None:
    bound = math.inf if dual is None else dual
    assume(not on_an_edge(update, low, high, 1e-3, bound))
    tokens = whole(update)
    out = run(name, tokens, low, high, dual)
    logprobs = [token.logp for token in flat(update)]
    assert float(per_sequence(update, out.loss_N.detach()).sum()) == pytest.approx(
        total(name, update, logprobs, low, high, bound), rel=1e-6, abs=1e-6
    )
    expected = differences(lambda at: total(name, update, list(at), low, high, bound), logprobs)
    assert per_sequence(update, slopes(out, tokens)).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def plain_gspo(sequence: list[Token], low: float, high: float) -> list[tuple[float, float, bool]]:
    """Value, derivative and clipping of every token, each with its own advantage."""
    ratio = math.exp(sum(t.gap for t in sequence) / len(sequence))
    bound = min(max(ratio, 1 - low), 1 + high)
    return [
        (-t.advantage * bound, 0.0, True)
        if -t.advantage * bound > -t.advantage * ratio
        else (-t.advantage * ratio,) * 2 + (False,)
        for t in sequence
    ]


def plain_gmpo(sequence: list[Token], low: float, high: float) -> list[tuple[float, float, bool]]:
    """Value, derivative and clipping of every token, each with its own advantage."""
    mean = sum(bounded(t.gap, t.advantage, low, high) for t in sequence) / len(sequence)
    out = []
    for t in sequence:
        value = -t.advantage * math.exp(mean)
        clipped = bool(t.advantage) and bounded(t.gap, t.advantage, low, high) != t.gap
        out.append((value, 0.0 if clipped else value, clipped))
    return out


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
@given(updates(), ranges, ranges)
def test_with_an_advantage_per_token_it_equals_a_plain_loop(name: str, update: Update, low: float, high: float) -> None:
    assume(not on_an_edge(update, low, high, 1e-9))
    tokens = whole(update)
    out = run(name, tokens, low, high, None)
    plain = {"gspo": plain_gspo, "gmpo": plain_gmpo}[name]
    expected = [row for sequence in update if sequence for row in plain(sequence, low, high)]
    assert approx(out.loss_N) == [value for value, _, _ in expected]
    assert approx(slopes(out, tokens)) == [slope for _, slope, _ in expected]
    assert out.clipped_N.tolist() == [clipped for _, _, clipped in expected]


def approx(values_N: Tensor) -> object:
    return pytest.approx(values_N.tolist(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_the_dual_clip_leaves_a_good_sequence_alone(name: str) -> None:
    tokens = whole([[Token(-1.0, -2.5, advantage, 0.5)] for advantage in (2.0, -2.0)])
    out = run(name, tokens, 2.0, 4.0, DUAL)
    assert out.clipped_N.tolist() == [False, True]
    assert out.loss_N.tolist() == pytest.approx([-2 * math.exp(1.5), 2 * DUAL])


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_without_its_sequences_it_refuses_to_run(name: str) -> None:
    tokens = whole([[Token(-1.0, -1.0, 1.0, 0.5)]])
    with pytest.raises(AssertionError, match=name):
        run(name, Tokens(tokens.logprobs_N, tokens.old_N, tokens.advantages_N, tokens.sequences_N), 0.2, 0.2, None)

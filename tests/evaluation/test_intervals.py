"""Intervals cover the truth as often as they say, with the task as their unit."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.evaluation.summary import (
    mean_interval,
    paired_interval,
    sign_test,
    student_interval,
    t_quantile,
    welch_interval,
    wilson,
)

TRIALS = 1200
SLACK = 3 * (0.95 * 0.05 / TRIALS) ** 0.5 + 0.01


def test_wilson_is_the_textbook_interval() -> None:
    assert wilson(8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert wilson(0, 20)[0] == 0.0
    assert wilson(20, 20)[1] == 1.0
    assert {wilson(0, n)[0] for n in range(1, 40)} == {0.0}
    assert {wilson(n, n)[1] for n in range(1, 40)} == {1.0}
    with pytest.raises(ValueError, match="at least one"):
        wilson(0, 0)


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=60), st.integers(1, 8))
def test_an_interval_holds_the_mean(values: list[float], samples: int) -> None:
    low, high = mean_interval(values, samples)
    assert 0.0 <= low <= sum(values) / len(values) + 1e-9
    assert sum(values) / len(values) - 1e-9 <= high <= 1.0


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(2, 8))
def test_samples_that_always_agree_are_worth_one(verdicts: list[bool], samples: int) -> None:
    shares = [float(verdict) for verdict in verdicts]
    assert mean_interval(shares, samples) == wilson(sum(shares), len(shares))


def test_equal_shares_do_not_make_an_interval_of_no_width() -> None:
    assert mean_interval([0.5] * 10, 4) == wilson(20, 40)
    assert mean_interval([0.5], 4) == wilson(0.5, 1), "one task is one task"


@pytest.mark.parametrize(
    ("tasks", "samples", "a", "b"),
    [(40, 4, 0.5, 0.5), (40, 8, 5.0, 2.0), (60, 4, 400.0, 600.0), (100, 2, 0.05, 0.05), (300, 4, 2.0, 2.0)],
)
def test_the_mean_of_k_samples_is_covered(tasks: int, samples: int, a: float, b: float) -> None:
    """Tasks are right with a chance of their own, drawn from Beta(a, b): from all alike to almost always or never."""
    random = np.random.default_rng(0)
    shares = random.binomial(samples, random.beta(a, b, (TRIALS, tasks))) / samples
    truth = a / (a + b)
    covered = np.mean([low <= truth <= high for low, high in (mean_interval(row.tolist(), samples) for row in shares)])
    assert covered >= 0.95 - SLACK


def test_counting_samples_as_tasks_would_not_cover() -> None:
    random = np.random.default_rng(0)
    chances = random.beta(0.1, 0.1, (TRIALS, 60))
    right = random.binomial(8, chances).sum(1)
    covered = np.mean([low <= 0.5 <= high for low, high in (wilson(float(count), 480) for count in right)])
    assert covered < 0.7, "this is the mistake that the task as a unit avoids"


@pytest.mark.parametrize(
    ("tasks", "won", "lost"), [(30, 0.1, 0.1), (30, 0.3, 0.05), (100, 0.15, 0.05), (1197, 0.2, 0.11), (60, 0.02, 0.0)]
)
def test_the_paired_difference_is_covered(tasks: int, won: float, lost: float) -> None:
    random = np.random.default_rng(1)
    differences = random.choice([1.0, -1.0, 0.0], (TRIALS, tasks), p=[won, lost, 1 - won - lost])
    covered = np.mean([low <= won - lost <= high for low, high in map(paired_interval, differences.tolist())])
    assert covered >= 0.95 - SLACK


@pytest.mark.parametrize(
    ("tasks", "won", "lost", "difference", "half"),
    [
        (98, 10, 4, 0.06, 1.959964 * (0.1564 / 100) ** 0.5),
        (48, 24, 4, 0.4, 1.959964 * (0.44 / 50) ** 0.5),
        (8, 0, 0, 0.0, 1.959964 * (0.2 / 10) ** 0.5),
    ],
)
def test_the_paired_interval_is_bonett_and_price_s(tasks: int, won: int, lost: int, difference: float, half: float) -> None:
    """p = (changed + 1) / (n + 2) both ways: p1 - p2 ± z √((p1 + p2 - (p1 - p2)²) / (n + 2)), worked by hand."""
    interval = paired_interval([1.0] * won + [-1.0] * lost + [0.0] * (tasks - won - lost))
    assert interval == pytest.approx((difference - half, difference + half), abs=1e-6)


def test_the_paired_difference_of_k_samples_is_covered() -> None:
    random = np.random.default_rng(2)
    before = random.beta(2, 2, (TRIALS, 80)) * 0.9
    shares = [random.binomial(4, chance) / 4 for chance in (before, before + 0.1)]
    differences = (shares[1] - shares[0]).tolist()
    covered = np.mean([low <= 0.1 <= high for low, high in map(paired_interval, differences)])
    assert covered >= 0.95 - SLACK


@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.25, 1.0]), min_size=1, max_size=80))
def test_a_paired_interval_holds_its_difference_and_turns_with_it(differences: list[float]) -> None:
    low, high = paired_interval(differences)
    assert -1.0 <= low <= sum(differences) / len(differences) + 1e-9
    assert sum(differences) / len(differences) - 1e-9 <= high <= 1.0
    assert paired_interval([-value for value in differences]) == pytest.approx((-high, -low))
    assert high - low > 0.0


def test_the_sign_test_counts_every_way_in_which_tasks_can_change() -> None:
    for changed, one in ((n, i) for n in range(9) for i in range(n + 1)):
        observed = abs(2 * one - changed)
        ways = list(product((0, 1), repeat=changed))
        extreme = sum(abs(2 * sum(way) - changed) >= observed for way in ways)
        assert sign_test(one, changed - one) == pytest.approx(extreme / len(ways))
    assert sign_test(400, 800) < 1e-9


@pytest.mark.parametrize(
    ("freedom", "value"), [(1, 12.706), (2, 4.303), (5, 2.571), (10, 2.228), (30, 2.042), (1000, 1.962)]
)
def test_students_quantile_is_that_of_the_tables(freedom: int, value: float) -> None:
    assert t_quantile(freedom) == pytest.approx(value, abs=0.003)


def test_an_interval_across_seeds_needs_two_of_them_and_widens_with_their_spread() -> None:
    assert student_interval([0.5]) is None
    assert welch_interval([0.5], [0.4, 0.6]) is None
    assert student_interval([0.4, 0.5, 0.6]) == pytest.approx(
        (0.5 - 4.303 * 0.1 / 3**0.5, 0.5 + 4.303 * 0.1 / 3**0.5), abs=1e-3
    )
    low, high = welch_interval([0.1, 0.2, 0.3], [0.4, 0.5, 0.6]) or (0, 0)
    half = 2.776 * (2 * 0.01 / 3) ** 0.5  # equal spreads: four degrees of freedom
    assert (low, high) == pytest.approx((0.3 - half, 0.3 + half), abs=1e-3)

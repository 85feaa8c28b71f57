"""GRPO advantages against a plain loop in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sensorium.algorithms.grpo import advantages

rewards = st.lists(st.floats(-10, 10, width=32).map(lambda x: round(x, 3)), min_size=1, max_size=12)


def mean_and_std(values: list[float]) -> tuple[float, float | None]:
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def plain(group: list[float], std: bool, leave_one_out: bool) -> list[float]:
    out = []
    for i, reward in enumerate(group):
        base = group[:i] + group[i + 1 :] if leave_one_out else group
        if len(group) < 2 or len(set(group)) == 1:
            out.append(0.0)
            continue
        mean, spread = mean_and_std(base)
        divide = std and spread is not None and (not leave_one_out or len(set(base)) > 1)
        out.append((reward - mean) / (spread + 1e-6) if divide else reward - mean)
    return out


@given(rewards, st.booleans(), st.booleans())
def test_equals_a_plain_loop(group: list[float], std: bool, leave_one_out: bool) -> None:
    got = advantages(torch.tensor(group, dtype=torch.float64), std=std, leave_one_out=leave_one_out)
    assert got.tolist() == pytest.approx(plain(group, std, leave_one_out), rel=1e-6, abs=1e-9)


def test_leave_one_out_does_not_divide_by_a_zero_spread() -> None:
    got = advantages(torch.tensor([1.0] + [0.0] * 7), leave_one_out=True)
    assert got[0] == 1.0
    assert got[1:].tolist() == pytest.approx([-0.378] * 7, abs=1e-3)


@given(st.floats(-1e6, 1e6), st.integers(1, 64), st.booleans(), st.booleans())
def test_a_group_without_variance_gives_exactly_zero(value: float, size: int, std: bool, leave_one_out: bool) -> None:
    for dtype in (torch.float32, torch.float64):
        got = advantages(torch.full((size,), value, dtype=dtype), std=std, leave_one_out=leave_one_out)
        assert got.tolist() == [0.0] * size


def test_rewards_that_differ_only_in_float64_have_variance() -> None:
    got = advantages(torch.tensor([1.0, 1.0 + 1e-9], dtype=torch.float64), std=False)
    assert got.tolist() == pytest.approx([-5e-10, 5e-10], rel=1e-3)

"""The critic's loss against a plain loop, finite differences and gradcheck."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sensorium.algorithms.losses import value_loss
from tests.algorithms.updates import differences

number = st.floats(-3, 3)
rows = st.lists(st.tuples(number, number, number), min_size=1, max_size=12)


def plain(value: float, old: float, target: float, clip: float | None) -> float:
    free = 0.5 * (value - target) ** 2
    if clip is None:
        return free
    return max(free, 0.5 * (min(max(value, old - clip), old + clip) - target) ** 2)


@given(rows, st.none() | st.floats(0.05, 1))
def test_value_loss_equals_a_plain_loop(given: list[tuple[float, float, float]], clip: float | None) -> None:
    values_P, old_P, targets_P = torch.tensor(given, dtype=torch.float64).T
    values_P.requires_grad_()
    loss_P, clipped_P = value_loss(values_P, old_P, targets_P, clip=clip)
    loss_P.sum().backward()
    assert loss_P.tolist() == pytest.approx([plain(*row, clip) for row in given], rel=1e-12, abs=1e-12)
    for (value, old, target), slope, clipped in zip(given, values_P.grad.tolist(), clipped_P.tolist(), strict=True):
        bound = value if clip is None else min(max(value, old - clip), old + clip)
        edges = [abs(abs(value - old) - clip)] if clip is not None else []
        edges += [abs(abs(bound - target) - abs(value - target))] if bound != value else []
        if min(edges, default=1) < 1e-3:
            continue  # at an edge either side's derivative is right
        expected = differences(lambda at, o=old, t=target: plain(at[0], o, t, clip), [value])
        assert [slope] == pytest.approx(expected, abs=1e-4)
        assert clipped == (abs(bound - target) > abs(value - target))
        if clipped:
            assert slope == 0


def test_a_value_within_the_clip_learns_as_if_there_were_none() -> None:
    values_P = torch.tensor([0.4, -0.3], dtype=torch.float64, requires_grad=True)
    old_P, targets_P = torch.zeros(2, dtype=torch.float64), torch.tensor([1.0, 2.0], dtype=torch.float64)
    for clip in (None, 0.5):
        loss_P, clipped_P = value_loss(values_P, old_P, targets_P, clip=clip)
        assert torch.autograd.grad(loss_P.sum(), values_P)[0].tolist() == pytest.approx([-0.6, -2.3])
        assert not clipped_P.any()


def test_gradcheck_on_smooth_stretches() -> None:
    values_P = torch.tensor([0.1, 2.0, -1.5, 0.9], dtype=torch.float64, requires_grad=True)
    old_P, targets_P = torch.zeros(4, dtype=torch.float64), torch.tensor([1.0, 3.0, 1.0, -2.0], dtype=torch.float64)
    torch.autograd.gradcheck(lambda v_P: value_loss(v_P, old_P, targets_P, clip=0.5)[0], values_P)

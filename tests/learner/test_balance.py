"""Groups are divided among ranks evenly, completely, and the same way every time."""

from hypothesis import given
from hypothesis import strategies as st

from sensorium.learner.team import divide


def test_the_example() -> None:
    assert divide([5, 3, 3, 2, 2], 2) == [0, 1, 1, 0, 1]


@given(st.lists(st.floats(0, 1e6), max_size=30), st.integers(1, 8))
def test_no_rank_has_more_than_the_mean_and_one_group(costs: list[float], ranks: int) -> None:
    chosen = divide(costs, ranks)
    loads = [sum(cost for cost, rank in zip(costs, chosen, strict=True) if rank == one) for one in range(ranks)]
    assert max(loads) <= sum(costs) / ranks + max(costs, default=0) + 1e-6
    assert divide(costs, ranks) == chosen

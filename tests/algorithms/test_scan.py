"""The parts that estimators are made of: discounted sums, whitening, groups as a matrix."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sensorium.algorithms.advantages import discounted, grouped, last_of, standardise, whiten
from tests.algorithms import plain

lengths = st.lists(st.integers(1, 9), max_size=8)
discounts = st.sampled_from([0.0, 1.0, 0.5, 0.999]) | st.floats(0, 1)


def plain_sums(values: list[float], segments: list[int], discount: float) -> list[float]:
    sums = list(values)
    for p in range(len(values) - 2, -1, -1):
        if segments[p] == segments[p + 1]:
            sums[p] = values[p] + discount * sums[p + 1]
    return sums


def random_values(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(lengths, discounts, st.integers(0, 2**32))
def test_discounted_sums_equal_a_loop(sizes: list[int], discount: float, seed: int) -> None:
    segments = [7 * s for s, size in enumerate(sizes) for _ in range(size)]
    values = random_values(len(segments), seed)
    got = discounted(values, torch.tensor(segments, dtype=torch.long), discount)
    assert got.tolist() == pytest.approx(plain_sums(values.tolist(), segments, discount), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.99, 1.0])
def test_discounted_sums_over_thousands_of_tokens(discount: float) -> None:
    sizes = [1, 4096, 1, 4097, 3000, 1]
    segments = [s for s, size in enumerate(sizes) for _ in range(size)]
    values = random_values(len(segments), 0)
    got = discounted(values, torch.tensor(segments), discount)
    assert got.tolist() == pytest.approx(plain_sums(values.tolist(), segments, discount), rel=1e-10, abs=1e-10)


@given(lengths)
def test_last_of_a_segment(sizes: list[int]) -> None:
    segments = torch.tensor([s for s, size in enumerate(sizes) for _ in range(size)], dtype=torch.long)
    assert last_of(segments).tolist() == [k == size - 1 for size in sizes for k in range(size)]


@given(st.lists(st.integers(-40, 40).map(lambda x: x / 8), max_size=12))
def test_whitening_equals_the_formula(values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float64)
    assert whiten(tensor).tolist() == pytest.approx(plain.whitened(values), rel=1e-9, abs=1e-12)
    assert standardise(tensor).tolist() == pytest.approx(plain.standardised(values), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("values", [[], [3.7], [0.1] * 7, [0.1 + 0.2, 0.3]])
def test_what_does_not_vary_is_exactly_zero(values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float64)
    assert whiten(tensor).tolist() == standardise(tensor).tolist() == [0.0] * len(values)


@given(st.lists(st.integers(0, 5), max_size=20))
def test_groups_go_to_a_matrix_and_back(ids: list[int]) -> None:
    groups = grouped(torch.tensor(ids, dtype=torch.long))
    values = torch.arange(1.0, len(ids) + 1, dtype=torch.float64)
    laid = groups.lay_out(values)
    assert groups.back(laid).tolist() == values.tolist()
    assert groups.sizes.sum() == len(ids)
    for row, name in enumerate(sorted(set(ids))):
        expected = [float(i + 1) for i, other in enumerate(ids) if other == name]
        assert laid[row][groups.present_KG[row]].tolist() == expected

"""Random numbers are a function of their key and index, the same everywhere, and uniform."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from sensorium.engines.native.sampler import signed64, uniforms
from sensorium.engines.protocol import response_key

WORD = (1 << 64) - 1


def plain_uniform(key: int, index: int) -> float:
    """The same hash in Python's own integers."""

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
        return z ^ (z >> 31)

    state = (mix(key & WORD) + (index + 1) * 0x9E3779B97F4A7C15) & WORD
    return ((mix(state) >> 12) + 0.5) * 2.0**-52


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31)), min_size=1, max_size=40))
def test_tensor_hash_equals_plain_integers(pairs: list[tuple[int, int]]) -> None:
    keys, indices = (torch.tensor(column) for column in zip(*pairs, strict=True))
    drawn = uniforms(keys, indices)
    assert drawn.dtype == torch.float64
    assert drawn.tolist() == [plain_uniform(key, index) for key, index in pairs]
    assert ((drawn > 0) & (drawn < 1)).all()


def test_extreme_bits_stay_inside_the_open_interval() -> None:
    assert 0 < (0 + 0.5) * 2.0**-52
    assert ((2**52 - 1) + 0.5) * 2.0**-52 < 1


def test_draws_are_uniform_over_keys_and_over_tokens() -> None:
    keys = torch.tensor([response_key(0, 3, f"task {i}", 1, 0) for i in range(4000)])
    tokens = torch.arange(4000)
    for drawn in (uniforms(keys, torch.zeros_like(keys)), uniforms(keys[:1].expand(4000), tokens)):
        gaps = (drawn.sort().values - (tokens + 0.5) / 4000).abs()
        assert gaps.max() < 1.95 / 4000**0.5  # Kolmogorov-Smirnov at one in a thousand


def test_every_part_of_the_key_counts() -> None:
    base = (0, 1, "a", 2, 3)
    others = [(1, 1, "a", 2, 3), (0, 2, "a", 2, 3), (0, 1, "b", 2, 3), (0, 1, "a", 3, 3), (0, 1, "a", 2, 4)]
    assert len({response_key(*base), *(response_key(*other) for other in others)}) == 6
    assert response_key(*base) == response_key(*base)


@given(st.integers(-(2**70), 2**70))
def test_signed64_keeps_the_low_bits(value: int) -> None:
    assert signed64(value) & WORD == value & WORD
    assert -(2**63) <= signed64(value) < 2**63

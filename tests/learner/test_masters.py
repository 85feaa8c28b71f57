"""A bfloat16 weight and 16 bits beside it are a float32 master, and move as one bit for bit."""

import struct
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from sensorium.learner import optimizer
from sensorium.learner.optimizer import (
    ParameterState,
    Rates,
    join,
    noise_bits,
    noise_key,
    rounded_at_random,
    split,
    step_all,
)

RATES = Rates(lr=3e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.01)
ONE = torch.tensor(1.0)
bits = st.integers(0, 0x7F7FFFFF).flatmap(lambda magnitude: st.sampled_from([magnitude, magnitude | 0x80000000]))
ties = st.integers(0, 0x7F7F).flatmap(lambda high: st.sampled_from([high << 16 | 0x8000, high << 16 | 0x80008000]))
denormals = st.integers(0, 0x7FFFFF).flatmap(lambda low: st.sampled_from([low, low | 0x80000000]))
masters = st.lists(st.one_of(bits, ties, denormals), min_size=1, max_size=40)


def floats(words: list[int]) -> Tensor:
    return torch.frombuffer(bytearray(struct.pack(f"<{len(words)}I", *words)), dtype=torch.float32)


@given(masters)
def test_weight_and_remainder_are_the_master(words: list[int]) -> None:
    master = floats(words)
    weight, remainder = split(master)
    assert torch.equal(join(weight, remainder).view(torch.int32), master.view(torch.int32))


@given(masters)
def test_the_weight_is_the_master_rounded_to_nearest(words: list[int]) -> None:
    master = floats(words)
    weight, remainder = split(master)
    nearest = master.bfloat16()
    tie = remainder == -0x8000
    assert torch.equal(weight[~tie].view(torch.int16), nearest[~tie].view(torch.int16))
    away = (weight.float()[tie] - master[tie]).abs() == (nearest.float()[tie] - master[tie]).abs()
    assert bool((away | weight[tie].isinf()).all())
    assert bool((weight.float()[tie].abs() > master[tie].abs()).all())


@given(masters, st.integers(0, 2**31))
def test_steps_are_those_of_a_float32_master_bit_for_bit(words: list[int], seed: int) -> None:
    """The same AdamW on whole masters, whose weights are rounded after each step."""
    whole = floats(words).clamp(-1e30, 1e30)
    halves = ParameterState(Parameter(torch.zeros(len(words), dtype=torch.bfloat16)), 0, torch.float32)
    halves.master = whole
    reference = ParameterState(Parameter(whole.clone()), 0, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        gradient = torch.randn(len(words), generator=generator)
        halves.gradient, reference.gradient = gradient.clone(), gradient.clone()
        with torch.no_grad():
            step_all([halves, reference], [RATES, RATES], ONE)
        assert torch.equal(halves.master.view(torch.int32), reference.parameter.detach().view(torch.int32))
        assert torch.equal(halves.parameter.detach(), split(reference.parameter.detach())[0])


def test_random_rounding_is_right_on_average_and_repeats() -> None:
    values = torch.full((40000,), 1 + 0.3 / 128)  # 0.3 of the way to the next bfloat16
    noise = noise_bits(values.shape, noise_key(3, 7), values.device)
    found = rounded_at_random(values, noise[0]).float()
    assert set(found.tolist()) == {1.0, 1 + 1 / 128}
    assert float((found > 1).float().mean()) == pytest.approx(0.3, abs=0.01)
    assert abs(float(torch.corrcoef(torch.stack([n.float() for n in noise]))[0, 1])) < 0.02
    assert torch.equal(noise_bits(values.shape, noise_key(3, 7), values.device)[1], noise[1])
    assert not torch.equal(noise_bits(values.shape, noise_key(4, 7), values.device)[1], noise[1])


def test_moments_in_fewer_bits_decay_and_lead_to_nearly_the_same_weights() -> None:
    start = torch.randn(2000, generator=torch.Generator().manual_seed(1))
    moved = {}
    for kind in (torch.float32, torch.bfloat16, torch.uint8):
        tensor = ParameterState(Parameter(start.clone()), 0, kind)
        generator = torch.Generator().manual_seed(0)
        rates = Rates(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
        for step in range(300):
            tensor.gradient = torch.randn(2000, generator=generator) * (10 if step < 20 else 1)
            with torch.no_grad():
                step_all([tensor], [rates], ONE)
        moved[kind] = (tensor.parameter.detach() - start, tensor.read_moments()[1])
    whole = moved[torch.float32]
    for kind, apart in ((torch.bfloat16, 0.005), (torch.uint8, 0.01)):
        assert float(moved[kind][1].mean() / whole[1].mean()) == pytest.approx(1, abs=0.01)
        assert float(torch.nn.functional.cosine_similarity(whole[0], moved[kind][0], dim=0)) > 1 - apart


@given(st.integers(1, 600), st.integers(0, 2**31), st.sampled_from([optimizer.FIRST, optimizer.SECOND]))
def test_eight_bits_are_near_and_keep_signs_and_zeros(count: int, seed: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator) * 10 ** (-6 * torch.rand(count, generator=generator))
    values[::7] = 0
    values = values if levels == optimizer.FIRST else values.square()
    codes, tops = optimizer.pack_eight_bits(values, levels, noise_bits(values.shape, seed, values.device)[0])
    found = optimizer.unpack_eight_bits(codes, tops, levels)
    assert codes.dtype == torch.uint8
    assert torch.equal(found == 0, values == 0) or levels == optimizer.FIRST
    assert bool(((found == 0) | (found.sign() == values.sign())).all())
    smallest = tops.repeat_interleave(optimizer.BLOCK)[:count] * optimizer.sizes(levels, values.device)[1]
    assert bool(((found - values).abs() <= 0.0906 * values.abs() + smallest).all())


def test_eight_bits_are_right_on_average() -> None:
    values = torch.cat([torch.ones(1), torch.full((40000,), 0.0123)])
    for levels in (optimizer.FIRST, optimizer.SECOND):
        codes, tops = optimizer.pack_eight_bits(values, levels, noise_bits(values.shape, noise_key(1, 2), values.device)[0])
        found = optimizer.unpack_eight_bits(codes, tops, levels)
        assert len(set(found[1:256].tolist())) == 2
        assert float(found[1:256].mean()) == pytest.approx(0.0123, rel=0.01)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.gpu if torch.cuda.is_available() else lambda test: test
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16, torch.uint8])
def test_the_kernel_does_what_plain_torch_does(moments: torch.dtype) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    from sensorium.learner.optimizer import KernelTables

    generator = torch.Generator().manual_seed(0)
    sizes = (5000, 3, 40000)  # within a chunk of the kernel, within a block, several chunks
    starts = [torch.randn(size, generator=generator) for size in sizes]
    found, expected = (
        [ParameterState(Parameter(torch.zeros(n, dtype=torch.bfloat16, device=where)), 3 + n, moments) for n in sizes]
        for where in (device, "cpu")
    )
    rates = [RATES, replace(RATES, lr=1e-2, weight_decay=0.0), RATES]
    for tensor, start in zip(found + expected, starts * 2, strict=True):
        tensor.master = start.to(tensor.parameter.device)
    for _ in range(3):
        for one, other in zip(found, expected, strict=True):
            gradient = torch.randn(one.parameter.numel(), generator=generator)
            one.gradient, other.gradient = gradient.to(device), gradient.clone()
        tables = KernelTables(found, rates, torch.device(device))
        for one in found:
            one.steps += 1
        with torch.no_grad():
            tables.step(torch.tensor(0.5, device=device))
            step_all(expected, rates, torch.tensor(0.5))
    # A number at the edge of two roundings may be rounded otherwise by another log2 or another order of operations.
    close = {torch.float32: (1e-6, 1e-5), torch.bfloat16: (1e-4, 0.01), torch.uint8: (2e-3, 0.1)}
    allowed, step = close[moments]
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one.master.cpu(), other.master, rtol=1e-5, atol=allowed)
        assert float((one.master.cpu() - other.master).abs().mean()) < 1e-6
        for held, right in zip(one.read_moments(), other.read_moments(), strict=True):
            assert torch.allclose(held.cpu(), right, rtol=step, atol=1e-6)
        if moments != torch.float32:
            assert float((one.first.cpu() != other.first).float().mean()) < 1e-3
            assert float((one.second.cpu() != other.second).float().mean()) < 1e-3

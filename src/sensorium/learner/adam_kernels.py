"""AdamW over weights in halves as one Triton kernel: join, move, split. What ``adam`` and ``masters`` do in many passes."""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from sensorium.learner.adam import ParameterState, Rates
from sensorium.learner.masters import noise_key

BLOCK = 2048


def step_halves(tensor: ParameterState, rates: Rates, scale: Tensor) -> None:
    """One step of a bfloat16 tensor; its gradient is multiplied by ``scale`` on the way."""
    weight, remainder, gradient = tensor.parameter.detach(), tensor.remainder, tensor.gradient
    first, second = tensor.make_moments()
    assert remainder is not None
    assert gradient is not None
    assert all(part.is_contiguous() for part in (weight, gradient, remainder, first, second))
    halves = first.dtype == torch.bfloat16
    if halves:
        first, second = first.view(torch.int16), second.view(torch.int16)
    key = noise_key(tensor.steps, tensor.place)
    _adam[(triton.cdiv(weight.numel(), BLOCK),)](
        weight.view(torch.int16), remainder, gradient, first, second, scale.view(1), weight.numel(),
        1 - rates.lr * rates.weight_decay, rates.lr / (1 - rates.beta1**tensor.steps), rates.beta1, rates.beta2,
        (1 - rates.beta2**tensor.steps) ** -0.5, rates.eps, key - (1 << 32) if key >= 1 << 31 else key,
        HALVES=halves, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


@triton.jit
def _noise(place, key):
    x = place.to(tl.uint32) + key.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _widened(bits):
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _at_random(value, noise):
    return ((value.to(tl.int32, bitcast=True) + noise.to(tl.int32)) >> 16).to(tl.int16)


@triton.jit(do_not_specialize=["key"])
def _adam(
    weights, remainders, gradients, firsts, seconds, scale, count, kept, rate, beta1, beta2, root, eps, key,
    HALVES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    high = tl.load(weights + place, mask=inside, other=0).to(tl.int32) << 16
    master = (high + tl.load(remainders + place, mask=inside, other=0).to(tl.int32)).to(tl.float32, bitcast=True)
    gradient = tl.load(gradients + place, mask=inside, other=0.0) * tl.load(scale)
    first = tl.load(firsts + place, mask=inside, other=0)
    second = tl.load(seconds + place, mask=inside, other=0)
    if HALVES:
        first = _widened(first)
        second = _widened(second)
    first += (gradient - first) * (1 - beta1)
    second = second * beta2 + gradient * gradient * (1 - beta2)
    master = master * kept - rate * first / (tl.sqrt(second) * root + eps)
    if HALVES:
        noise = _noise(place, key)
        tl.store(firsts + place, _at_random(first, noise & 0xFFFF), mask=inside)
        tl.store(seconds + place, _at_random(second, noise >> 16), mask=inside)
    else:
        tl.store(firsts + place, first, mask=inside)
        tl.store(seconds + place, second, mask=inside)
    bits = master.to(tl.int32, bitcast=True)
    weight = (bits + 0x8000) >> 16
    tl.store(weights + place, weight.to(tl.int16), mask=inside)
    tl.store(remainders + place, (bits - (weight << 16)).to(tl.int16), mask=inside)

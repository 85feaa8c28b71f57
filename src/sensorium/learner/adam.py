"""AdamW on single tensors, however their numbers are held: float32, bfloat16 with a remainder, moments in 16 or 8 bits.

The arithmetic is torch's fused AdamW in float32. On CUDA with Triton the halves of all tensors are joined,
moved and split in one kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import Parameter

from sensorium.learner import eight_bits
from sensorium.learner.masters import join, noise_bits, noise_key, rounded_at_random, split
from sensorium.learner.shards import local_of

LARGE = 1 << 20
MOMENTS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "8-bit": torch.uint8}


@dataclass(frozen=True)
class Rates:
    """AdamW's settings for one step of a tensor."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class ParameterState:
    """A parameter that learns: its gradient, its moments, and its remainder where it is bfloat16.

    ``place`` is its number among the optimizer's tensors. Moments are made at the first step.
    """

    def __init__(self, parameter: Parameter, place: int, moments: torch.dtype) -> None:
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"weights of {parameter.dtype} cannot be trained; load them as float32 or bfloat16")
        self.parameter = parameter
        self.place = place
        self.steps = 0
        halved = parameter.dtype == torch.bfloat16
        self.remainder = torch.zeros_like(local_of(parameter), dtype=torch.int16) if halved else None
        self.first: Tensor | None = None
        self.second: Tensor | None = None
        self.tops: Tensor | None = None  # of moments in 8 bits: the largest value of each block, [2, blocks]
        self.fixed: tuple[int, ...] = ()  # addresses that the kernel has seen
        self._moments = moments
        self._sum: Tensor | None = None

    @property
    def gradient(self) -> Tensor | None:
        """The float32 gradient so far, of what this rank holds of the parameter."""
        if self.remainder is not None:
            return self._sum
        return None if self.parameter.grad is None else local_of(self.parameter.grad)

    @gradient.setter
    def gradient(self, gradient: Tensor | None) -> None:
        if self.remainder is None:
            self.parameter.grad = gradient
        else:
            self._sum, self.parameter.grad = None if gradient is None else local_of(gradient), None

    def gather(self) -> None:
        """Add a bfloat16 gradient to the float32 sum, and free it."""
        gradient = self.parameter.grad
        if self.remainder is not None and gradient is not None:
            self._sum = local_of(gradient).float() if self._sum is None else _added(self._sum, local_of(gradient))
            self.parameter.grad = None

    @property
    def master(self) -> Tensor:
        """The float32 weights that the optimizer updates; a copy where they are stored in two halves."""
        weight = local_of(self.parameter)
        return weight if self.remainder is None else join(weight, self.remainder)

    @master.setter
    def master(self, master: Tensor) -> None:
        assert self.remainder is not None, "a float32 parameter is its own master"
        weight, remainder = split(master)
        local_of(self.parameter).copy_(weight)
        self.remainder.copy_(remainder)

    def make_moments(self) -> tuple[Tensor, Tensor]:
        """Both moments as they are held, zero before the first step."""
        if self.first is None or self.second is None:
            like = local_of(self.parameter)
            self.first, self.second = (torch.zeros_like(like, dtype=self._moments) for _ in range(2))
            if self._moments == torch.uint8:
                self.tops = torch.zeros(2, eight_bits.blocks_of(like.numel()), device=like.device)
        return self.first, self.second

    def read_moments(self) -> tuple[Tensor, Tensor]:
        """Both moments in float32; copies, unless they are held so."""
        first, second = self.make_moments()
        if self.tops is None:
            return first.float(), second.float()
        unpack = eight_bits.unpack
        return unpack(first, self.tops[0], eight_bits.FIRST), unpack(second, self.tops[1], eight_bits.SECOND)

    def write_moments(self, first: Tensor, second: Tensor) -> None:
        """Hold float32 moments, rounded at random where they are held in fewer bits."""
        held = self.make_moments()
        if held[0].dtype == torch.float32:
            return  # they were changed in place
        noise = noise_bits(first.shape, noise_key(self.steps, self.place), first.device)
        for i, (value, bits) in enumerate(zip((first, second), noise, strict=True)):
            if self.tops is None:
                held[i].copy_(rounded_at_random(value, bits))
            else:
                codes, tops = eight_bits.pack(value, (eight_bits.FIRST, eight_bits.SECOND)[i], bits)
                held[i].copy_(codes)
                self.tops[i].copy_(tops)


class StepPlan:
    """One step of tensors whose gradients are there, up to the number that these are multiplied by.

    Made while a GPU still computes that number: it would wait for the host to lay out its tables.
    """

    def __init__(self, tensors: Sequence[ParameterState], rates: Sequence[Rates], device: torch.device) -> None:
        self._plain: dict[tuple[Rates, int, torch.device], list[ParameterState]] = {}
        self._tensors, self._tables = tensors, None
        halved: list[tuple[ParameterState, Rates]] = []
        for tensor, rate in zip(tensors, rates, strict=True):
            if _fits_kernel(tensor, device):
                halved.append((tensor, rate))
            else:
                self._plain.setdefault((rate, tensor.steps, tensor.parameter.device), []).append(tensor)
        if halved:
            from sensorium.learner.adam_kernels import HalvesTables

            self._tables = HalvesTables([tensor for tensor, _ in halved], [rate for _, rate in halved], device)

    def run(self, scale: Tensor) -> None:
        """Update the tensors by their gradients times ``scale``."""
        for tensor in self._tensors:
            tensor.steps += 1
        if self._tables is not None:
            self._tables.step(scale)
        for (rate, _, device), several in self._plain.items():  # offloaded tensors are in the machine's memory
            torch._foreach_mul_([_gradient(tensor) for tensor in several], scale.to(device))
            whole = [tensor for tensor in several if _is_whole(tensor)]
            for together in ([whole] if whole else []) + [[tensor] for tensor in several if not _is_whole(tensor)]:
                _step(together, rate)


def step_all(tensors: Sequence[ParameterState], rates: Sequence[Rates], scale: Tensor) -> None:
    """Update tensors by their gradients times ``scale``."""
    StepPlan(tensors, rates, scale.device).run(scale)


def _fits_kernel(tensor: ParameterState, device: torch.device) -> bool:
    halved = tensor.remainder is not None and tensor.parameter.is_cuda
    return halved and tensor.parameter.device == device and find_spec("triton") is not None


def _added(total: Tensor, gradient: Tensor) -> Tensor:
    """A bfloat16 gradient added to a float32 sum in place; on CUDA large ones by a kernel, in half of torch's time."""
    if gradient.is_cuda and gradient.numel() >= LARGE and gradient.is_contiguous() and find_spec("triton") is not None:
        from sensorium.learner.adam_kernels import add_gradient

        add_gradient(total, gradient)
        return total
    return total.add_(gradient)


def _is_whole(tensor: ParameterState) -> bool:
    """Whether everything is held in float32, so that a step needs no copies."""
    return tensor.remainder is None and tensor.make_moments()[0].dtype == torch.float32


def _gradient(tensor: ParameterState) -> Tensor:
    assert tensor.gradient is not None, "grad_norm has given every tensor a gradient"
    return tensor.gradient


def _step(tensors: Sequence[ParameterState], rates: Rates) -> None:
    """Update tensors that have taken the same number of steps."""
    masters = [tensor.master for tensor in tensors]
    wide = [tensor.read_moments() for tensor in tensors]
    torch._fused_adamw_(
        masters,
        [_gradient(tensor) for tensor in tensors],
        [first for first, _ in wide],
        [second for _, second in wide],
        [],
        [torch.tensor(float(tensors[0].steps), device=masters[0].device)] * len(tensors),
        lr=rates.lr,
        beta1=rates.beta1,
        beta2=rates.beta2,
        weight_decay=rates.weight_decay,
        eps=rates.eps,
        amsgrad=False,
        maximize=False,
    )
    for tensor, master, moments in zip(tensors, masters, wide, strict=True):
        tensor.write_moments(*moments)
        if tensor.remainder is not None:
            tensor.master = master

"""AdamW that updates weights as in float32, whatever dtype they are stored in; moments in 8 bits where asked."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from math import cos, pi
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from sensorium.learner.saved_state import is_sharded, local_of, part_for, spread_like
from sensorium.learner.team import ALONE, Team
from sensorium.models.segment_layout import sent_to
from sensorium.recipe.checks import EIGHT_BITS_APART
from sensorium.recipe.schema import OptimizerSection
from sensorium.vocabulary.errors import CheckpointError, RecipeError, nearest

#     block       0.5     -0.03125      0         the largest is 0.5
#     codes       127     128 + 95      0         eight codes are a factor of two: 0.5 · 2^((95 - 127) / 8) = 0.03125
#
# A first moment has a sign and 127 sizes, down to 2^-15.75 of the largest; a second moment 255 sizes, down to 2^-31.75,
# whose root goes as far. Neighbouring codes are 9 % apart, and a number between two becomes one of them at random, so that
# it is right on average and small changes add up. On a linear scale small numbers of a block would become 0 or far too
# large, and a step divides the one moment by the other's root. So a second moment that is not 0 never becomes 0.


BLOCK = 256
PER_OCTAVE = 8
FIRST, SECOND = 127, 255  # the codes of the largest value
SIGN = 128


def blocks_of(count: int) -> int:
    """Blocks of so many numbers."""
    return -(-count // BLOCK)


def pack_eight_bits(values: Tensor, levels: int, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Codes in the shape of the float32 values, and the largest of each block; ``noise`` is uniform in 0 … 65535."""
    blocks = _in_blocks(values.flatten())
    top_N1 = blocks.abs().amax(1, keepdim=True)
    share = blocks.abs() / top_N1.clamp(min=torch.finfo(torch.float32).tiny)
    below = (levels + PER_OCTAVE * share.log2()).floor().clamp(0, levels - 1)  # log2(0) is minus infinity
    scale = sizes(levels, values.device)
    low, high = scale[below.int()], scale[below.int() + 1]
    up = _in_blocks(noise.flatten()).float() < (share - low) / (high - low) * 65536
    codes = below.to(torch.uint8) + up.to(torch.uint8)
    if levels == SECOND:
        codes = torch.where(blocks > 0, codes.clamp(min=1), codes)
    else:
        codes = torch.where(blocks < 0, codes + SIGN, codes)
    return codes.flatten()[: values.numel()].view(values.shape), top_N1[:, 0]


def unpack_eight_bits(codes: Tensor, tops_N: Tensor, levels: int) -> Tensor:
    """Float32 values of codes."""
    blocks = _in_blocks(codes.flatten())
    size = blocks if levels == SECOND else blocks % SIGN
    values = sizes(levels, codes.device)[size.int()] * tops_N[:, None]
    if levels == FIRST:
        values = torch.where(blocks >= SIGN, -values, values)
    return values.flatten()[: codes.numel()].view(codes.shape)


def sizes(levels: int, device: torch.device) -> Tensor:
    """What the codes 0 … ``levels`` stand for, as shares of the largest value."""
    exponents = (torch.arange(levels + 1, dtype=torch.float64) - levels) / PER_OCTAVE
    shares = exponents.exp2()
    shares[0] = 0
    return shares.float().to(device)


def _in_blocks(flat: Tensor) -> Tensor:
    missing = -len(flat) % BLOCK
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, BLOCK)


#     master     0x3F80_8001   1.0039064…  what the optimizer moves
#     weight     0x3F81        1.0078125   the master rounded to bfloat16, ties away from zero: what the model computes with
#     remainder      -0x7FFF               master's bits minus the weight's, as 16 bits
#
# Weight and remainder together are the master, bit for bit, in half the memory of a copy. Ties go away from zero because
# to-even would leave 65,537 remainders: one more than 16 bits hold.


HALF = 0x8000
MASK = 0xFFFFFFFF


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """(weight as bfloat16, remainder as int16) of a float32 master."""
    bits = master.contiguous().view(torch.int32)
    weight = (bits + HALF) >> 16
    remainder = bits - (weight << 16)
    return weight.to(torch.int16).view(torch.bfloat16), remainder.to(torch.int16)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The float32 master of a weight and its remainder."""
    bits = (weight.contiguous().view(torch.int16).to(torch.int32) << 16) + remainder
    return bits.view(torch.float32)


def rounded_at_random(values: Tensor, noise: Tensor) -> Tensor:
    """Float32 values as bfloat16: up with the probability of the part that is cut off, so that small changes add up.

    ``noise`` is uniform in 0 … 65535. A decay of 0.001 a step is less than half of bfloat16's last bit: rounded to the
    nearest, a second moment would never fall.
    """
    return ((values.contiguous().view(torch.int32) + noise) >> 16).to(torch.int16).view(torch.bfloat16)


def noise_bits(shape: torch.Size, key: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two times 16 random bits for every element, a function of its place and ``key`` alone (int32)."""
    x = (torch.arange(shape.numel(), dtype=torch.int64, device=device) + (key & MASK)) & MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    x = (x ^ (x >> 16)).view(shape)
    return (x & 0xFFFF).to(torch.int32), (x >> 16).to(torch.int32)


def noise_key(step: int, place: int) -> int:
    """A key for one step of one tensor; keys of neighbours are far apart."""
    x = (step * 0x9E3779B1 + place * 0x85EBCA77 + 0x165667B1) & MASK
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & MASK
    return (x ^ (x >> 12)) & MASK


# The arithmetic is torch's fused AdamW in float32. On CUDA with Triton the halves of all tensors are joined, moved and
# split in one kernel.


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
            self._sum = local_of(gradient).float() if self._sum is None else self._sum.add_(local_of(gradient))
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
                self.tops = torch.zeros(2, blocks_of(like.numel()), device=like.device)
        return self.first, self.second

    def read_moments(self) -> tuple[Tensor, Tensor]:
        """Both moments in float32; copies, unless they are held so."""
        first, second = self.make_moments()
        if self.tops is None:
            return first.float(), second.float()
        unpack = unpack_eight_bits
        return unpack(first, self.tops[0], FIRST), unpack(second, self.tops[1], SECOND)

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
                codes, tops = pack_eight_bits(value, (FIRST, SECOND)[i], bits)
                held[i].copy_(codes)
                self.tops[i].copy_(tops)


class StepPlan:
    """One step of tensors whose gradients are there, up to the number that these are multiplied by.

    Made while a GPU still computes that number: it would wait for the host to lay out its tables.
    """

    def __init__(self, tensors: Sequence[ParameterState], rates: Sequence[Rates], device: torch.device) -> None:
        self._plain: dict[tuple[Rates, int, torch.device], list[ParameterState]] = {}
        self._tensors = tensors
        self._tables: KernelTables | None = None
        halved: list[tuple[ParameterState, Rates]] = []
        for tensor, rate in zip(tensors, rates, strict=True):
            if _fits_kernel(tensor, device):
                halved.append((tensor, rate))
            else:
                self._plain.setdefault((rate, tensor.steps, tensor.parameter.device), []).append(tensor)
        if halved:
            self._tables = KernelTables([tensor for tensor, _ in halved], [rate for _, rate in halved], device)

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


class KernelTables:
    """What ``learner_triton`` reads of the next step of bfloat16 tensors on one device, and the step."""

    def __init__(self, tensors: Sequence[ParameterState], rates: Sequence[Rates], device: torch.device) -> None:
        counts = tuple(tensor.gradient.numel() for tensor in tensors if tensor.gradient is not None)
        self._owners_C, firsts = _chunks(counts, device)
        known: dict[tuple[Rates, int], list[float]] = {}
        rows, settings = [], []
        for tensor, rate, count, first in zip(tensors, rates, counts, firsts, strict=True):
            steps = tensor.steps + 1
            rows.append([*_addresses(tensor), count, first, noise_key(steps, tensor.place)])
            key = (rate, steps)
            settings.append(known.get(key) or known.setdefault(key, _settings(*key)))
        self._weights = [tensor.parameter for tensor in tensors]
        self._bits = 8 * tensors[0].make_moments()[0].element_size()
        self._table = sent_to(device, torch.tensor(rows))
        self._numbers = sent_to(device, torch.tensor(settings, dtype=torch.float32))

    def step(self, scale: Tensor) -> None:
        """Move the weights; gradients are multiplied by ``scale`` on the way."""
        from sensorium.kernels.learner_triton import adam_step

        adam_step(self._owners_C, self._table, self._numbers, scale, self._bits)
        torch.autograd.graph.increment_version(self._weights)  # a kernel's writes are not counted by themselves


def _settings(rate: Rates, steps: int) -> list[float]:
    """The numbers of a step; 1 - 0.999 would be 5e-5 off in float32."""
    corrected = rate.lr / (1 - rate.beta1**steps), (1 - rate.beta2**steps) ** -0.5
    return [1 - rate.lr * rate.weight_decay, *corrected, 1 - rate.beta1, rate.beta2, 1 - rate.beta2, rate.eps]


def _addresses(tensor: ParameterState) -> list[int]:
    """Where weight, remainder, gradient, both moments and the largest values of their blocks are.

    All but the gradient stay where they are, unless somebody moves the weight: those are looked at once.
    """
    gradient = tensor.gradient
    assert gradient is not None
    assert gradient.is_contiguous()
    local = local_of(tensor.parameter)
    if tensor.fixed[:1] != (local.data_ptr(),):
        assert tensor.remainder is not None
        parts = (local, tensor.remainder, *tensor.make_moments())
        assert all(part.is_contiguous() and part.data_ptr() % 16 == 0 for part in parts)
        tops = (0, 0) if tensor.tops is None else tuple(part.data_ptr() for part in tensor.tops)
        tensor.fixed = (*(part.data_ptr() for part in parts), *tops)
    weight, remainder, *moments = tensor.fixed
    return [weight, remainder, gradient.data_ptr(), *moments]


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _chunks(counts: tuple[int, ...], device: torch.device) -> tuple[Tensor, list[int]]:
    """The tensor of every chunk, and every tensor's first chunk."""
    from sensorium.kernels.learner_triton import CHUNK

    chunks_N = -(-torch.tensor(counts) // CHUNK)
    owners_C = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), chunks_N)
    return owners_C.to(device), (chunks_N.cumsum(0) - chunks_N).tolist()


def step_all(tensors: Sequence[ParameterState], rates: Sequence[Rates], scale: Tensor) -> None:
    """Update tensors by their gradients times ``scale``."""
    StepPlan(tensors, rates, scale.device).run(scale)


def _fits_kernel(tensor: ParameterState, device: torch.device) -> bool:
    halved = tensor.remainder is not None and tensor.parameter.is_cuda
    return halved and tensor.parameter.device == device and find_spec("triton") is not None


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


# Float32 parameters are updated in place. A bfloat16 one is its float32 master, rounded: beside it stands the
# remainder, 16 bits, so the master is held exactly without a copy (``masters``). Gradients are summed over micro-
# batches in float32. (At a learning rate of 1e-6 a bfloat16 weight alone would not move at all.) ``optimizer.moments:
# bfloat16`` halves the moments, ``8-bit`` quarters them (``eight_bits``).


def rate_share(section: OptimizerSection, step: int, total: int) -> float:
    """The share of the learning rate at ``step`` (from 0): linear warm-up, then constant, linear or cosine to the end."""
    if step < section.warmup_steps:
        return (step + 1) / (section.warmup_steps + 1)
    if section.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - section.warmup_steps) / max(1, total - section.warmup_steps))
    left = 1 - progress if section.schedule == "linear" else 0.5 * (1 + cos(pi * progress))
    return section.final_lr_share + (1 - section.final_lr_share) * left


class Optimizer:
    """Trainable parameters by group, and their moments; those of ``freeze`` groups do not learn.

    ``adapted``: the parameters are adapters; their groups cannot be frozen, and no other has a rate.
    """

    def __init__(
        self,
        groups: Mapping[str, Mapping[str, Parameter]],
        section: OptimizerSection,
        freeze: Sequence[str] = (),
        *,
        where: str = "model",
        adapted: bool = False,
        team: Team = ALONE,
    ) -> None:
        _check_names(freeze, list(groups), f"{where}.freeze")
        _check_names(section.group_lr, list(groups), "optimizer.group_lr")
        if adapted:
            _check_adapted(groups, freeze, section)
        self._section, self._team = section, team
        self._tensors: dict[str, ParameterState] = {}
        self._rates: dict[str, float] = {}
        self._plan: StepPlan | None = None
        for group, named in groups.items():
            if group in freeze:
                continue
            for name, parameter in named.items():
                parameter.requires_grad_()
                if section.moments == "8-bit" and is_sharded(parameter):
                    raise RecipeError(EIGHT_BITS_APART)
                self._tensors[name] = ParameterState(parameter, len(self._tensors), MOMENTS[section.moments])
                self._rates[name] = section.group_lr.get(group, section.lr)
        if not self._tensors:
            raise RecipeError(f"{where}.freeze {list(freeze)} leaves nothing to train; freeze fewer groups.")

    def weights(self) -> dict[str, Tensor]:
        """The parameters that learn, as the model holds them."""
        return {name: tensor.parameter.detach() for name, tensor in self._tensors.items()}

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Inside, bfloat16 gradients are added to float32 sums as soon as a backward finds them, and freed."""
        handles = [
            tensor.parameter.register_post_accumulate_grad_hook(partial(_gather, tensor))
            for tensor in self._tensors.values()
            if tensor.remainder is not None
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def grad_norm(self) -> Tensor:
        """The norm of all gradients together. A parameter without gradient has gradient zero: its moments still count."""
        for tensor in self._tensors.values():
            if tensor.gradient is None:
                tensor.gradient = torch.zeros_like(tensor.parameter, dtype=torch.float32)
        shards: list[Tensor] = []
        whole: list[Tensor] = []
        for name, gradient in self.gradients().items():
            (shards if is_sharded(self._tensors[name].parameter) else whole).append(gradient)
        for gradient in whole:
            self._team.sum(gradient)  # those of shards were summed as they were found
        return self._team.norm(shards, whole)

    def not_finite(self) -> list[str]:
        """Names of parameters whose gradient is not finite."""
        bad = {name: float(not gradient.isfinite().all()) for name, gradient in self.gradients().items()}
        return [name for name, found in zip(bad, self._team.largest(*bad.values()), strict=True) if found]

    def prepare(self, share: float, norm: Tensor) -> None:
        """Lay out the step that may follow, at a share of every group's rate, without waiting for the norm."""
        section, (beta1, beta2) = self._section, self._section.betas
        rates = [
            Rates(self._rates[name] * share, beta1, beta2, section.eps, section.weight_decay * (tensor.parameter.dim() > 1))
            for name, tensor in self._tensors.items()
        ]  # matrices decay; norms and biases do not
        self._plan = StepPlan(list(self._tensors.values()), rates, norm.device)

    def step(self, share: float, norm: Tensor) -> None:
        """Update the weights by the clipped gradients of the given norm, at a share of every group's rate; clear them."""
        if self._plan is None:
            self.prepare(share, norm)
        assert self._plan is not None
        with torch.no_grad():
            self._plan.run((self._section.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        # Kernels write without raising torch's version counter, by which caches see that weights changed.
        torch.autograd.graph.increment_version([local_of(tensor.parameter) for tensor in self._tensors.values()])
        self.forget()

    def gradients(self) -> dict[str, Tensor]:
        """The float32 gradients gathered so far, by parameter name."""
        return {name: tensor.gradient for name, tensor in self._tensors.items() if tensor.gradient is not None}

    def masters(self) -> dict[str, Tensor]:
        """The float32 weights that the optimizer updates, by parameter name; copies where they are stored in two halves."""
        return {name: tensor.master for name, tensor in self._tensors.items()}

    def forget(self) -> None:
        """Drop all gradients, and a step that was laid out for them."""
        self._plan = None
        for tensor in self._tensors.values():
            tensor.gradient = None

    def state_dict(self) -> dict[str, Any]:
        """Moments by parameter name, and the remainders of parameters that are not float32."""
        remainders = {
            name: spread_like(tensor.remainder, tensor.parameter)
            for name, tensor in self._tensors.items()
            if tensor.remainder is not None
        }
        return {"moments": {name: _moments(tensor) for name, tensor in self._tensors.items()}, "remainders": remainders}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where ``state`` was taken; it must be of the same parameters and precision.

        The weights are already in place. States of older versions hold whole masters instead of remainders.
        """
        held = state["masters"] if "masters" in state else state["remainders"]
        halves = {name for name, tensor in self._tensors.items() if tensor.remainder is not None}
        if set(state["moments"]) != set(self._tensors) or set(held) != halves:
            strange = sorted(set(state["moments"]) ^ set(self._tensors))[:3] or ["the precision"]
            raise CheckpointError(
                f"the optimizer's state is of other parameters ({', '.join(strange)} differ); resume with the model, dtype "
                "and frozen groups of the checkpoint."
            )
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                if tensor.remainder is not None and "masters" in state:
                    tensor.master = part_for(held[name], tensor.parameter).to(tensor.parameter.device)
                elif tensor.remainder is not None:
                    tensor.remainder.copy_(part_for(held[name], tensor.parameter))
                moments = state["moments"][name]
                tensor.steps = int(moments["step"]) if moments else 0
                if moments:
                    first, second = tensor.make_moments()
                    if moments["exp_avg"].dtype != first.dtype or (tensor.tops is None) != ("tops" not in moments):
                        raise CheckpointError(
                            f"the optimizer's moments were saved as {_word(moments['exp_avg'])} and the recipe asks for "
                            f"{_word(first)}; set optimizer.moments as it was."
                        )
                    first.copy_(part_for(moments["exp_avg"], tensor.parameter))
                    second.copy_(part_for(moments["exp_avg_sq"], tensor.parameter))
                    if tensor.tops is not None:
                        tensor.tops.copy_(moments["tops"])


def _gather(tensor: ParameterState, _: Tensor) -> None:
    tensor.gather()


def _moments(tensor: ParameterState) -> dict[str, Tensor]:
    if tensor.first is None or tensor.second is None:
        return {}
    first, second = (spread_like(moment, tensor.parameter) for moment in (tensor.first, tensor.second))
    tops = {} if tensor.tops is None else {"tops": tensor.tops}
    return {"step": torch.tensor(float(tensor.steps)), "exp_avg": first, "exp_avg_sq": second, **tops}


def _word(tensor: Tensor) -> str:
    return next((word for word, dtype in MOMENTS.items() if dtype == tensor.dtype), str(tensor.dtype))


def _check_names(names: Any, known: list[str], where: str) -> None:
    for name in names:
        if name not in known:
            raise RecipeError(f"{where}: the model has no parameter group '{name}'{nearest(name, known)}")


def _check_adapted(groups: Mapping[str, Any], freeze: Sequence[str], section: OptimizerSection) -> None:
    adapted = [group for group, named in groups.items() if named]
    for group in freeze:
        if group in adapted:
            raise RecipeError(f"model.freeze: '{group}' is adapted by model.lora.groups; drop one of the two.")
    for group in section.group_lr:
        if group not in adapted:
            raise RecipeError(
                f"optimizer.group_lr: '{group}' has no adapters, so it does not learn; adapted are: {', '.join(adapted)}."
            )

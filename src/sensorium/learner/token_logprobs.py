"""Log-probs and entropies of tokens from logits, with gradients: in torch, and in C for float32 on a CPU.

The policy is softmax(logits / temperature + bias); forbidden ids have the bias ``FORBIDDEN``. Axes: M tokens, V vocabulary.
"""

from ctypes import Structure, c_double
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from sensorium.compiled.calls import addresses, call, pointers, sizes, threads_for
from sensorium.compiled.library import NoLibrary
from sensorium.models.fast_paths import fall_back, largest_gap, trying, without_compiled_parts

# Stands for minus infinity, but makes 0 when multiplied by a probability of 0.
FORBIDDEN = -1e30
# Numbers that are worth a thread.
NUMBERS_OF_A_THREAD = 1 << 14
# How far what C gives may be from what torch gives, relative to the largest.
BOUND = 1e-5


class TokenLogprobs(torch.autograd.Function):
    """(logits, targets) → log-probs of the targets and entropies, keeping nothing but the probabilities."""

    @staticmethod
    def forward(
        ctx: Any, logits_MV: Tensor, targets_M: Tensor, bias_V: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        scaled_MV = torch.add(bias_V, logits_MV, alpha=1 / temperature)
        scaled_MV -= scaled_MV.amax(1, keepdim=True)
        chosen_M = scaled_MV.gather(1, targets_M[:, None])[:, 0]
        probs_MV = scaled_MV.exp()
        sums_M = probs_MV.sum(1)
        logs_M = sums_M.log()
        probs_MV /= sums_M[:, None]
        entropies_M = logs_M - scaled_MV.mul_(probs_MV).sum(1)
        ctx.temperature = temperature
        ctx.save_for_backward(probs_MV, targets_M, entropies_M)
        ctx.set_materialize_grads(False)
        return chosen_M - logs_M, entropies_M

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        probs_MV, targets_M, entropies_M = ctx.saved_tensors
        logprobs_M, entropy_M = gradients
        result_MV = None
        if logprobs_M is not None:
            result_MV = probs_MV * (-logprobs_M / ctx.temperature)[:, None]
            result_MV.scatter_add_(1, targets_M[:, None], (logprobs_M / ctx.temperature)[:, None])
        if entropy_M is not None:
            slope_MV = _entropy_gradient(probs_MV, entropies_M, entropy_M / ctx.temperature)
            result_MV = slope_MV if result_MV is None else result_MV.add_(slope_MV)
        return result_MV, None, None, None


class _CTokenProbs(Structure):
    """``struct token_probs`` of head.c."""

    _fields_: ClassVar = [
        *sizes("rows vocab"),
        ("scale", c_double),
        *pointers("logits bias targets probs logprobs entropies largest"),
    ]


class _CTokenGradients(Structure):
    """``struct token_gradients``."""

    _fields_: ClassVar = [
        *sizes("rows vocab"),
        ("scale", c_double),
        *pointers("probs gradient targets out"),
    ]


class CompiledLogprobs(torch.autograd.Function):
    """The same in two passes over memory, and the largest size of a scaled logit of each row."""

    @staticmethod
    def forward(
        ctx: Any, logits_MV: Tensor, targets_M: Tensor, bias_V: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits_MV, targets_M = logits_MV.contiguous(), targets_M.contiguous()
        least, most = torch.stack(targets_M.aminmax()).tolist() if len(targets_M) else (0, 0)
        if least < 0 or most >= logits_MV.shape[1]:
            raise IndexError(f"a target of {least} … {most} is none of the {logits_MV.shape[1]} ids of the vocabulary")
        probs_MV, found_3M = torch.empty_like(logits_MV), logits_MV.new_empty(3, len(logits_MV))
        tensors = (logits_MV, bias_V, targets_M, probs_MV, *found_3M)
        _run("token_probs", _CTokenProbs, logits_MV, temperature, *tensors)
        logprobs_M, entropies_M, sizes_M = found_3M.unbind()
        ctx.temperature = temperature
        ctx.save_for_backward(probs_MV, targets_M, entropies_M)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(sizes_M)
        return logprobs_M, entropies_M, sizes_M

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        probs_MV, targets_M, entropies_M = ctx.saved_tensors
        logprobs_M, entropy_M = gradients[:2]
        result_MV = None
        if logprobs_M is not None:
            result_MV = torch.empty_like(probs_MV)
            tensors = (probs_MV, logprobs_M.contiguous(), targets_M, result_MV)
            _run("token_gradients", _CTokenGradients, probs_MV, ctx.temperature, *tensors)
        if entropy_M is not None:
            slope_MV = _entropy_gradient(probs_MV, entropies_M, entropy_M / ctx.temperature)
            result_MV = slope_MV if result_MV is None else result_MV.add_(slope_MV)
        return result_MV, None, None, None


@cache
def compiled_logprobs_are_right() -> bool:
    """Whether C gives what torch gives, values and gradients; what is wrong is said once."""
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(11, 37, generator=generator)
    bias, targets = torch.zeros(37), torch.randint(0, 30, (11,), generator=generator)
    bias[30:] = FORBIDDEN
    pulls = torch.randn(2, 11, generator=generator).unbind()
    results = []
    try:
        with trying():
            for way in (TokenLogprobs, CompiledLogprobs):
                entered = logits.clone().requires_grad_()
                out = way.apply(entered, targets, bias, 0.7)[:2]
                results.append([*(found.detach() for found in out), *torch.autograd.grad(out, entered, pulls)])
    except NoLibrary as error:
        without_compiled_parts(str(error))
        return False
    expected, found = results
    gap = largest_gap(found, expected)
    if not gap <= BOUND:
        fall_back(f"log-probs are computed without their compiled way, which is slower: it is {gap:.2g} off the plain one")
    return gap <= BOUND


def _entropy_gradient(probs_MV: Tensor, entropies_M: Tensor, pull_M: Tensor) -> Tensor:
    """dH/dz = -p·(log p + H), pulled."""
    slope_MV = torch.xlogy(probs_MV, probs_MV).addcmul_(probs_MV, entropies_M[:, None])
    return slope_MV.mul_(-pull_M[:, None])


def _run(name: str, kind: Any, rows_MV: Tensor, temperature: float, *tensors: Tensor) -> None:
    given = kind(*rows_MV.shape, 1 / temperature, *addresses(*tensors))
    call(name, given, threads_for(rows_MV.numel(), NUMBERS_OF_A_THREAD))

"""The head in chunks (log-probs and entropies of some rows at a time), and merging of attention, as Triton kernels."""

# mypy: disable-error-code="no-untyped-def"
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# mypy: disable-error-code="no-untyped-def"


# The backward pass computes each chunk's logits again and turns them into gradients in one kernel; the head's own gradient
# is summed over chunks in float32. Axes: M predicted tokens, V vocabulary, H hidden size.


ROWS = 2048  # rows of a chunk: 1.2 GiB of logits for a vocabulary of 151,936
BLOCK = 4096


class HeadLogprobs(torch.autograd.Function):
    """(hidden, weight, targets, bias, temperature) → log-probs of the targets, and entropies, in float32."""

    @staticmethod
    def forward(
        ctx: Any, hidden_MH: Tensor, weight_VH: Tensor, targets_M: Tensor, bias_V: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        tops_M, sums_M, entropies_M, chosen_M = torch.empty(
            4, len(hidden_MH), dtype=torch.float32, device=hidden_MH.device
        ).unbind()
        for start in range(0, len(hidden_MH), ROWS):
            part = slice(start, start + ROWS)
            logits_RV = _logits(hidden_MH[part], weight_VH)
            _rows[(len(logits_RV),)](
                logits_RV, bias_V, targets_M[part], tops_M[part], sums_M[part], entropies_M[part], chosen_M[part],
                1 / temperature, VOCAB=weight_VH.shape[0], BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip
        ctx.temperature = temperature
        ctx.save_for_backward(hidden_MH, weight_VH, targets_M, bias_V, tops_M, sums_M, entropies_M)
        ctx.set_materialize_grads(False)
        return chosen_M - tops_M - sums_M.log(), entropies_M.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_MH, weight_VH, targets_M, bias_V, tops_M, sums_M, entropies_M = ctx.saved_tensors
        zeros_M = torch.zeros_like(tops_M)
        logprobs_M, entropy_M = (zeros_M if each is None else each.contiguous() for each in gradients)
        hidden_gradient = torch.empty_like(hidden_MH)
        weight_gradient = torch.zeros_like(weight_VH, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden_MH), ROWS):
            part = slice(start, start + ROWS)
            logits_RV = _logits(hidden_MH[part], weight_VH)
            slopes_RV = torch.empty_like(logits_RV, dtype=hidden_MH.dtype)
            _slopes[(len(logits_RV), triton.cdiv(weight_VH.shape[0], BLOCK))](
                logits_RV, bias_V, targets_M[part], tops_M[part], sums_M[part], entropies_M[part], logprobs_M[part],
                entropy_M[part], slopes_RV, 1 / ctx.temperature, VOCAB=weight_VH.shape[0], BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip
            torch.mm(slopes_RV, weight_VH, out=hidden_gradient[part])
            if weight_gradient is not None:
                _add_product(weight_gradient, slopes_RV.T, hidden_MH[part])
        weight_part = None if weight_gradient is None else weight_gradient.to(weight_VH.dtype)
        return hidden_gradient, weight_part, None, None, None


def _logits(hidden_RH: Tensor, weight_VH: Tensor) -> Tensor:
    if hidden_RH.dtype == torch.float32:
        return hidden_RH @ weight_VH.T
    return torch.mm(hidden_RH, weight_VH.T, out_dtype=torch.float32)


def _add_product(sums: Tensor, first: Tensor, second: Tensor) -> None:
    """sums += first · second, in float32 throughout."""
    if first.dtype == torch.float32:
        sums.addmm_(first, second)
    else:
        torch.ops.aten.addmm.dtype_out(sums, first, second, torch.float32, out=sums)


@triton.jit
def _scaled(logits, bias, row, place, inverse, VOCAB: tl.constexpr):
    inside = place < VOCAB
    x = tl.load(logits + row * VOCAB + place, mask=inside, other=float("-inf"))
    return x * inverse + tl.load(bias + place, mask=inside, other=0.0)


@triton.jit
def _rows(
    logits, bias, targets, tops, sums, entropies, chosen, inverse, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Of every row: the largest scaled logit, the sum of exponentials below it, the entropy, the target's logit."""
    row = tl.program_id(0).to(tl.int64)
    top = float("-inf")
    mass = 0.0
    moment = 0.0  # sum of exp(z - top) · (z - top)
    for start in range(0, VOCAB, BLOCK):
        place = start + tl.arange(0, BLOCK)
        x = _scaled(logits, bias, row, place, inverse, VOCAB)
        higher = tl.maximum(top, tl.max(x, 0))
        kept = tl.exp(top - higher)
        moment = tl.where(mass > 0, (moment + (top - higher) * mass) * kept, 0.0)
        mass = mass * kept
        shifted = x - higher
        weight = tl.exp(shifted)
        mass += tl.sum(weight, 0)
        moment += tl.sum(tl.where(weight > 0, weight * shifted, 0.0), 0)
        top = higher
    target = tl.load(targets + row)
    tl.store(tops + row, top)
    tl.store(sums + row, mass)
    tl.store(entropies + row, tl.log(mass) - moment / mass)
    tl.store(chosen + row, tl.load(logits + row * VOCAB + target) * inverse + tl.load(bias + target))


@triton.jit
def _slopes(
    logits, bias, targets, tops, sums, entropies, logprob_gradients, entropy_gradients, out, inverse,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of the logits: of a log-prob (1 at the target) - p, of an entropy -p · (log p + entropy)."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = _scaled(logits, bias, row, place, inverse, VOCAB)
    mass = tl.load(sums + row)
    log_p = x - tl.load(tops + row) - tl.log(mass)
    p = tl.exp(log_p)
    slope = tl.load(logprob_gradients + row) * (tl.where(place == tl.load(targets + row), 1.0, 0.0) - p)
    bent = tl.where(p > 0, p * (log_p + tl.load(entropies + row)), 0.0)
    slope -= tl.load(entropy_gradients + row) * bent
    tl.store(out + row * VOCAB + place, (slope * inverse).to(out.dtype.element_ty), mask=place < VOCAB)

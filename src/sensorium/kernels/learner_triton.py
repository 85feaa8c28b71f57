"""The head in chunks (log-probs and entropies of some rows at a time), and AdamW over all tensors, as Triton kernels."""

# mypy: disable-error-code="no-untyped-def"
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

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


# AdamW: what ``learner/optimizer.py`` does in many passes over each tensor. A model has some 800 tensors; a launch for each
# would take the host longer than the work takes the GPU. So the kernel finds its tensors in a table:
#
#     tensor                     0 (40,000 numbers)   1 (20,000)
#     owners, one a chunk        0 0 0                1 1          a program takes a chunk of 16,384 numbers
#     row of the table           addresses of weight, remainder, gradient, both moments and what 8-bit ones are measured by;
#                                count; first chunk; noise key


NUMBERS, TIMES = 2048, 8  # at a time, and how often a program takes so many
CHUNK = NUMBERS * TIMES


def adam_step(owners_C: Tensor, table: Tensor, numbers: Tensor, scale: Tensor, bits: int) -> None:
    """Move the weights of the table's tensors; gradients are multiplied by ``scale``, moments have so many bits."""
    _adam[(len(owners_C),)](owners_C, table, numbers, scale.view(1), BITS=bits, BLOCK=NUMBERS, BLOCKS=TIMES, num_warps=8)


@triton.jit
def _noise(place, key):
    x = place.to(tl.uint32) + key.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _widened(bits):
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _at_random(value, noise):
    return ((value.to(tl.int32, bitcast=True) + noise.to(tl.int32)) >> 16).to(tl.int16)


@triton.jit
def _shorts_at(address):
    """A tensor of 16 bits at an address; torch aligns what it allocates."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(tl.int16)), 16)


@triton.jit
def _floats_at(address):
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def _read(pointer, place, count, WHOLE: tl.constexpr):
    if WHOLE:  # no mask: a count that is not known to be even would split the loads
        found = tl.load(pointer + place)
    else:
        found = tl.load(pointer + place, mask=place < count, other=0)
    return found


@triton.jit
def _write(pointer, place, value, count, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(pointer + place, value)
    else:
        tl.store(pointer + place, value, mask=place < count)


@triton.jit
def _size(code, LEVELS: tl.constexpr):
    """What a code stands for, as a share of its block's largest value (``sizes``)."""
    return tl.where(code > 0, tl.exp2((code - LEVELS).to(tl.float32) * 0.125), 0.0)


@triton.jit
def _unpacked(codes, tops, begin, count, BLOCK: tl.constexpr, LEVELS: tl.constexpr):
    """``unpack_eight_bits`` of a block."""
    wide = codes.to(tl.int32)
    code = wide % 128 if LEVELS == 127 else wide
    place = tl.arange(0, BLOCK)
    top = tl.load(tops + (begin // 256 + place // 256), mask=begin + place < count, other=0.0)
    value = _size(code, LEVELS) * top
    if LEVELS == 127:
        value = tl.where(wide >= 128, -value, value)
    return value


@triton.jit
def _packed(value, noise, tops, begin, count, BLOCK: tl.constexpr, LEVELS: tl.constexpr):
    """``pack_eight_bits`` of a block; the largest values are written."""
    size = tl.abs(value)
    top_R = tl.max(tl.reshape(size, (BLOCK // 256, 256)), 1)
    r = tl.arange(0, BLOCK // 256)
    tl.store(tops + begin // 256 + r, top_R, mask=begin + r * 256 < count)
    top = tl.reshape(tl.broadcast_to(top_R[:, None], (BLOCK // 256, 256)), (BLOCK,))
    share = size / tl.maximum(top, 1.1754943508222875e-38)
    place = tl.floor(LEVELS + 8.0 * tl.log2(tl.maximum(share, 1e-30)))
    below = tl.minimum(tl.maximum(place, 0.0), LEVELS - 1.0).to(tl.int32)
    low = _size(below, LEVELS)
    high = _size(below + 1, LEVELS)
    code = below + (noise.to(tl.float32) < (share - low) / (high - low) * 65536).to(tl.int32)
    if LEVELS == 127:
        code = tl.where(value < 0, code + 128, code)
    else:
        code = tl.where(value > 0, tl.maximum(code, 1), code)
    return code.to(tl.uint8)


@triton.jit
def _step_block(
    weights, remainders, gradients, firsts, seconds, first_tops, second_tops, begin, place, count, scale, key, kept, rate,
    root, new1, beta2, new2, eps,
    BITS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    high = _read(weights, place, count, WHOLE).to(tl.int32) << 16
    master = (high + _read(remainders, place, count, WHOLE).to(tl.int32)).to(tl.float32, bitcast=True)
    gradient = _read(gradients, place, count, WHOLE) * scale
    first = _read(firsts, place, count, WHOLE)
    second = _read(seconds, place, count, WHOLE)
    if BITS == 16:
        first = _widened(first)
        second = _widened(second)
    elif BITS == 8:
        first = _unpacked(first, first_tops, begin, count, BLOCK, 127)
        second = _unpacked(second, second_tops, begin, count, BLOCK, 255)
    first += (gradient - first) * new1
    second = second * beta2 + gradient * gradient * new2
    master = master * kept - rate * first / (tl.sqrt(second) * root + eps)
    if BITS == 32:
        _write(firsts, place, first, count, WHOLE)
        _write(seconds, place, second, count, WHOLE)
    else:
        noise = _noise(place, key)
        if BITS == 16:
            _write(firsts, place, _at_random(first, noise & 0xFFFF), count, WHOLE)
            _write(seconds, place, _at_random(second, noise >> 16), count, WHOLE)
        else:
            _write(firsts, place, _packed(first, noise & 0xFFFF, first_tops, begin, count, BLOCK, 127), count, WHOLE)
            _write(seconds, place, _packed(second, noise >> 16, second_tops, begin, count, BLOCK, 255), count, WHOLE)
    bits = master.to(tl.int32, bitcast=True)
    weight = (bits + 0x8000) >> 16
    _write(weights, place, weight.to(tl.int16), count, WHOLE)
    _write(remainders, place, (bits - (weight << 16)).to(tl.int16), count, WHOLE)


@triton.jit
def _adam(owners, table, settings, scale, BITS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    chunk = tl.program_id(0)
    owner = tl.load(owners + chunk)
    row = table + owner * 10
    weights = _shorts_at(row)
    remainders = _shorts_at(row + 1)
    gradients = _floats_at(row + 2)
    if BITS == 8:
        firsts = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(tl.uint8)), 16)
        seconds = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(tl.uint8)), 16)
    elif BITS == 16:
        firsts = _shorts_at(row + 3)
        seconds = _shorts_at(row + 4)
    else:
        firsts = _floats_at(row + 3)
        seconds = _floats_at(row + 4)
    first_tops = tl.load(row + 5).to(tl.pointer_type(tl.float32))
    second_tops = tl.load(row + 6).to(tl.pointer_type(tl.float32))
    count = tl.load(row + 7)
    key = tl.load(row + 9)
    start = (chunk - tl.load(row + 8)) * (BLOCK * BLOCKS)
    own = settings + owner * 7
    kept = tl.load(own)
    rate = tl.load(own + 1)
    root = tl.load(own + 2)
    new1 = tl.load(own + 3)
    beta2 = tl.load(own + 4)
    new2 = tl.load(own + 5)
    eps = tl.load(own + 6)
    clip = tl.load(scale)
    for block in range(BLOCKS):
        begin = start + block * BLOCK
        place = begin + tl.arange(0, BLOCK)
        if begin + BLOCK <= count:
            _step_block(
                weights, remainders, gradients, firsts, seconds, first_tops, second_tops, begin, place, count, clip, key,
                kept, rate, root, new1, beta2, new2, eps, BITS, BLOCK, True,
            )  # fmt: skip
        elif begin < count:
            _step_block(
                weights, remainders, gradients, firsts, seconds, first_tops, second_tops, begin, place, count, clip, key,
                kept, rate, root, new1, beta2, new2, eps, BITS, BLOCK, False,
            )  # fmt: skip

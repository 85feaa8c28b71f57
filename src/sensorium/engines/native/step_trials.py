"""Inputs of ``steps.feed`` and ``steps.draw`` on which faster ways to compute them are tried before they are used."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sensorium.engines.native.recording import Inputs
from sensorium.engines.native.sampler import SamplingRows
from sensorium.engines.protocol import Sampling

SIZES = ((3, 5), (1, 2), (18, 9))
"""Rows and cache entries of a batch that is tried."""
FEED_BOUND = 1e-5
"""Of the largest logit, key or value."""
DRAW_BOUND = 1e-6
KINDS = (Sampling(), Sampling(temperature=0.6), Sampling(temperature=0.0), Sampling(stop_tokens=False), Sampling(top_k=5),
         Sampling(top_p=0.7))  # fmt: skip


def feed_trial(block: Tensor, rows: int, reach: int) -> Inputs:
    """Inputs of ``feed`` for so many rows, with a small cache of their own."""
    layers, two, _, kv_heads, _, size = block.shape
    shape = (layers, two, rows, kv_heads, reach, size)
    small = torch.linspace(-1, 1, math.prod(shape), dtype=block.dtype).view(shape)
    tokens_B, positions_B = torch.arange(rows) + 7 * (rows % 32), torch.arange(rows) + reach
    write_N = torch.arange(rows * kv_heads) * reach + reach - 1
    return tokens_B, positions_B, small, write_N, block.new_zeros(rows, 1, 1, reach)


def feeds_differ(plain: Callable[..., Tensor], other: Callable[..., Tensor], block: Tensor, vocab_size: int) -> str:
    """What is wrong with another way to feed, if anything is."""
    for rows, reach in SIZES:
        trial = feed_trial(block, rows, reach)
        trial = (trial[0] % vocab_size, *trial[1:])
        one, two = (tuple(tensor.clone() for tensor in trial) for _ in range(2))
        for expected, found in ((plain(*one), other(*two)), (one[2], two[2])):
            scale = float(expected.nan_to_num().abs().max())
            if not torch.allclose(found, expected, rtol=0, atol=FEED_BOUND * scale, equal_nan=True):
                return f"on a trial of {rows} rows it differs from the model by {float((found - expected).abs().max()):.1e}"
    return ""


def draws_differ(plain: Callable[..., Tensor], other: Callable[..., Tensor], block: Tensor, vocab_size: int) -> str:
    """What is wrong with another way to draw, if anything is."""
    rows, kv_heads, reach = len(KINDS), block.shape[3], 4
    logits_BV = 4 * torch.sin(torch.arange(rows * vocab_size).view(rows, -1) * 1.7)
    forbidden_F, stop_S = torch.tensor([0]), torch.tensor([int(logits_BV[3, 1:].argmax()) + 1])
    sampling = SamplingRows.of(KINDS, forbidden_F, stop_S, vocab_size)
    uniforms_B = (torch.arange(rows, dtype=torch.float64) + 0.5) / rows
    write_N = torch.arange(rows * kv_heads) * reach + reach - 2
    see_B, bias_B11S = torch.arange(rows) * reach + reach - 2, block.new_full((rows, 1, 1, reach), -torch.inf)
    moved = (torch.zeros_like(see_B), torch.arange(rows), write_N, see_B, bias_B11S)
    one, two = (tuple(tensor.clone() for tensor in moved) for _ in range(2))
    expected, found = plain(sampling, logits_BV, uniforms_B, *one), other(sampling, logits_BV, uniforms_B, *two)
    if not torch.equal(found[0], expected[0]) or not torch.allclose(found, expected, rtol=0, atol=DRAW_BOUND):
        return f"on a trial it draws the tokens {found[0].tolist()}, and the sampler {expected[0].tolist()}"
    return "" if all(torch.equal(a, b) for a, b in zip(one, two, strict=True)) else "it does not move rows on as it should"


def writes_differ(
    feed: Callable[..., Tensor], draw: Callable[..., Tensor], write: Callable[..., Tensor], block: Tensor, vocab_size: int
) -> str:
    """What is wrong with steps that are made at once, if anything is: they are those one by one, bit for bit."""
    (rows, reach), steps = SIZES[0], 2
    none = torch.empty(0, dtype=torch.int64)
    sampling = SamplingRows.of([Sampling()] * rows, none, none, vocab_size)
    uniforms_TB = (torch.arange(steps * rows, dtype=torch.float64).view(steps, rows) + 0.5) / (steps * rows)
    tokens_B, positions_B, cache, write_N, bias_B11S = feed_trial(block, rows, reach)
    state = (cache, tokens_B % vocab_size, positions_B, write_N - steps, torch.arange(rows) * reach + reach - 1 - steps,
             bias_B11S)  # fmt: skip
    (one, *ones), (two, *twos) = ([tensor.clone() for tensor in state] for _ in range(2))
    single = []
    for uniforms_B in uniforms_TB:
        tokens_B, positions_B, write_N, _, bias_B11S = ones
        single.append(draw(sampling, feed(tokens_B, positions_B, one, write_N, bias_B11S), uniforms_B, *ones))
    found_T3B = write(sampling, two, uniforms_TB, torch.ones(rows, dtype=torch.uint8), *twos)
    pairs = zip((torch.stack(single), one, *ones), (found_T3B, two, *twos), strict=True)
    same = all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in pairs)
    return "" if same else "steps that are made at once differ from those one by one"

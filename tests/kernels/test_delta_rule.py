"""The gated delta rule: the gradient of the decay that stands in for a wrong kernel, and the trial on a GPU; and what lies
around the rule, by kernels. On a CPU in Triton's interpreter."""

from importlib.util import find_spec
from math import log

import pytest
import torch
from torch import Tensor

from sensorium.kernels.delta_rule import BOUND, decay_gradient, trial

SIZE, HEADS = 4, 3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
gpu_too = pytest.mark.gpu if DEVICE.type == "cuda" else lambda test: test
with_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def chunk(query: Tensor, key: Tensor, value: Tensor, summed: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """What a chunk reads, and the state after it: [C, G, V] and [G, K, V], from corrected values."""
    seen = torch.einsum("igk,jgk->gij", query, key) * torch.exp2(summed.T[:, :, None] - summed.T[:, None]).tril()
    out = torch.exp2(summed)[..., None] * torch.einsum("cgk,gkv->cgv", query, state)
    out = out + torch.einsum("gij,jgv->igv", seen, value)
    weighted = key * torch.exp2(summed[-1] - summed)[..., None]
    return out, torch.exp2(summed[-1])[:, None, None] * state + torch.einsum("cgk,cgv->gkv", weighted, value)


@pytest.mark.parametrize("runs", [None, (4, 1, 7, 3)])
@pytest.mark.parametrize("value_first", [False, True])
def test_gradient_of_the_decay_is_that_of_the_chunks(runs: tuple[int, ...] | None, value_first: bool) -> None:
    torch.manual_seed(0)
    rows, lengths = (2, (6, 6)) if runs is None else (1, runs)
    tokens = sum(lengths)
    query, key = torch.randn(2, tokens, HEADS, 5, dtype=torch.float64).requires_grad_()
    value, summed = torch.randn(tokens, HEADS, 2, dtype=torch.float64), -torch.rand(tokens, HEADS, dtype=torch.float64)
    summed.requires_grad_()
    pieces, index = [], []
    for run, length in enumerate(lengths):
        first = sum(lengths[:run])
        for i, start in enumerate(range(first, first + length, SIZE)):
            pieces.append(slice(start, min(start + SIZE, first + length)))
            index.append((run, i))
    states, pulls = torch.randn(2, len(pieces), HEADS, 5, 2, dtype=torch.float64)
    objective = torch.zeros((), dtype=torch.float64)
    for piece, state, pull in zip(pieces, states, pulls, strict=True):
        out, after = chunk(query[piece], key[piece], value[piece], summed[piece], state)
        objective = objective + out.sin().sum() + (after * pull).sum()
    of_query, of_key, expected = torch.autograd.grad(objective, (query, key, summed))

    def laid(x: Tensor) -> Tensor:
        return x.detach().view(rows, tokens // rows, *x.shape[1:])

    turned = [x.view(rows, -1, *x.shape[1:]) for x in (states, pulls)]
    found, *_ = decay_gradient(
        (laid(query), laid(of_query)), (laid(key), laid(of_key)), laid(value), laid(summed),
        *(x.transpose(-1, -2).contiguous() if value_first else x for x in turned), value_first, SIZE,
        None if runs is None else torch.tensor([0, *torch.tensor(lengths).cumsum(0)]),
        None if runs is None else torch.tensor(index),
    )  # fmt: skip
    torch.testing.assert_close(found.double(), laid(expected) / log(2), rtol=1e-5, atol=1e-5)


@gpu_too
@with_triton
@pytest.mark.parametrize("runs", [None, (4, 1, 7, 3)])
@pytest.mark.parametrize("value_first", [False, True])
def test_the_kernel_gives_the_gradient_of_the_decay(runs: tuple[int, ...] | None, value_first: bool) -> None:
    """Two value heads share a key head; sizes and chunks are no powers of two."""
    from sensorium.kernels import delta_triton

    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    rows, size, heads, groups, key_size, value_size = (2 if runs is None else 1), 5, 3, 6, 20, 12
    tokens, chunks, ends, index = 12, 6, None, None
    if runs is not None:
        index = torch.tensor([(run, i) for run, length in enumerate(runs) for i in range(-(-length // size))]).to(DEVICE)
        ends = torch.tensor([0, *torch.tensor(runs).cumsum(0)]).to(DEVICE)
        tokens, chunks = sum(runs), len(index)
    query, key = ((normal(rows, tokens, heads, key_size), normal(rows, tokens, groups, key_size)) for _ in range(2))
    state = (rows, chunks // rows, groups, *((value_size, key_size) if value_first else (key_size, value_size)))
    given = (
        query, key, normal(rows, tokens, groups, value_size), -normal(rows, tokens, groups).abs(), normal(*state),
        normal(*state), value_first, size, ends, index,
    )  # fmt: skip
    for found, right in zip(delta_triton.decay_gradient(*given), decay_gradient(*given), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("fla") is None, reason="flash-linear-attention is not installed")
@pytest.mark.parametrize("heads", [(16, 32, 128, 128), (2, 4, 32, 32)])
def test_fast_form_gives_results_and_gradients_of_the_reference(heads: tuple[int, int, int, int]) -> None:
    assert trial(torch.device("cuda"), torch.bfloat16, *heads) <= BOUND

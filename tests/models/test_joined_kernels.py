"""Kernels over products that were joined give what the parts give. Without a GPU: in Triton's interpreter."""

from importlib.util import find_spec

import pytest
import torch
from torch.nn.functional import silu

from sensorium.kernels import layer_ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
gpu_too = pytest.mark.gpu if DEVICE == "cuda" else lambda test: test


@gpu_too
@needs_triton
@pytest.mark.parametrize(("rows", "size"), [(1, 20), (70, 300)])
def test_a_gate_beside_its_up(rows: int, size: int) -> None:
    from sensorium.kernels.layer_triton import gate_pair_gradients, gated_pair

    generator = torch.Generator().manual_seed(0)
    both = torch.randn(rows, 2 * size, generator=generator).to(DEVICE).requires_grad_()
    given = torch.randn(rows, size, generator=generator).to(DEVICE)
    gate, up = both.chunk(2, 1)
    expected = silu(gate) * up
    (gradient,) = torch.autograd.grad(expected, both, given)
    found, sums, inner = gate_pair_gradients(both.detach(), given)
    for one, other in (
        (gated_pair(both.detach()), expected),
        (inner, expected),
        (found, gradient),
        (sums, gradient.sum(0)),
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
def test_a_gate_of_more_rows_than_a_second_dimension_has_programs() -> None:
    from sensorium.kernels.layer_triton import gated_pair

    both = torch.randn(8 * 65_535 + 9, 6, device=DEVICE)
    gate, up = both.chunk(2, 1)
    torch.testing.assert_close(gated_pair(both), silu(gate) * up)


@gpu_too
@needs_triton
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 8), (3, 3, 24)])
def test_queries_keys_and_values_split_and_rotated(
    heads: int, kv_heads: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sensorium.kernels.layer_ops import Rotate
    from sensorium.kernels.layer_triton import joined_gradients, split_rotated

    monkeypatch.setattr(layer_ops, "interpreted", DEVICE == "cpu")
    generator = torch.Generator().manual_seed(0)
    joined = torch.randn(5, (heads + 2 * kv_heads) * size, generator=generator).to(DEVICE).requires_grad_()
    cos, sin = torch.randn(2, 5, size, generator=generator).to(DEVICE)
    parts = joined.unflatten(1, (-1, size)).split([heads, kv_heads, kv_heads], 1)
    expected = [*(Rotate.apply(part[None], cos[None], sin[None])[0] for part in parts[:2]), parts[2]]
    found = split_rotated(joined.detach(), cos, sin, heads)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    given = [torch.randn(part.shape, generator=generator).to(DEVICE) for part in expected]
    (gradient,) = torch.autograd.grad(expected, joined, given)
    assert torch.equal(joined_gradients(*given, cos, sin), gradient)

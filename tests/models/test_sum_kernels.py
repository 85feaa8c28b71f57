"""Sums over rows by a kernel are torch's. Without a GPU: in Triton's interpreter."""

from importlib.util import find_spec

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.gpu if DEVICE == "cuda" else lambda test: test
@pytest.mark.parametrize(("rows", "width"), [(1, 130), (70, 128), (333, 20)])
def test_column_sums(rows: int, width: int) -> None:
    from sensorium.kernels.layer_triton import column_sums

    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert torch.allclose(column_sums(x), x.sum(0), atol=1e-4)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.gpu if DEVICE == "cuda" else lambda test: test
def test_gradients_are_added() -> None:
    from sensorium.learner.adam_kernels import add_gradient

    total, gradient = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected = total + gradient.half()
    add_gradient(total, gradient.half())
    assert torch.equal(total, expected)

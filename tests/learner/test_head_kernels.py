"""The head's kernels give the log-probs, entropies and gradients of the plain head. Without a GPU: in the interpreter."""

from importlib.util import find_spec

import pytest
import torch

from sensorium.learner.forward import FORBIDDEN, TokenLogprobs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")]
if DEVICE == "cuda":
    pytestmark.append(pytest.mark.gpu)


@pytest.mark.parametrize("rows", [1, 5])
def test_values_and_gradients(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from sensorium.kernels import learner_triton

    monkeypatch.setattr(learner_triton, "ROWS", 2)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator).to(DEVICE) for n in (rows, 9000))
    targets = torch.randint(0, 9000, (rows,), generator=generator).to(DEVICE)
    bias = torch.zeros(9000, device=DEVICE)
    bias[[3, 8999]] = FORBIDDEN
    slopes = torch.randn(2, rows, generator=generator).to(DEVICE)
    results = []
    for fused in (True, False):
        inputs = [x.clone().requires_grad_() for x in (hidden, weight)]
        if fused:
            found = learner_triton.HeadLogprobs.apply(*inputs, targets, bias, 0.7)
        else:
            found = TokenLogprobs.apply(inputs[0] @ inputs[1].T, targets, bias, 0.7)
        (found[0] * slopes[0] + found[1] * slopes[1]).sum().backward()
        results.append([*(x.detach() for x in found), *(x.grad for x in inputs)])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=2e-5)

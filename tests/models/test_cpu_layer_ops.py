"""What lies between a layer's products in C: torch's numbers at every width, and no bit that depends on threads."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from sensorium.compiled import library
from sensorium.media.store import MediaStore
from sensorium.models import cpu_layer_ops
from sensorium.models.attention import MaskedAttention
from sensorium.models.fast_paths import fallbacks, without_compiled_parts
from sensorium.models.layer_functions import AddNorm, Gate, Norm, Rotate
from sensorium.models.load import load_policy
from sensorium.models.tiny import make_tiny


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


def plain_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    return x * cos[:, :, None] + torch.cat((-two, one), -1) * sin[:, :, None]


def compare(found: Callable[..., Tensor], expected: Callable[..., Tensor], *given: Tensor) -> None:
    outs = [found(*given), expected(*given)]
    pull = torch.linspace(-1, 1, outs[0].numel()).view_as(outs[0])
    learning = [x for x in given if x.requires_grad]
    both = [[out, *torch.autograd.grad(out, learning, pull)] for out in outs]
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("width", [2, 15, 16, 33, 64, 300])
@pytest.mark.parametrize("rows", [1, 63, 64, 200])
def test_each_is_what_torch_computes(rows: int, width: int) -> None:
    x, weight, more = drawn(rows, width), drawn(width), drawn(rows, width, 1)[..., 0].detach()
    compare(lambda x, w: Norm.apply(x, w, 1e-6), plain_norm, x, weight)
    compare(lambda x, w: sum(AddNorm.apply(x, more, w, 1e-6)), lambda x, w: plain_norm(x + more, w) + x + more, x, weight)
    compare(Gate.apply, lambda gate, up: silu(gate) * up, x, drawn(width, rows).T)
    if width % 2 == 0:
        cos, sin = drawn(2, 1, rows, width).detach()
        compare(Rotate.apply, plain_rotation, drawn(1, rows, 3, width), cos, sin)


def test_no_bit_depends_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_layer_ops, "NUMBERS_OF_A_THREAD", 1)
    x, weight, up = (y.detach() for y in (drawn(301, 50), drawn(50), drawn(50, 301).T.contiguous()))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3, 4):
            torch.set_num_threads(threads)
            out, scales = cpu_layer_ops.normed(x, weight, 1e-6)
            norm = cpu_layer_ops.norm_gradients(x, weight, scales, out, x, again=True)
            gates = cpu_layer_ops.gate_gradients(x, up, out, True)
            found.append([out, scales, norm.input, norm.weight, norm.result, *gates])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))


def test_without_a_compiler_the_stock_layers_are_used_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy(str(make_tiny("qwen2", tmp_path / "model")), store=MediaStore())
    monkeypatch.setenv("CC", "/bin/false")
    ids, positions = torch.arange(7)[None], torch.arange(7)[None, None].expand(3, 1, -1)
    before = fallbacks()
    without_compiled_parts.cache_clear()
    try:
        library._tried.cache_clear()
        with pytest.warns(UserWarning, match="without its compiled parts, .*slower.*/bin/false ended with 1"):
            found = policy.language(ids, positions, MaskedAttention())
    finally:
        library._tried.cache_clear()
    assert fallbacks() == before + 1
    assert torch.equal(found, policy.language(ids, positions, MaskedAttention(), stock=True))


def test_what_is_not_float32_is_never_read_as_if_it_were(tmp_path: Path) -> None:
    policy = load_policy(str(make_tiny("qwen2", tmp_path / "model")), store=MediaStore(), device="cpu", dtype="float32")
    given = torch.arange(7)[None], torch.arange(7)[None, None].expand(3, 1, -1), MaskedAttention()
    before = policy.language(*given)
    policy.model.double()
    torch.testing.assert_close(policy.language(*given).float(), before, rtol=0, atol=1e-4)
    for kind in (torch.float64, torch.bfloat16):
        with pytest.raises(TypeError, match=f"float32, and were given {kind}"):
            Norm.apply(torch.ones(3, 8, dtype=kind), torch.ones(8, dtype=kind), 1e-6)

"""The table of operations: every fast form gives what its plain torch reference gives. Without a GPU: in Triton's
interpreter, where Triton is installed."""

import ast
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import sensorium
from sensorium.engines.native.decode_state import TorchOps
from sensorium.engines.native.key_values import PAGE, PagePool
from sensorium.engines.protocol import Sampling
from sensorium.kernels.layer_ops import GatedMLP, NormWeights
from sensorium.kernels.matched_ops import KeyStore, QueryTiles, TorchMatched
from sensorium.learner.forward import FORBIDDEN
from sensorium.learner.optimizer import ParameterState, Rates

from ..engines.test_decode_kernels import VOCAB, delta_net, make_rows
from .operations import OPERATIONS, forms

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SOURCE = Path(sensorium.__file__).parent
ONE_LAUNCH = "decode attend in one launch"  # bfloat16 on a GPU from Hopper on: tests/engines/test_row_attention.py
# flash-linear-attention's own kernels, on a GPU: tests/models/test_delta_net.py; and tests/kernels/test_delta_rule.py
DELTA = ("delta chunks", "delta step", "delta decay")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def close(found: Any, expected: Any) -> None:
    """Nested results agree; None where both have none."""
    if isinstance(expected, tuple | list):
        for one, other in zip(found, expected, strict=True):
            close(one, other)
    elif expected is not None:
        torch.testing.assert_close(found.float(), expected.float(), rtol=1e-4, atol=1e-4)


def layer_arguments() -> dict[str, tuple[Any, ...]]:
    """Arguments of the operations of layers: 7 rows of 48, four heads of 8 of which two share a key head."""
    x, more, up = normal(7, 48), normal(7, 48, seed=1), normal(7, 48, seed=2)
    gain, (cos, sin) = normal(48, seed=3), normal(2, 7, 8, seed=4)
    scale = torch.rsqrt(x.square().mean(-1) + 1e-6)
    joined = normal(7, (4 + 2 * 2) * 8, seed=5)
    return {
        "normed": (x, gain, 1e-6),
        "add_normed": (x, more, gain, 1e-6),
        "norm_gradients": (x, gain, scale, up, more, torch.float16, torch.float32),
        "gated": (x, up),
        "gated_finely": (x, up),
        "gate_gradients": (x, up, more, True),
        "gated_pair": (normal(7, 96),),
        "gate_pair_gradients": (normal(7, 96), up),
        "rotated": (x.view(1, 7, 6, 8), cos[None], sin[None], True),
        "split_rotated": (joined, cos, sin, 4),
        "joined_gradients": (normal(7, 4, 8), normal(7, 2, 8), normal(7, 2, 8, seed=1), cos, sin),
    }


def compare_layer(name: str) -> None:
    reference, fast = forms(f"layer {name}")
    given = layer_arguments()[name]
    close(fast(*given), reference(*given))


def compare_rotate_into() -> None:
    cos, sin = normal(2, 7, 8, seed=4)
    for back in (False, True):
        for in_place in (False, True):
            results = []
            for form in forms("layer rotate_into"):
                x = normal(7, 3 * 2 * 8)
                out = x if in_place else torch.empty_like(x)
                form(x, out, cos, sin, 3, 2, back)
                results.append(out)
            close(*results)


def decode_arguments() -> dict[str, tuple[Any, ...]]:
    x, residual, norm = normal(6, 128), normal(6, 128, seed=1), NormWeights(normal(128, seed=2), 1e-6)
    layer = nn.Linear(128, 128, device=DEVICE).requires_grad_(False)
    gate, up = (nn.Linear(128, 256, bias=False, device=DEVICE).requires_grad_(False) for _ in range(2))
    rows = make_rows([130, 200, 128, 140, 65, 100], [2, 2, 2, 2, 1, 1], [0, 0, 0, 0, 1, 1])
    return {
        "norm": (x, norm),
        "add_norm": (x, residual, norm),
        "add_product": (layer, x, residual, norm),
        "gate": (x, residual),
        "gate_finely": (x, residual),
        "gated": (GatedMLP(gate, up, nn.Identity()), x),
        "attend": (normal(6, 4, 16), rows, normal(2, 40, 2, PAGE, 16, seed=3), 0.3),
    }


def compare_decode(name: str) -> None:
    from sensorium.engines.native.decode_kernels import TritonOps

    reference, fast = forms(f"decode {name}")
    given = decode_arguments()[name]
    close(fast(TritonOps(), *given), reference(TorchOps(), *given))


def compare_place() -> None:
    from sensorium.engines.native.decode_kernels import TritonOps

    rows = make_rows([0, 63, 64, 200], [0] * 4, [0, 1, 2, 3])
    projected = [normal(4, heads * 16, seed=heads) for heads in (4, 2, 2)]
    rotary = normal(4, 16, seed=8), normal(4, 16, seed=9)
    norms = NormWeights(normal(16), 1e-6), NormWeights(normal(16, seed=1), 1e-6)
    results = []
    for form, ops in zip(forms("decode place"), (TorchOps(), TritonOps()), strict=True):
        block = torch.zeros(2, 12, 2, PAGE, 16, device=DEVICE)
        results.append((form(ops, *projected, rotary, norms, rows, block), block))
    close(results[1], results[0])


def compare_mix() -> None:
    """Six rows of which two work on the scratch slot, whose states mean nothing."""
    from sensorium.engines.native.decode_kernels import TritonOps

    net = delta_net(64, heads=2, groups=4, size=16, value=24)
    channels = net.conv_dim
    slots = torch.tensor([3, 1, 0, 4, 0, 2], device=DEVICE)
    results = []
    for form, ops in zip(forms("decode mix"), (TorchOps(), TritonOps()), strict=True):
        windows, states = normal(6, 3, channels, seed=2), normal(6, 4, 16, 24, seed=3)
        out = form(ops, net, normal(6, 64, seed=4), windows, states, slots)
        results.append((out[slots > 0], windows[1:], states[1:]))
    close(results[1], results[0])


def compare_draw() -> None:
    from sensorium.engines.native.decode_kernels import TritonOps

    kinds = [Sampling(), Sampling(temperature=0.6), Sampling(temperature=0.0), Sampling(stop_tokens=False)]
    forbidden, stops = torch.tensor([3, 4999], device=DEVICE), torch.tensor([7], device=DEVICE)
    results = []
    for form, ops in zip(forms("decode draw"), (TorchOps(), TritonOps()), strict=True):
        rows = make_rows([10] * 20, [0] * 20, list(range(20)), kinds)
        form(ops, normal(20, VOCAB) * 4, rows, forbidden, stops, False)
        results.append([rows.tokens_B, rows.packed_3B, rows.positions_B, rows.lengths_B, rows.counts_B])
    close(results[1], results[0])


def compare_pages_written() -> None:
    reference, fast = forms("pages written")
    new, pages = normal(5, 2, 16), normal(4, 2, PAGE, 16, seed=1)
    where = torch.tensor([0, 1, 1, 3, 2], device=DEVICE), torch.tensor([0, 5, 6, 63, 1], device=DEVICE)
    expected, found = pages.cpu(), pages.clone()
    reference(new.cpu(), expected, *(each.cpu() for each in where))
    fast(new, found, *where)
    close(found.cpu(), expected)


def compare_pages_copied() -> None:
    reference, fast = forms("pages copied")
    source, target = normal(2, 2, 4, 2, PAGE, 16), normal(2, 2, 5, 2, PAGE, 16, seed=1)
    pool = PagePool.__new__(PagePool)
    pool.block = target.cpu()
    reference(pool, [4, 1], source.cpu(), [0, 3])
    found = target.clone()
    fast(source, torch.tensor([0, 3], device=DEVICE), found, torch.tensor([4, 1], device=DEVICE))
    close(found.cpu(), pool.block)


def compare_head() -> None:
    reference, fast = forms("head")
    targets, bias = torch.tensor([0, 3, 999], device=DEVICE), torch.zeros(1000, device=DEVICE)
    bias[5] = FORBIDDEN
    results = []
    for form in (reference, fast):
        hidden, weight = (x.requires_grad_() for x in (normal(3, 32), normal(1000, 32, seed=1)))
        given = (hidden @ weight.T, targets) if form is reference else (hidden, weight, targets)
        logprobs, entropies = form(*given, bias, 0.7)
        gradients = torch.autograd.grad((2 * logprobs + entropies).sum(), [hidden, weight])
        results.append([logprobs.detach(), entropies.detach(), *gradients])
    close(results[1], results[0])


def compare_adamw() -> None:
    step_all, tables_of = forms("adamw")
    rates = [Rates(lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)]
    tensors = []
    for where in ("cpu", DEVICE):
        tensor = ParameterState(Parameter(torch.zeros(5000, dtype=torch.bfloat16, device=where)), 3, torch.float32)
        tensor.master, tensor.gradient = normal(5000).to(where), normal(5000, seed=1).to(where)
        tensors.append(tensor)
    expected, found = tensors
    with torch.no_grad():
        tables = tables_of([found], rates, DEVICE)
        found.steps += 1
        tables.step(torch.tensor(0.5, device=DEVICE))
        step_all([expected], rates, torch.tensor(0.5))
    close(
        [found.master.cpu(), *(moment.cpu() for moment in found.read_moments())],
        [expected.master, *expected.read_moments()],
    )


def compare_matched_product() -> None:
    from sensorium.kernels.matched_ops import TritonMatched

    reference, fast = forms("matched product")
    given = normal(70, 200), normal(40, 200, seed=1), normal(40, seed=2), torch.float32
    close(fast(TritonMatched(), *given), reference(TorchMatched(), *given))


def compare_matched_attend() -> None:
    from sensorium.kernels.matched_ops import TritonMatched

    reference, fast = forms("matched attend")
    place = torch.arange(100, device=DEVICE)
    store = KeyStore(normal(100, 2, 8, seed=1), normal(100, 2, 8, seed=2), 2, 16, 8)
    tiles = QueryTiles(place[::16], (100 - place[::16]).clamp(max=16), place[::16] * 0, place[::16], place)
    given = normal(100, 6, 8), store, tiles, 0.3
    close(fast(TritonMatched(), *given), reference(TorchMatched(), *given))


CASES: dict[str, Callable[[], None]] = {
    **{f"layer {name}": lambda name=name: compare_layer(name) for name in layer_arguments()},
    **{f"decode {name}": lambda name=name: compare_decode(name) for name in decode_arguments()},
    "layer rotate_into": compare_rotate_into,
    "decode place": compare_place,
    "decode mix": compare_mix,
    "decode draw": compare_draw,
    "pages written": compare_pages_written,
    "pages copied": compare_pages_copied,
    "head": compare_head,
    "adamw": compare_adamw,
    "matched product": compare_matched_product,
    "matched attend": compare_matched_attend,
}


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.gpu if DEVICE.type == "cuda" else lambda test: test
@pytest.mark.parametrize("name", sorted(CASES))
def test_the_fast_form_gives_what_its_reference_gives(name: str) -> None:
    CASES[name]()


def test_every_operation_of_the_table_is_compared() -> None:
    assert {*CASES, ONE_LAUNCH, *DELTA} == set(OPERATIONS)


def test_kernels_are_written_in_one_package() -> None:
    """No Triton kernel outside of kernels/, and no CUDA source."""
    outside = [path for path in SOURCE.rglob("*.py") if "kernels" not in path.relative_to(SOURCE).parts[:1]]
    decorated = [
        path
        for path in outside
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
    ]
    assert not decorated
    assert {path.relative_to(SOURCE).parts[0] for path in SOURCE.rglob("*.cu")} <= {"kernels"}


@pytest.mark.parametrize("name", sorted(layer_arguments()))
def test_references_of_layers_are_what_autograd_gives(name: str) -> None:
    """Gradients that references compute by formula are those of the forward references."""
    from sensorium.kernels import layer_torch

    given = layer_arguments()[name]
    if name == "norm_gradients":
        x, gain, _, gradient, more, *_ = given
        x, gain = x.clone().requires_grad_(), gain.clone().requires_grad_()
        out, _ = layer_torch.normed(x, gain, 1e-6)
        expected = torch.autograd.grad(out, [x, gain], gradient)
        found = layer_torch.norm_gradients(*given)
        close([found.input - more, found.weight, found.result], [*expected, out.detach()])
    elif name in ("gate_gradients", "gate_pair_gradients"):
        *inputs, gradient = given[:3] if name == "gate_gradients" else given
        inputs = [x.clone().requires_grad_() for x in inputs]
        out = (layer_torch.gated if name == "gate_gradients" else layer_torch.gated_pair)(*inputs)
        expected = torch.autograd.grad(out, inputs, gradient)
        found = getattr(layer_torch, name)(*given)
        close([*found[: len(inputs)], found[-1]], [*expected, out.detach()])
    elif name == "joined_gradients":
        *gradients, cos, sin = given
        joined = normal(7, 64).requires_grad_()
        (expected_joined,) = torch.autograd.grad(layer_torch.split_rotated(joined, cos, sin, 4), joined, gradients)
        close(layer_torch.joined_gradients(*given), expected_joined)
    elif name == "rotated":
        gradient, cos, sin, _ = given
        x = normal(1, 7, 6, 8, seed=9).requires_grad_()
        (expected_x,) = torch.autograd.grad(layer_torch.rotated(x, cos, sin, False), x, gradient)
        close(layer_torch.rotated(*given), expected_x)
    else:
        results = getattr(layer_torch, name)(*given)
        assert all(torch.isfinite(x).all() for x in (results if isinstance(results, tuple) else (results,)))


@pytest.mark.gpu
def test_a_gate_of_more_rows_than_a_second_dimension_has_programs() -> None:
    from sensorium.kernels.layer_triton import gated_pair

    both = torch.randn(8 * 65_535 + 9, 6, device=DEVICE)
    gate, up = both.chunk(2, 1)
    torch.testing.assert_close(gated_pair(both), torch.nn.functional.silu(gate) * up)

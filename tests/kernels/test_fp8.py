"""FP8 rows and products: what plain torch computes, and that the kernels compute the same (on a CPU interpreted)."""

from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import silu

from sensorium.kernels import fp8
from sensorium.kernels.fp8 import FP8, LARGEST_FP8, Fp8Matrix, Fp8Rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32  # the interpreter has no bfloat16
HALF_STEP = 2.0**-4  # the largest relative error of rounding to three bits behind the first
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
# Hopper's tensor cores sum FP8 products in 22 bits or so; one of 256 values may be rounded to its other neighbour.
TOLERANCE = 2e-3


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=4, max_size=4))
def test_a_number_is_rounded_by_a_sixteenth_at_most(numbers: list[float]) -> None:
    row = torch.tensor([numbers])
    rows = fp8.quantise(row)
    small = row.abs().max() * 2.0**-9 / LARGEST_FP8  # half of the distance between the smallest numbers of e4m3
    assert ((rows.wide_BK - row).abs() <= row.abs() * HALF_STEP + 1.001 * small + 1e-15).all()
    assert rows.values_BK.float().abs().max() <= LARGEST_FP8


def test_numbers_of_e4m3_are_kept() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    values = values[values.isfinite()]
    assert torch.equal(fp8.quantise(values[None] * 0.25).wide_BK[0], values * 0.25)


def test_weights_share_a_scale_and_lose_a_sixteenth_at_most() -> None:
    weights = (normal(3, 64, dtype=torch.bfloat16), normal(5, 64, dtype=torch.bfloat16, seed=1) * 64)
    out = Fp8Matrix.empty(8, 64, DEVICE)
    fp8.quantise_weights(weights, out)
    exact = torch.cat(weights).float()
    small = exact.abs().max() * 2.0**-9 / LARGEST_FP8
    assert ((out.wide_NK - exact).abs() <= exact.abs() * HALF_STEP + small).all()
    assert torch.isclose(out.scale * LARGEST_FP8, exact.abs().max())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_none_spoils_its_row_alone(kernels: ModuleType | None, bad: float) -> None:
    x = normal(3, 256)
    x[1, 5] = bad
    one = torch.ones(3, device=DEVICE)
    assert fp8.quantise(x).wide_BK.isfinite().all(1).tolist() == [True, False, True]
    assert fp8.gated_rows(x, one, one[0]).wide_BK.isfinite().all(1).tolist() == [True, False, True]
    if kernels is not None:
        assert kernels.gated_rows(x, one, one[0]).wide_BK.isfinite().all(1).tolist() == [True, False, True]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType | None:
    """The kernels' module. Triton's interpreter loses the carry where rounding to FP8 reaches the next power of two."""
    if find_spec("triton") is None:
        return None
    from triton.runtime import interpreter

    from sensorium.kernels import fp8_triton

    convert = interpreter._convert_float

    def converted(numbers: Any, given: Any, wanted: Any, *rest: Any) -> Any:
        if wanted.name == "fp8e4nv" and given.name == "fp32":
            return torch.from_numpy(numbers.copy()).to(FP8).view(torch.uint8).numpy()
        return convert(numbers, given, wanted, *rest)

    monkeypatch.setattr(interpreter, "_convert_float", converted)
    return fp8_triton


def weight_of(outputs: int, inner: int) -> Fp8Matrix:
    out = Fp8Matrix.empty(outputs, inner, DEVICE)
    fp8.quantise_weights((normal(outputs, inner, seed=1),), out)
    return out


def alike(found: Fp8Rows, expected: Fp8Rows) -> bool:
    """Whether scales are the same, and values but for a few that were rounded to their other neighbour."""
    if error(found.scales_B, expected.scales_B) > 1e-5:
        return False
    differ = found.values_BK.view(torch.uint8) != expected.values_BK.view(torch.uint8)
    return bool(differ.float().mean() < 0.01) and error(found.wide_BK, expected.wide_BK) <= 2 * HALF_STEP


pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []


@needs_triton
@pytest.mark.parametrize(("rows", "inner"), [(3, 512), (24, 1408), (100, 512), (128, 2560)])
def test_products_of_few_rows_are_products(kernels: ModuleType, rows: int, inner: int) -> None:
    x, weight = fp8.quantise(normal(rows, inner)), weight_of(192, inner)
    parts = kernels.few_rows_product(x, weight)
    assert len(parts) == max(1, inner // 512)
    assert error(parts.sum(0), fp8.product(x, weight)) <= TOLERANCE


@needs_triton
@pytest.mark.parametrize("width", [128, 1408, 5120])
def test_gates_open_what_goes_up(kernels: ModuleType, width: int) -> None:
    both, scales = normal(5, 2 * width, dtype=WIDE) * 100, normal(5, seed=1).abs() / 100
    both[3] = 0
    found = kernels.gated_rows(both, scales, scales[0])
    assert alike(found, fp8.gated_rows(both, scales, scales[0]))
    gate, up = (both.float() * scales[:, None] * scales[0]).chunk(2, 1)
    assert error(found.wide_BK, silu(gate) * up) <= 1.1 * HALF_STEP


@needs_triton
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("scaled", [False, True])
def test_the_norm_of_a_sum_is_taken(kernels: ModuleType, parts: int, bias: bool, scaled: bool) -> None:
    given, residual = normal(parts, 5, 192, dtype=WIDE), normal(5, 192, seed=1)
    weight, shift = normal(192, dtype=WIDE, seed=2), normal(192, dtype=WIDE, seed=3) if bias else None
    scales = (normal(5, seed=4).abs(), normal(1, seed=5)[0]) if scaled else None
    narrow, wide = Fp8Rows.empty(5, 192, DEVICE), torch.empty(5, 192, device=DEVICE, dtype=WIDE)
    product = given.float().sum(0) * (1 if scales is None else (scales[0] * scales[1])[:, None])
    expected = product + residual + (0 if shift is None else shift.float())
    for out in (narrow, wide):
        assert error(kernels.add_norm(given, scales, shift, residual, weight, 1e-6, out), expected) <= 1e-6
    normed = fp8.normed(expected, weight, 1e-6)
    assert alike(narrow, fp8.quantise(normed))
    assert error(wide, normed) <= 2.0**-8


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="the library multiplies FP8 rows on GPUs")
@pytest.mark.parametrize("rows", [1, 3, 24, 128, 200])
def test_the_librarys_product_is_the_product_of_values(rows: int) -> None:
    x, weight = fp8.quantise(normal(rows, 512)), weight_of(256, 512)
    assert error(fp8.library_product(x, weight), fp8.product(x, weight)) <= 0.01

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
from sensorium.kernels.fp8 import FP8, LARGEST_FP8, Fp8Rows

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


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=4, max_size=4), st.sampled_from([1, 2]))
def test_a_number_is_rounded_by_a_sixteenth_at_most(numbers: list[float], groups: int) -> None:
    row = torch.tensor([numbers])
    rows = fp8.quantise(row, groups)
    largest = row.view(groups, -1).abs().amax(1).repeat_interleave(4 // groups)
    small = largest * 2.0**-9 / LARGEST_FP8  # half of the distance between the smallest numbers of e4m3
    assert ((rows.wide_BK - row).abs()[0] <= row.abs()[0] * HALF_STEP + 1.001 * small + 1e-15).all()
    assert rows.values_BK.float().abs().max() <= LARGEST_FP8


def test_numbers_of_e4m3_are_kept() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    values = values[values.isfinite()]
    assert torch.equal(fp8.quantise(values[None] * 0.25).wide_BK[0], values * 0.25)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_none_spoils_its_row_alone(bad: float) -> None:
    x = normal(3, 128)
    x[1, 5] = bad
    assert fp8.quantise(x).wide_BK.isfinite().all(1).tolist() == [True, False, True]
    if find_spec("triton"):
        from sensorium.kernels import fp8_triton

        assert fp8_triton.quantise(x).wide_BK.isfinite().all(1).tolist() == [True, False, True]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The kernels' module. Triton's interpreter loses the carry where rounding to FP8 reaches the next power of two."""
    from triton.runtime import interpreter

    from sensorium.kernels import fp8_triton

    convert = interpreter._convert_float

    def converted(numbers: Any, given: Any, wanted: Any, *rest: Any) -> Any:
        if wanted.name == "fp8e4nv" and given.name == "fp32":
            return torch.from_numpy(numbers.copy()).to(FP8).view(torch.uint8).numpy()
        return convert(numbers, given, wanted, *rest)

    monkeypatch.setattr(interpreter, "_convert_float", converted)
    return fp8_triton


def alike(found: Fp8Rows, expected: Fp8Rows) -> bool:
    """Whether scales are the same, and values but for a few that were rounded to their other neighbour."""
    if error(found.scales_BG, expected.scales_BG) > 1e-5:
        return False
    differ = found.values_BK.view(torch.uint8) != expected.values_BK.view(torch.uint8)
    return bool(differ.float().mean() < 0.01) and error(found.wide_BK, expected.wide_BK) <= 2 * HALF_STEP


pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []


@needs_triton
@pytest.mark.parametrize("width", [128, 1408])
def test_rows_are_quantised_as_torch_does(kernels: ModuleType, width: int) -> None:
    x = normal(5, width, dtype=WIDE)
    x[3] = 0
    assert alike(kernels.quantise(x), fp8.quantise(x))
    out = Fp8Rows.empty(9, width, DEVICE)
    kernels.quantise_into(x, out.slice(2, 7))
    assert alike(out.slice(2, 7), fp8.quantise(x))


@needs_triton
@pytest.mark.parametrize("rows", [3, 24, 100, 200])
@pytest.mark.parametrize("groups", [0, 1, 4])
def test_products_in_parts_are_products(kernels: ModuleType, rows: int, groups: int) -> None:
    from sensorium.kernels.decode_triton import Tiling

    wide, weight = normal(rows, 512, dtype=WIDE), fp8.quantise(normal(192, 512, seed=1))
    x = fp8.quantise(wide, groups) if groups else wide
    for tiling in (None, Tiling(64, 128, 3, 4, 3)):
        found = kernels.product_parts(x, weight, tiling).sum(0)
        assert error(found, fp8.product(x, weight)) <= TOLERANCE


@needs_triton
@pytest.mark.parametrize("rows", [3, 100, 200])
def test_gates_open_what_goes_up(kernels: ModuleType, rows: int) -> None:
    x, both = fp8.quantise(normal(rows, 256)), fp8.quantise(normal(2 * 384, 256, seed=1) / 8)
    assert error(kernels.gated_product(x, both).wide_BK, fp8.gated_product(x, both, 3).wide_BK) <= 2 * HALF_STEP
    exact = silu(fp8.product(x, both)[:, :384]) * fp8.product(x, both)[:, 384:]
    assert error(kernels.gated_product(x, both).wide_BK, exact) <= 1.1 * HALF_STEP
    wide = fp8.product(x, both).to(WIDE)
    exact = silu(wide[:, :384].float()) * wide[:, 384:].float()
    assert alike(kernels.gated_rows(wide), fp8.quantise(exact))


@needs_triton
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
def test_the_norm_of_a_sum_is_quantised(kernels: ModuleType, parts: int, bias: bool) -> None:
    given, residual = normal(parts, 5, 192, dtype=WIDE), normal(5, 192, seed=1)
    weight, shift = normal(192, dtype=WIDE, seed=2), normal(192, dtype=WIDE, seed=3) if bias else None
    found, summed = kernels.add_norm(given, shift, residual, weight, 1e-6)
    expected = given.float().sum(0) + residual + (0 if shift is None else shift.float())
    assert error(summed, expected) <= 1e-6
    assert alike(found, fp8.quantise(fp8.normed(expected, weight, 1e-6)))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="the library multiplies FP8 rows on GPUs")
def test_the_librarys_product_is_scaled_by_both() -> None:
    x, weight = fp8.quantise(normal(200, 512)), fp8.quantise(normal(256, 512, seed=1))
    assert error(fp8.scaled_product(x, weight), fp8.product(x, weight)) <= 0.01

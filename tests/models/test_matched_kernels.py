"""The kernels of matched precision give what plain torch gives, and the same bits for a row in any company."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from sensorium.kernels.matched_ops import KeyStore, QueryTiles, TorchMatched

pytestmark = [pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")]
if torch.cuda.is_available():
    pytestmark.append(pytest.mark.gpu)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float32]  # the interpreter has no bfloat16
ERRORS = {torch.float32: 2e-6, torch.bfloat16: 0.01}


@pytest.fixture(scope="module")
def kernels() -> Any:
    from sensorium.kernels import matched_triton

    return matched_triton


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [48, 200])
def test_products_in_tiles_are_products(kernels: Any, inner: int, dtype: torch.dtype) -> None:
    x, weight = normal(70, inner, dtype=dtype), normal(40, inner, dtype=dtype, seed=1)
    bias = normal(40, dtype=dtype, seed=2)
    right = TorchMatched().product(x, weight, bias, torch.float32)
    for few in (True, False):
        found = kernels.product(x, weight, bias, few=few)
        assert float((found - right).abs().max() / right.abs().max()) < 2e-6
    assert torch.equal(kernels.product(x[9:12], weight), kernels.product(x, weight)[9:12])
    if torch.bfloat16 in DTYPES:
        assert torch.equal(kernels.product(x, weight, bias, torch.bfloat16, True), found.bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_of_every_size_sum_alike(kernels: Any, dtype: torch.dtype) -> None:
    assert kernels.sums_alike(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 2, 8), (4, 4, 24)])
def test_attention_in_tiles_and_over_pages(kernels: Any, heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
    length, each = 150, 16
    query = normal(length, heads, size, dtype=dtype)
    key, value = (normal(length, kv_heads, size, dtype=dtype, seed=seed) for seed in (1, 2))
    place = torch.arange(length, device=DEVICE)
    first = place[::each]  # with gaps in memory
    flat = KeyStore(key, value, kv_heads, kv_heads * size, size)
    tiles = QueryTiles(first, (length - first).clamp(max=each), first * 0, first, place)
    found = kernels.attend(query, flat, tiles, 0.3)
    right = TorchMatched().attend(query, flat, tiles, 0.3)
    assert float((found.float() - right.float()).abs().max() / right.float().abs().max()) < ERRORS[dtype]

    order = torch.tensor([2, 0, 1], device=DEVICE)
    pages = normal(2, 3, kv_heads, 64, size, dtype=dtype, seed=3)
    for part, given in zip(pages, (key, value), strict=True):
        part[order[place // 64], :, place % 64] = given
    entries = (order[:, None] * kv_heads * 64 + torch.arange(64, device=DEVICE)).flatten()
    paged = KeyStore(pages[0], pages[1], kv_heads, size, 64 * size)
    alone = QueryTiles(place, torch.ones_like(place), place * 0, place, entries)
    assert torch.equal(kernels.attend(query, paged, alone, 0.3), found)

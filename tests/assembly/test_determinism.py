"""A run begins with the same arithmetic, whatever its process computed before."""

import pytest
import torch

from sensorium.assembly.determinism import make_deterministic, products_repeat, surroundings, warn_if_changed
from sensorium.recipe.load import load_recipe


def product(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    numbers = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    return torch.nn.functional.linear(numbers[None], numbers)


def test_a_bfloat16_product_before_a_run_does_not_change_its_numbers() -> None:
    recipe = load_recipe("shapes", ["threads=1"])
    make_deterministic(recipe)
    before = product()
    product(torch.bfloat16)
    torch.backends.mkldnn.enabled = False  # as torch does there, on a CPU without bfloat16
    make_deterministic(recipe)
    assert torch.backends.mkldnn.enabled
    assert torch.equal(product(), before)


def test_a_run_in_bfloat16_computes_the_same_from_its_first_product_on() -> None:
    make_deterministic(load_recipe("shapes", ["threads=1", "model.dtype=bfloat16"]))
    decided = torch.backends.mkldnn.enabled
    before = product()
    product(torch.bfloat16)
    assert torch.backends.mkldnn.enabled == decided
    assert torch.equal(product(), before)


def test_a_run_that_goes_on_elsewhere_warns_of_what_changed() -> None:
    recorded = surroundings()
    assert warn_if_changed(recorded) == []
    with pytest.warns(UserWarning, match="resumed elsewhere"):
        assert len(warn_if_changed(recorded | {"torch": "1.0"})) == 1
    with pytest.warns(UserWarning, match="C compiler"):  # recorded by versions that had C code
        assert len(warn_if_changed(recorded | {"C compiler": "gcc 12"})) == 1


def test_products_do_not_depend_on_addresses_whatever_the_cpu() -> None:
    assert products_repeat()


def test_a_process_whose_products_depend_on_addresses_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sensorium.assembly.determinism.products_repeat", lambda: False)
    with pytest.warns(UserWarning, match="MKL_CBWR"):
        make_deterministic(load_recipe("shapes", ["threads=1"]))

"""The kernel that changes the kind of numbers is used where it runs and is right; elsewhere torch's is, and it is said."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from sensorium.models import attention

CPU = torch.device("cpu")


def no_compiler(x: Tensor, kind: torch.dtype) -> Tensor:
    raise RuntimeError("no C compiler was found\nand much more")


@pytest.mark.parametrize(
    ("cast", "said"),
    [(Tensor.to, ""), (no_compiler, "slower: no C compiler was found$"), (lambda x, kind: x.to(kind) + 1, "other numbers")],
)
def test_a_kernel_that_fails_or_is_wrong_is_not_used_and_that_is_said(
    cast: object, said: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(attention, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "sensorium.kernels.attention_triton", SimpleNamespace(cast=cast))  # type: ignore[arg-type]
    attention._kernel_casts.cache_clear()
    try:
        if said:
            with pytest.warns(UserWarning, match=said):
                assert not attention._kernel_casts(CPU)
        else:
            assert attention._kernel_casts(CPU)
            assert not recwarn.list
    finally:
        attention._kernel_casts.cache_clear()

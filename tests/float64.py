"""Stock models in float64 throughout: inside ``in_float64`` nothing is rounded to float32 on the way.

The stock layers of Qwen3.5 compute norms, gates and states in float32 whatever their weights are. What differs by 1e-5 in
float32, and by 1e-9 here, differs by rounding alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional


@contextmanager
def in_float64() -> Iterator[None]:
    """Inside, what converts to float32 gives float64; in layers that a backward pass computes again, too."""

    def widened(function: Any) -> Any:
        def call(*given: Any, **more: Any) -> Any:
            given = tuple(torch.float64 if each is torch.float32 else each for each in given)
            more = {key: torch.float64 if each is torch.float32 else each for key, each in more.items()}
            return function(*given, **more)

        return call

    with (
        patch.object(Tensor, "float", Tensor.double),
        patch.object(Tensor, "to", widened(Tensor.to)),
        patch.object(functional, "softmax", widened(functional.softmax)),
    ):
        yield

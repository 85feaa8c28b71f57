"""Stock models in float64 throughout: inside ``InFloat64`` nothing is rounded to float32 on the way.

The stock layers of Qwen3.5 compute norms, gates and states in float32 whatever their weights are. What differs by 1e-5 in
float32, and by 1e-9 here, differs by rounding alone.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class InFloat64(TorchFunctionMode):
    """Inside, ``.float()`` and ``.to(torch.float32)`` give float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.float:
            return args[0].double()
        if func is Tensor.to:
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            kwargs = {key: torch.float64 if each is torch.float32 else each for key, each in kwargs.items()}
        return func(*args, **kwargs)

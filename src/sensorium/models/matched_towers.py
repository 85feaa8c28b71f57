"""Towers of ``model.precision: matched``: whether media may share a pass, and what their linear layers compute with then.

Alone, a medium always gives the same features. In company it does so where every operation treats a row by itself. A Qwen
vision tower on CUDA is made of such operations, once its linear layers are matched products. The first pass over several
media is held against passes over single ones. Where a bit differs, and for other towers, each medium is a pass by itself.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from sensorium.kernels.fallbacks import fall_back
from sensorium.kernels.matched_ops import MatchedOps, MatchedProduct
from sensorium.models.family import Tower
from sensorium.models.prepared_media import TowerInput
from sensorium.models.segment_layout import Features
from sensorium.models.tower import VisionTower


class MatchedLinears(TorchFunctionMode):
    """Inside, linear layers are matched products."""

    def __init__(self, ops: MatchedOps) -> None:
        super().__init__()
        self._ops = ops

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Any call of torch inside."""
        return (self._linear if func is linear else func)(*args, **(kwargs or {}))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found: Tensor = MatchedProduct.apply(x, weight, bias, x.dtype, self._ops)
        return found


class TowerCompany:
    """Decides which media a tower encodes together. Without ``ops`` (precision ``fast``): all of them."""

    def __init__(self, ops: MatchedOps | None, device: torch.device) -> None:
        self._ops, self._device = ops, device
        self._shares: dict[Tower, bool] = {}

    def linears(self, tower: Tower) -> AbstractContextManager[Any]:
        """What a pass of the tower, or the recomputation of its blocks, runs inside."""
        return MatchedLinears(self._ops) if self._ops is not None and self._may_share(tower) else nullcontext()

    def together(
        self, tower: Tower, media: Sequence[Any], prepare: Callable[[Sequence[Any]], Sequence[TowerInput]]
    ) -> bool:
        """Whether these media may share a pass."""
        if self._ops is None or len(media) < 2:
            return True
        if not self._may_share(tower):
            return False
        if tower not in self._shares:
            self._shares[tower] = self._alike(tower, prepare(media))
            if not self._shares[tower]:
                fall_back(
                    "matched precision: a tower's features depend on what is encoded together, so media go one by one"
                )
        return self._shares[tower]

    def _may_share(self, tower: Tower) -> bool:
        return isinstance(tower, VisionTower) and self._device.type == "cuda"

    @torch.no_grad()
    def _alike(self, tower: Tower, prepared: Sequence[TowerInput]) -> bool:
        """Whether the first and the last of several media have the features that they have alone."""
        with self.linears(tower):
            several = tower(prepared)
            return all(_equal(several[i], tower([prepared[i]])[0]) for i in (0, -1))


def _equal(one: Features, other: Features) -> bool:
    pairs = zip((one.embeds_NH, *one.deepstack_NH), (other.embeds_NH, *other.deepstack_NH), strict=True)
    return all(torch.equal(first, second) for first, second in pairs)

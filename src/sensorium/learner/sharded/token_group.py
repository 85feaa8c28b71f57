"""The ranks that share the tokens of a micro-batch, over torch.distributed."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 has new names for both, and warns of the old ones.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class RankTokenGroup:
    """This process among ``size`` neighbours of the default process group: ranks 0 to size - 1, the next ``size``, …

    Gloo moves tensors of the CPU, so those of a GPU go by way of it (for checks; GPUs have NCCL).
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.rank = size, dist.get_rank() % size
        self._group: Any = dist.new_subgroups(size)[0]
        self._by_cpu = dist.get_backend(self._group) == "gloo"
        self._device = torch.device("cpu") if self._by_cpu else device

    def gather(self, own: Tensor, width: int) -> Tensor:
        """[size · width, …] of every rank's rows, padded to ``width`` each."""
        padded = own.contiguous()
        if len(own) < width:
            padded = torch.cat([padded, own.new_zeros(width - len(own), *own.shape[1:])])
        source = padded.cpu() if self._by_cpu else padded
        found = source.new_empty(self.size * width, *own.shape[1:])
        _ALL_GATHER(found, source, self._group)
        return found.to(own.device)

    def sum_own(self, rows: Tensor) -> Tensor:
        """[width, …]: the sum over all ranks of the rows [size · width, …] that are this rank's."""
        source = rows.contiguous().cpu() if self._by_cpu else rows.contiguous()
        found = source.new_empty(len(rows) // self.size, *rows.shape[1:])
        _REDUCE_SCATTER(found, source, group=self._group)
        return found.to(rows.device)

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Which of the flags any rank has set."""
        found = torch.tensor(flags, dtype=torch.uint8, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX, self._group)
        return [bool(flag) for flag in found.tolist()]

    def gather_with_gradient(self, own: Tensor, width: int) -> Tensor:
        """Like ``gather``; the gradient of a row is summed over all ranks and goes back to the one that gave it."""
        found: Tensor = _Gathered.apply(own, self, width)
        return found


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: RankTokenGroup, width: int) -> Tensor:
        ctx.group, ctx.length, ctx.dtype = group, len(own), own.dtype
        return group.gather(own, width)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.sum_own(gradients[0].float())[: ctx.length].to(ctx.dtype), None, None

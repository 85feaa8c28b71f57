"""The ranks that share the tokens of a micro-batch, over torch.distributed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, empty

from sensorium.learner.packing import MicroBatch, Packing, blank
from sensorium.learner.team import Team, divide, sum_of_squares

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


class RankTeam(Team):
    """This process among those of the default process group, which compute on ``device``.

    ``sequence_parallel`` neighbours share the tokens of a micro-batch.
    """

    tokens: RankTokenGroup | None

    def __init__(self, device: torch.device, sequence_parallel: int = 1) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.tokens = RankTokenGroup(sequence_parallel, device) if sequence_parallel > 1 else None
        self.device = device
        self.mesh: DeviceMesh = init_device_mesh(device.type, (self.size,))

    def owned(self, costs: Sequence[float]) -> list[bool]:
        """Which groups are computed here: those that the division of their costs gives this rank and its token group."""
        sharing = 1 if self.tokens is None else self.tokens.size
        return [chosen == self.rank // sharing for chosen in divide(costs, self.size // sharing)]

    def level(self, packing: Packing) -> Packing:
        """A packing with blank micro-batches added, so that every rank has as many of each kind.

        Silent micro-batches may go without a backward pass, so the two kinds are counted apart.
        """
        kinds = [[one for one in packing.microbatches if one.silent is silent] for silent in (False, True)]
        most = self.largest(*(len(kind) for kind in kinds))
        filled: list[MicroBatch] = []
        for kind, count, silent in zip(kinds, most, (False, True), strict=True):
            filled += [*kind, *(blank(self.device, silent) for _ in range(int(count) - len(kind)))]
        return replace(packing, microbatches=tuple(filled), blanks=packing.blanks + len(filled) - len(packing.microbatches))

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place; of truth values, whether any is true."""
        if tensor.dtype == torch.bool:
            counts = tensor.to(torch.uint8)
            dist.all_reduce(counts, dist.ReduceOp.MAX)
            return tensor.copy_(counts)
        dist.all_reduce(tensor)
        return tensor

    def largest(self, *numbers: float) -> tuple[float, ...]:
        """The largest of each number over all ranks."""
        return self._reduced(numbers, dist.ReduceOp.MAX)

    def total(self, *numbers: float) -> tuple[float, ...]:
        """The sum of each number over all ranks."""
        return self._reduced(numbers, dist.ReduceOp.SUM)

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor whose rows are spread over the ranks as those of parameters are."""
        spread: Tensor = empty(shape, dtype=dtype, device_mesh=self.mesh, placements=[Shard(0)])
        return spread

    def norm(self, shards: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        """The norm of all gradients together; those that each rank has whole count once."""
        squares = self.sum(sum_of_squares(shards, self.device)) + sum_of_squares(whole, self.device)
        return squares.sqrt().float()

    def _reduced(self, numbers: Sequence[float], how: dist.ReduceOp.RedOpType) -> tuple[float, ...]:
        found = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, how)
        return tuple(found.tolist())

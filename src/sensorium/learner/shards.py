"""A parameter of which this rank holds some rows (FSDP2's DTensor), and tensors that belong to it: moments, remainders.

    whole parameter [5, 8] on two ranks     rank 0 holds rows 0–2, rank 1 rows 3–4
    local_of(parameter)                     [3, 8] on rank 0: the rows themselves, to be written to
    spread_like(local, parameter)           a DTensor [5, 8] again, for a checkpoint
    part_for(whole, parameter)              the rows of a whole tensor that belong here

A whole parameter is its own only part, so what is written for shards also serves one process.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is spread over ranks. Asked without importing torch's distributed tensors, which takes a second."""
    return hasattr(tensor, "to_local")


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, not a copy."""
    shard: Any = tensor.detach()
    return shard.to_local() if is_sharded(tensor) else shard


def spread_like(local: Tensor, parameter: Tensor) -> Tensor:
    """The rows of a tensor that stand here, as the spread tensor that all ranks hold together."""
    if not is_sharded(parameter):
        return local
    from torch.distributed.tensor import DTensor

    sharded: Any = parameter
    spread: Tensor = DTensor.from_local(
        local,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )
    return spread


def part_for(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The rows of a tensor, whole or spread, that belong to what this rank holds of a parameter."""
    if is_sharded(tensor):
        return local_of(tensor) if is_sharded(parameter) else whole_of(tensor)
    if not is_sharded(parameter):
        return tensor
    sharded: Any = parameter
    mesh = sharded.device_mesh
    rows = -(-tensor.shape[0] // mesh.size())
    start = min(mesh.get_local_rank() * rows, tensor.shape[0])
    return tensor[start : start + rows]


def whole_of(tensor: Tensor) -> Tensor:
    """All rows of a tensor. Of a spread one every rank must ask at the same time."""
    spread: Any = tensor.detach()
    whole: Tensor = spread.full_tensor() if is_sharded(tensor) else spread
    return whole


def distinct_state(model: nn.Module) -> dict[str, Tensor]:
    """A model's state dict with tied weights once."""
    named = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return {name: tensor for name, tensor in model.state_dict().items() if name in named}


@torch.no_grad()
def copy_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give a model the parameters and buffers of a state dict, each of them whole or spread; tied ones may come twice."""
    own = distinct_state(model)
    if missing := own.keys() - state.keys():
        raise ValueError(f"a state of another model: it lacks {min(missing)}")
    for name, tensor in own.items():
        local_of(tensor).copy_(part_for(state[name], tensor))

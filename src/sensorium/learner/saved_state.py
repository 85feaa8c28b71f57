"""State on disk as plain containers, numbers, texts and tensors only, so that reading it cannot run anybody's code."""

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from sensorium.learner.team import ALONE, Team
from sensorium.runs.checkpoint_layout import LEARNER_SHARDS, LEARNER_STATE
from sensorium.vocabulary.errors import CheckpointError

PLAIN = (str, int, float, bool, type(None))


def save_state(state: Any, path: Path) -> None:
    """Write a state; whatever is not plain is a bug, since it could not be read back."""
    problem = not_plain(state, "state")
    assert not problem, problem
    torch.save(state, path)


def load_state(path: Path) -> Any:
    """A state as it was written, on the CPU. A file with anything else in it is refused before it is run."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"'{path}' holds Python objects, and reading those could run any code, so it is refused. An older version "
            "wrote such files: go on with that version, or start a new run from the weights beside it (model.path). If "
            "nobody here wrote it with an older version, do not trust it."
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"'{path}' cannot be read: {reason} Use an earlier checkpoint.") from error


def not_plain(state: Any, place: str) -> str:
    """Which part of a state is neither a plain value nor a tensor, in words; empty if all of it can be read back."""
    if isinstance(state, dict):
        strange = [key for key in state if not isinstance(key, PLAIN)]
        if strange:
            return f"{place} has the key {strange[0]!r}"
        return next(filter(None, (not_plain(value, f"{place}.{key}") for key, value in state.items())), "")
    if isinstance(state, list | tuple):
        return next(filter(None, (not_plain(value, f"{place}.{i}") for i, value in enumerate(state))), "")
    fits = type(state) in PLAIN or isinstance(state, Tensor)
    return "" if fits else f"{place} is {type(state).__name__}, which is not plain"


# whole parameter [5, 8] on two ranks rank 0 holds rows 0–2, rank 1 rows 3–4 local_of(parameter) [3, 8] on rank 0: the
# rows themselves, to be written to spread_like(local, parameter) a DTensor [5, 8] again, for a checkpoint
# part_for(whole, parameter) the rows of a whole tensor that belong here A whole parameter is its own only part, so what
# is written for shards also serves one process.


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


# Each rank writes its own rows (torch.distributed.checkpoint, as safetensors: reading them runs no code). Where a
# spread tensor stood in the state, ``learner.pt`` has its name. Whoever reads takes the rows it needs. So one process
# or four ranks go on from a checkpoint of two ranks, and any number from that of one process: state {"moments": {"w":
# {"exp_avg": DTensor}}} learner.pt {"moments": {"w": {"exp_avg": {"spread": "moments.w.exp_avg"}}}} shards/
# moments.w.exp_avg, some rows of it in each rank's file


MARK = "spread"


def write_learner_state(state: dict[str, Any], folder: Path, team: Team = ALONE) -> None:
    """Write a state into a folder. All ranks of a team call it together."""
    spread: dict[str, Tensor] = {}
    plain = _apart(state, "", spread)
    if spread:
        import torch.distributed.checkpoint as dcp

        writer = dcp.HuggingFaceStorageWriter(str(folder / LEARNER_SHARDS), save_distributed=True)
        dcp.save(spread, storage_writer=writer)
    if team.rank == 0:
        save_state(plain, folder / LEARNER_STATE)


def read_learner_state(folder: Path, team: Team = ALONE) -> Any:
    """A state as it was written; spread tensors are whole in one process, and spread over the ranks of a team."""
    state = load_state(folder / LEARNER_STATE)
    shards = folder / LEARNER_SHARDS
    return _together(state, _read_shards(shards, team)) if shards.is_dir() else state


def _apart(state: Any, place: str, spread: dict[str, Tensor]) -> Any:
    """The state with names where spread tensors stood; those are collected."""
    if isinstance(state, dict):
        return {key: _apart(value, f"{place}.{key}".lstrip("."), spread) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_apart(value, f"{place}.{i}", spread) for i, value in enumerate(state))
    if isinstance(state, Tensor) and is_sharded(state):
        spread[place] = state
        return {MARK: place}
    return state


def _together(state: Any, spread: dict[str, Tensor]) -> Any:
    if isinstance(state, dict):
        if set(state) == {MARK}:
            return spread[state[MARK]]
        return {key: _together(value, spread) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_together(value, spread) for value in state)
    return state


def _read_shards(folder: Path, team: Team) -> dict[str, Tensor]:
    import torch.distributed.checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(str(folder))
    try:
        known: dict[str, Any] = reader.read_metadata().state_dict_metadata
        tensors = {name: team.empty(told.size, told.properties.dtype) for name, told in known.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process reads what several wrote
            dcp.load(tensors, storage_reader=reader, no_dist=team.size == 1)
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError, dcp.api.CheckpointException) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"the shards in '{folder}' cannot be read: {reason} Use an earlier checkpoint.") from error
    return tensors

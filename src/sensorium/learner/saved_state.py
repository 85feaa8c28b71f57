"""A learner's state on disk: ``learner.pt`` with what is plain, and ``shards/`` with what was spread over ranks.

Each rank writes its own rows (torch.distributed.checkpoint, as safetensors: reading them runs no code). Where a spread
tensor stood in the state, ``learner.pt`` has its name. Whoever reads takes the rows it needs. So one process or four ranks
go on from a checkpoint of two ranks, and any number from that of one process:

    state         {"moments": {"w": {"exp_avg": DTensor}}}
    learner.pt    {"moments": {"w": {"exp_avg": {"spread": "moments.w.exp_avg"}}}}
    shards/       moments.w.exp_avg, some rows of it in each rank's file
"""

import warnings
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from sensorium.learner.plain_state import load_state, save_state
from sensorium.learner.shards import is_sharded
from sensorium.learner.team import ALONE, Team
from sensorium.vocabulary.errors import CheckpointError

STATE, SHARDS = "learner.pt", "shards"
MARK = "spread"


def write_learner_state(state: dict[str, Any], folder: Path, team: Team = ALONE) -> None:
    """Write a state into a folder. All ranks of a team call it together."""
    spread: dict[str, Tensor] = {}
    plain = _apart(state, "", spread)
    if spread:
        import torch.distributed.checkpoint as dcp

        writer = dcp.HuggingFaceStorageWriter(str(folder / SHARDS), save_distributed=True)
        dcp.save(spread, storage_writer=writer)
    if team.rank == 0:
        save_state(plain, folder / STATE)


def read_learner_state(folder: Path, team: Team = ALONE) -> Any:
    """A state as it was written; spread tensors are whole in one process, and spread over the ranks of a team."""
    state = load_state(folder / STATE)
    shards = folder / SHARDS
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

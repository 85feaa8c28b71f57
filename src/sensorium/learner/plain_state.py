"""State on disk as plain containers, numbers, texts and tensors only, so that reading it cannot run anybody's code."""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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

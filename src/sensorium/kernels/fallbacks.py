"""Fast ways to compute are held against a reference on first use; where one fails, the slower way is said and counted."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_taken: list[str] = []


@contextmanager
def trying() -> Iterator[None]:
    """Inside, gradients of a trial are computed. Where it is met in a forward pass that gradient checkpointing watches, its
    tensors are not taken for those of that pass, which would then differ from the one that is computed again.
    """
    with torch.enable_grad(), saved_tensors_hooks(_as_it_is, _as_it_is):
        yield


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def fall_back(reason: str) -> None:
    """Say that something is computed the slower way from now on, and why; counted for ``throughput/fallbacks``."""
    note_fallback(reason)
    warnings.warn(reason, stacklevel=3)


def note_fallback(reason: str) -> None:
    """Count a fallback that is said elsewhere."""
    _taken.append(reason)


def fallbacks() -> int:
    """How many fast ways this process has given up so far."""
    return len(_taken)


def given_up() -> tuple[str, ...]:
    """Why, for each of them."""
    return tuple(_taken)

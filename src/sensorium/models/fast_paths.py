"""Fast ways to compute are held against a reference on first use; where one fails, the slower way is said and counted."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

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


def largest_gap(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """How far tensors are off, relative to the largest value of each; no number, where one of them has one that is none."""
    gaps = [(one - other).abs().max() / other.abs().max() for one, other in zip(found, expected, strict=True)]
    return float(torch.stack(gaps).max())


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def fall_back(reason: str) -> None:
    """Say that something is computed the slower way from now on, and why; counted for ``throughput/fallbacks``."""
    note_fallback(reason)
    warnings.warn(reason, stacklevel=3)


@cache
def without_compiled_parts(reason: str) -> None:
    """Say, once, that nothing can be compiled for the CPU, and why."""
    fall_back(
        "the model computes without its compiled parts, so on the CPU updates are slower, by a third or more, and small "
        "models are sampled more slowly, up to three times. A run that was begun with compiled parts goes on from here "
        "with other last bits than it would have had. "
        f"{reason[:1].upper()}{reason[1:]}. To have compiled parts, install a C compiler (cc, gcc or clang), or name one "
        "by the environment variable CC."
    )


def note_fallback(reason: str) -> None:
    """Count a fallback that is said elsewhere."""
    _taken.append(reason)


def fallbacks() -> int:
    """How many fast ways this process has given up so far."""
    return len(_taken)


def given_up() -> tuple[str, ...]:
    """Why, for each of them."""
    return tuple(_taken)

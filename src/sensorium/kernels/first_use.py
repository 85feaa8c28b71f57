"""Fast ways to compute on their first use: they are held against a reference, and compiled.

Where one fails its trial, the slower way is reported and counted. Where several compile side by side, or one inside the
other, the time that went by counts once.
"""

import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

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


_lock = threading.Lock()
_under_way = 0
_begun = 0.0
_spent = 0.0
_told = 0.0


@contextmanager
def compiling() -> Iterator[None]:
    """What goes by inside is counted."""
    global _under_way, _begun, _spent
    with _lock:
        if not _under_way:
            _begun = time.perf_counter()
        _under_way += 1
    try:
        yield
    finally:
        with _lock:
            _under_way -= 1
            if not _under_way:
                _spent += time.perf_counter() - _begun


def compile_seconds() -> float:
    """Seconds so far, those under way among them."""
    with _lock:
        return _spent + (time.perf_counter() - _begun if _under_way else 0.0)


def take_untold_seconds(least: float) -> float:
    """Seconds since this was asked before, if they are as many as that; else 0, and they are told later."""
    global _told
    spent = compile_seconds()
    if spent - _told < least:
        return 0.0
    spent, _told = spent - _told, spent
    return spent


def count_triton() -> None:
    """From now on count what Triton compiles, too. What listens to it already is told as before."""
    with suppress(ImportError, AttributeError):  # no Triton, or one that nobody can listen to
        from triton import knobs

        before = knobs.compilation.listener
        if not isinstance(before, _TritonListener):
            knobs.compilation.listener = _TritonListener(before)


class _TritonListener:
    """Is told of each kernel after it was compiled, or found in Triton's cache."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, *, times: Any, cache_hit: bool, **told: Any) -> None:
        global _spent
        if not cache_hit:
            with _lock:
                if not _under_way:  # else it is counted as a part of that
                    _spent += times.total / 1e6
        if self._before is not None:
            self._before(times=times, cache_hit=cache_hit, **told)

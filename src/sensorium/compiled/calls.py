"""Calls of the compiled functions, which take the address of a structure and a number of threads."""

from ctypes import Structure, byref, c_int64, c_void_p

import torch
from torch import Tensor

from sensorium.compiled.library import load_library


def pointers(names: str) -> list[tuple[str, type]]:
    """Fields of a structure that hold a tensor's address, or NULL."""
    return [(name, c_void_p) for name in names.split()]


def sizes(names: str) -> list[tuple[str, type]]:
    """Fields of a structure that hold integers."""
    return [(name, c_int64) for name in names.split()]


def addresses(*tensors: Tensor | None) -> tuple[int | None, ...]:
    """Where tensors lie; they must be contiguous, and outlive the call."""
    return tuple(None if tensor is None else tensor.data_ptr() for tensor in tensors)


def threads_for(work: int, of_a_thread: int) -> int:
    """How many of torch's threads some work is worth."""
    return max(1, min(torch.get_num_threads(), work // of_a_thread))


def call(name: str, given: Structure, threads: int) -> None:
    """Run a function. Raises NoLibrary where nothing can be compiled."""
    getattr(load_library(), name)(byref(given), c_int64(threads))

"""What is asked of a checkpoint's weights before they are read: all files there and whole, and room for them in memory."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from sensorium.models.quiet import quiet
from sensorium.models.weight_files import StoredTensor, weight_files
from sensorium.vocabulary.errors import ModelError

GIB = 1 << 30
LONG_LOAD = 4 * GIB
"""Bytes from which on a load is announced: it takes longer than one waits without a word."""

NOT_LOADED = ("talker.", "token2wav.", "code2wav.")


def check_weights(path: str, folder: Path, dtype: torch.dtype, device: torch.device) -> int:
    """Refuse weights that are not whole or do not fit into memory, by headers alone; returns their bytes in memory."""
    try:
        files = weight_files(folder)
    except ModelError as error:
        raise ModelError(f"model.path '{path}': {error}") from error
    tensors = [tensor for file in files for tensor in file.tensors if not tensor.name.startswith(NOT_LOADED)]
    needed = bytes_of(tensors, dtype)
    if device.type == "cuda":
        _refuse_too_large(path, needed, torch.cuda.mem_get_info(device)[0], f"memory of {device}", dtype)
    elif (free := free_memory()) is not None:
        _refuse_too_large(path, needed, free, "memory of this machine", dtype)
    return needed


@contextmanager
def announced(size: int, place: str) -> Iterator[None]:
    """Say that a long load begins, with a progress bar at a terminal; nothing of a short one."""
    from transformers.utils import logging

    if size < LONG_LOAD:
        with quiet():
            yield
        return
    print(f"loading {size / GIB:.1f} GiB of weights from {place} …", file=sys.stderr, flush=True)
    with quiet():  # puts back afterwards what is set here
        if sys.stderr.isatty():
            logging.enable_progress_bar()
        yield


def bytes_of(tensors: list[StoredTensor], dtype: torch.dtype) -> int:
    """What tensors take in memory as ``dtype``."""
    return sum(math.prod(tensor.shape) for tensor in tensors) * dtype.itemsize


def free_memory() -> int | None:
    """Bytes that a process may still take, swap included, within the limit of its container; None if nobody says."""
    found = _meminfo(Path("/proc/meminfo"))
    bounds = [found["MemAvailable"] + found.get("SwapFree", 0)] if "MemAvailable" in found else []
    bounds += _container_room(Path("/sys/fs/cgroup"))
    return min(bounds, default=None)


def _meminfo(file: Path) -> dict[str, int]:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    return {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}


def _container_room(folder: Path) -> list[int]:
    """What the limit of a container leaves, files that are only cached not counted; empty where there is no limit."""
    try:
        limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return [limit - used + int(statistics.get("inactive_file", 0)) + int(statistics.get("active_file", 0))]
    except (OSError, ValueError):  # no cgroups of version 2, or 'max'
        return []


def _refuse_too_large(path: str, needed: int, free: int, place: str, dtype: torch.dtype) -> None:
    if needed > free:
        half = ", model.dtype: bfloat16 (half as much)" if dtype == torch.float32 else ""
        raise ModelError(
            f"model.path '{path}': its weights take {needed / GIB:.2f} GiB as {str(dtype).removeprefix('torch.')}, and "
            f"{free / GIB:.2f} GiB are free in the {place}; training takes more than the weights. Use a smaller "
            f"checkpoint{half}, or a larger machine."
        )

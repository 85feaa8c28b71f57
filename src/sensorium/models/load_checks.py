"""What is asked of a checkpoint's weights before they are read: all files there and whole, and room for them in memory."""

import math
import sys
from pathlib import Path

import torch

from sensorium.models.weight_files import StoredTensor, weight_files
from sensorium.vocabulary.errors import ModelError

GIB = 1 << 30
LONG_LOAD = 4 * GIB
"""Bytes from which on a load is announced: it takes longer than one waits without a word."""

NOT_LOADED = ("talker.", "token2wav.", "code2wav.")


def check_weights(path: str, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse weights that are not whole or do not fit into memory, by headers alone; announce a long load."""
    files = weight_files(folder)
    tensors = [tensor for file in files for tensor in file.tensors if not tensor.name.startswith(NOT_LOADED)]
    needed = bytes_of(tensors, dtype)
    free = free_memory()
    if device.type == "cuda":
        _refuse_too_large(path, needed, torch.cuda.mem_get_info(device)[0], f"memory of {device}", dtype)
    if free is not None:
        _refuse_too_large(path, needed, free, "memory of this machine", dtype)
    if needed >= LONG_LOAD:
        print(
            f"loading {needed / GIB:.1f} GiB of weights in {len(files)} files from {folder} …", file=sys.stderr, flush=True
        )


def bytes_of(tensors: list[StoredTensor], dtype: torch.dtype) -> int:
    """What tensors take in memory as ``dtype``."""
    return sum(math.prod(tensor.shape) for tensor in tensors) * dtype.itemsize


def free_memory() -> int | None:
    """Bytes that a process may still take, swap included; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
    return found["MemAvailable"] + found.get("SwapFree", 0) if "MemAvailable" in found else None


def _refuse_too_large(path: str, needed: int, free: int, place: str, dtype: torch.dtype) -> None:
    if needed > free:
        half = ", model.dtype: bfloat16 (half as much)" if dtype == torch.float32 else ""
        raise ModelError(
            f"model.path '{path}': its weights take {needed / GIB:.2f} GiB as {str(dtype).removeprefix('torch.')}, and "
            f"{free / GIB:.2f} GiB are free in the {place}; training takes more than the weights. Use a smaller "
            f"checkpoint{half}, or a larger machine."
        )

"""What is asked of a checkpoint's weights: files that are there and whole, room in memory, and that they fit the config."""

import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sensorium.models.quiet import quiet
from sensorium.models.weight_files import StoredTensor, WeightFile, common_name, weight_files
from sensorium.recipe.unloaded_weights import is_unloaded, part_of, told_by_part
from sensorium.vocabulary.errors import ModelError

GIB = 1 << 30
LONG_LOAD = 4 * GIB
"""Bytes from which on a load is announced: it takes longer than one waits without a word."""


def whole_weights(path: str, folder: Path) -> list[WeightFile]:
    """The weight files of a checkpoint by their headers; refused if one is missing or not whole."""
    try:
        return weight_files(folder)
    except ModelError as error:
        raise ModelError(f"model.path '{path}': {error}") from error


def check_memory(
    path: str, files: Sequence[WeightFile], dtype: torch.dtype, device: torch.device, unused: Sequence[str] = ()
) -> int:
    """Refuse weights that do not fit into memory, by headers alone; returns their bytes there."""
    needed = bytes_of([t for file in files for t in file.tensors if not is_unloaded(t.name, unused)], dtype)
    if device.type == "cuda":
        _refuse_too_large(path, needed, torch.cuda.mem_get_info(device)[0], f"memory of {device}", dtype)
    elif (free := free_memory()) is not None:
        _refuse_too_large(path, needed, free, "memory of this machine", dtype)
    return needed


def refuse_unfit(path: str, report: Mapping[str, Any], files: Sequence[WeightFile], unused: Sequence[str]) -> None:
    """Refuse weights that are not those of the config, by the report of a load: other shapes, too few, too many."""
    if report["mismatched_keys"]:
        name, there, wanted = sorted(report["mismatched_keys"])[0]
        raise ModelError(
            f"model.path '{path}': weights and config.json disagree on {len(report['mismatched_keys'])} shapes: {name} is "
            f"{list(there)} in the weights and {list(wanted)} by the config. Use the config that belongs to the weights."
        )
    if missing := report["missing_keys"]:
        raise ModelError(
            f"model.path '{path}': the checkpoint lacks {len(missing)} weights that its config.json asks for: "
            f"{told_by_part(missing)}. Use the config that belongs to the weights, or download the checkpoint again."
        )
    stored = {common_name(tensor.name): tensor.name for file in files for tensor in file.tensors}
    strange = {stored.get(common_name(key), key) for key in report["unexpected_keys"]}  # by their names in the files
    kinds = {_kind(name) for name in stored.values() if name not in strange}
    if layers := [name for name in strange if _kind(name) in kinds]:
        raise ModelError(
            f"model.path '{path}': {len(layers)} weights of the checkpoint have no place in the model that its config.json "
            f"describes, which has fewer layers or experts of the same kind: {told_by_part(layers)}. Use the config that "
            "belongs to the weights."
        )
    if others := [name for name in strange if not is_unloaded(name, unused)]:
        raise ModelError(
            f"model.path '{path}': {len(others)} weights of the checkpoint have no place in the model that its config.json "
            f"describes: {told_by_part(others)}. Use the config that belongs to the weights. If they are no part of the "
            f"model, name them by their first letters: model.unused_weights: ['{part_of(min(others))}.'] (in Python "
            "unused_weights=…, to serve --unused-weights). They are then left out, and an export carries them along."
        )


def refuse_not_finite(path: str, model: torch.nn.Module) -> None:
    """Refuse weights with NaN or infinity in them: nothing that such a model computes means anything."""
    broken = [
        name
        for name, weight in model.named_parameters()
        if weight.numel() and not all(bound.isfinite() for bound in torch.aminmax(weight.detach()))
    ]
    if broken:
        raise ModelError(
            f"model.path '{path}': {len(broken)} weights of the checkpoint hold numbers that are not finite: "
            f"{told_by_part(broken)}. It was saved after its training had failed, or damaged since; use another copy or an "
            "earlier checkpoint."
        )


def _kind(name: str) -> str:
    """A weight's name without the numbers of layers and experts."""
    return re.sub(r"\b\d+\b", "N", common_name(name))


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

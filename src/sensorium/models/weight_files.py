"""The weight files of a checkpoint by their headers: what they hold, and whether they are all there and whole.

A safetensors file is eight bytes (the length of the header), the header (JSON: of each tensor its dtype, shape and place)
and the tensors' bytes without gaps, so that headers alone tell of a file cut short.
"""

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from shutil import copymode
from typing import Any

import torch
from safetensors import SafetensorError

from sensorium.models.quiet import quiet
from sensorium.recipe.family_facts import is_unloaded
from sensorium.recipe.shape import LONGEST_HEADER, part_of, told_by_part
from sensorium.vocabulary.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LENGTH = 8
WIDTHS = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1, "BOOL": 1}
"""Bytes of a number, by the header's word for it."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a header describes it; ``start`` counts from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    def refuse_other_size(self, size: int) -> None:
        """Refuse bytes that do not fill its place: the weights behind it would be overwritten or shifted."""
        if size != self.size:
            raise ModelError(f"{self.name} has {size} bytes, and its place in the weight file has {self.size}.")


@dataclass(frozen=True)
class WeightFile:
    """A weight file: ``header`` as it stands in it, its length before it, and the tensors in the order of their bytes."""

    path: Path
    header: bytes
    tensors: tuple[StoredTensor, ...]

    def bytes_of(self, tensor: StoredTensor) -> bytes:
        """The bytes of one of its tensors."""
        with self.path.open("rb") as file:
            file.seek(tensor.start)
            return file.read(tensor.size)

    def write_like(self, target: Path, content: Callable[[StoredTensor], bytes | memoryview]) -> None:
        """Write a file with the same header and other contents, one tensor in memory at a time."""
        with target.open("wb") as file:
            file.write(self.header)
            for tensor in self.tensors:
                data = content(tensor)
                tensor.refuse_other_size(len(data))
                file.write(data)

    def overwrite(self, tensor: StoredTensor, data: bytes | memoryview) -> None:
        """Put other bytes in the place of a tensor's."""
        tensor.refuse_other_size(len(data))
        with self.path.open("r+b") as file:
            file.seek(tensor.start)
            file.write(data)


def weight_files(folder: Path) -> list[WeightFile]:
    """The weight files that transformers would load of a folder; a missing or damaged one is refused by name."""
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file() or not index.is_file():
        if not single.is_file():
            if shards := sorted(path.name for path in folder.glob("model-*-of-*.safetensors")):
                raise ModelError(
                    f"'{folder}' has {len(shards)} shards ({shards[0]}, …) and lacks '{INDEX}', which says which weight is "
                    "in which of them. Copy or download it again."
                )
            raise ModelError(
                f"'{folder}' has no weights as safetensors ({SINGLE}, or shards with {INDEX}), and no other kind is read "
                "(pickles can run code). Save it as safetensors."
            )
        return [read_weight_file(single)]
    try:
        shards = sorted(set(json.loads(_readable(index))["weight_map"].values()))
        if not shards or not all(isinstance(shard, str) for shard in shards):
            raise TypeError("no names of files")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"'{index}' is damaged: it does not say which weight is in which file. Copy it again.") from error
    if strange := [shard for shard in shards if Path(shard).name != shard]:
        raise ModelError(f"'{index}' is damaged: it names '{strange[0]}', which is no file of its folder. Copy it again.")
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ModelError(
            f"'{folder}' lacks {len(missing)} of {len(shards)} weight files: {', '.join(missing[:3])}"
            f"{', …' if len(missing) > 3 else ''}. Copy or download them again."
        )
    return [read_weight_file(folder / shard) for shard in shards]


def read_weight_file(path: Path) -> WeightFile:
    """A weight file's header; one that is cut short or damaged is refused."""
    size = path.stat().st_size
    start = _readable(path, LENGTH)
    length = int.from_bytes(start, "little")
    if len(start) < LENGTH or length > size - LENGTH:
        raise _damaged(path, "its header is not whole")
    if length > LONGEST_HEADER:
        raise _damaged(path, f"its header is said to have {length} bytes, and none has more than {LONGEST_HEADER}")
    header = _readable(path, LENGTH + length)[LENGTH:]
    begin = LENGTH + length
    try:
        entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        tensors = [
            StoredTensor(name, entry["dtype"], tuple(entry["shape"]), begin + first, last - first)
            for name, entry in entries.items()
            for first, last in [entry["data_offsets"]]
            if _plain(entry["dtype"], [*entry["shape"], first, last])
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, "its header cannot be read") from error
    tensors.sort(key=lambda tensor: (tensor.start, tensor.size))
    end = begin
    for tensor in tensors:
        width = WIDTHS.get(tensor.dtype)
        if tensor.start != end or (width is not None and tensor.size != prod(tensor.shape) * width):
            raise _damaged(path, f"its header gives {tensor.name} a place that does not fit it")
        end += tensor.size
    if end != size:
        raise _damaged(path, f"it has {size} bytes instead of {end}")
    return WeightFile(path, start + header, tuple(tensors))


def _plain(dtype: object, numbers: list[object]) -> bool:
    """True; a dtype that is no text, or a size or place that is no whole number from 0 on, is a ``TypeError``."""
    if not isinstance(dtype, str) or not all(type(number) is int and number >= 0 for number in numbers):
        raise TypeError("no text, or no whole number")
    return True


def _readable(path: Path, most: int = -1) -> bytes:
    """The first bytes of a file, or all of them; one that cannot be read is refused with the system's word for why."""
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError as error:
        raise ModelError(f"cannot read '{path}': {error.strerror}.") from error


def _damaged(path: Path, reason: str) -> ModelError:
    return ModelError(f"the weight file '{path}' is cut short or damaged: {reason}. Copy or download it again.")


@contextmanager
def saving_weights(folder: Path) -> Iterator[None]:
    """Weights are saved into ``folder`` inside: safetensors' words for a full disk become the system's error, and whoever
    may read the config beside them may read them (safetensors writes for the owner alone)."""
    try:
        yield
    except SafetensorError as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(folder)) from error
    config = next(folder.glob("*config.json"))
    for path in folder.glob("*.safetensors"):
        copymode(config, path)


def common_name(name: str) -> str:
    """A weight's name without the prefixes that the versions of a layout put before it."""
    return re.sub(r"^(thinker\.)?((language_)?model\.)*", "", name).replace("vision_tower.vision_model.", "vision_tower.")


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

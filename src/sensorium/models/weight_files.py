"""The weight files of a checkpoint by their headers: what they hold, whether they are complete, and whether they fit.

A safetensors file is eight bytes (the length of the header), the header (JSON: dtype, shape and offsets of each tensor)
and the tensors' bytes without gaps, so the header alone shows that a file was cut short.
"""

import json
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
STORED = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
GIB = 1 << 30
LONG_LOAD = 4 * GIB  # loads of at least so many bytes are announced


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a header describes it; ``start`` counts from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    def refuse_other_size(self, size: int) -> None:
        """Refuse bytes of another length: they would overwrite or shift the weights after this one."""
        if size != self.size:
            raise ModelError(f"{self.name} has {size} bytes, and the weight file has {self.size} bytes for it.")


@dataclass(frozen=True)
class WeightFile:
    """A weight file: its first bytes up to the end of the header, and the tensors in the order of their bytes."""

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
        """Replace the bytes of a tensor."""
        tensor.refuse_other_size(len(data))
        with self.path.open("r+b") as file:
            file.seek(tensor.start)
            file.write(data)


def weight_files(folder: Path) -> list[WeightFile]:
    """The weight files that transformers would load from a folder; a missing or damaged one is refused by name."""
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        return [read_weight_file(single)]
    if not index.is_file():
        if shards := sorted(path.name for path in folder.glob("model-*-of-*.safetensors")):
            raise ModelError(
                f"'{folder}' has {len(shards)} shards ({shards[0]}, …) and lacks '{INDEX}', which lists the weights of "
                "each. Copy or download it again."
            )
        raise ModelError(
            f"'{folder}' has no weights as safetensors ({SINGLE}, or shards with {INDEX}), and no other kind is read "
            "(pickles can run code). Save it as safetensors."
        )
    try:
        shards = sorted(set(json.loads(_read(index))["weight_map"].values()))
        if not shards or not all(isinstance(shard, str) for shard in shards):
            raise TypeError("no file names")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"'{index}' is damaged: it does not name the file of each weight. Copy it again.") from error
    if outside := [shard for shard in shards if Path(shard).name != shard]:
        raise ModelError(f"'{index}' is damaged: it names '{outside[0]}', which is no file of its folder. Copy it again.")
    if missing := [shard for shard in shards if not (folder / shard).is_file()]:
        raise ModelError(
            f"'{folder}' lacks {len(missing)} of {len(shards)} weight files: {', '.join(missing[:3])}"
            f"{', …' if len(missing) > 3 else ''}. Copy or download them again."
        )
    return [read_weight_file(folder / shard) for shard in shards]


def whole_weights(path: str, folder: Path) -> list[WeightFile]:
    """``weight_files`` of a model path, whose errors name the path."""
    try:
        return weight_files(folder)
    except ModelError as error:
        raise ModelError(f"model.path '{path}': {error}") from error


def read_weight_file(path: Path) -> WeightFile:
    """A weight file's header; a file that is cut short or damaged is refused."""

    def damaged(reason: str) -> ModelError:
        return ModelError(f"the weight file '{path}' is cut short or damaged: {reason}. Copy or download it again.")

    size = path.stat().st_size
    start = _read(path, LENGTH)
    length = int.from_bytes(start, "little")
    begin = end = LENGTH + length
    if len(start) < LENGTH or begin > size:
        raise damaged("its header is incomplete")
    if length > LONGEST_HEADER:
        raise damaged(f"it gives its header {length} bytes, and no header has more than {LONGEST_HEADER}")
    header = _read(path, begin)
    tensors = []
    try:
        for name, entry in json.loads(header[LENGTH:]).items():
            if name == "__metadata__":
                continue
            dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            if not isinstance(dtype, str) or not all(
                type(number) is int and number >= 0 for number in (*shape, first, last)
            ):
                raise TypeError("dtypes are text, sizes and offsets whole numbers")
            tensors.append(StoredTensor(name, dtype, shape, begin + first, last - first))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged("its header cannot be read") from error
    tensors.sort(key=lambda tensor: (tensor.start, tensor.size))
    for tensor in tensors:
        fits = tensor.dtype not in STORED or tensor.size == prod(tensor.shape) * STORED[tensor.dtype].itemsize
        if tensor.start != end or not fits:
            raise damaged(f"its header gives {tensor.name} an offset or a size that does not fit")
        end += tensor.size
    if end != size:
        raise damaged(f"it has {size} bytes instead of {end}")
    return WeightFile(path, header, tuple(tensors))


def _read(path: Path, most: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError as error:
        raise ModelError(f"cannot read '{path}': {error.strerror}.") from error


@contextmanager
def saving_weights(folder: Path) -> Iterator[None]:
    """Inside, weights are saved into ``folder``. A full disk is an OSError, as elsewhere, and weights are as readable
    as the config beside them (safetensors writes for the owner alone)."""
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
    """A weight's name without the prefixes that differ between versions of a layout."""
    return re.sub(r"^(thinker\.)?((language_)?model\.)*", "", name).replace("vision_tower.vision_model.", "vision_tower.")


def check_memory(
    path: str, files: Sequence[WeightFile], dtype: torch.dtype, device: torch.device, unused: Sequence[str] = ()
) -> int:
    """Refuse weights that do not fit into memory, by headers alone; returns their bytes in memory."""
    numbers = sum(prod(tensor.shape) for file in files for tensor in file.tensors if not is_unloaded(tensor.name, unused))
    needed = numbers * dtype.itemsize
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else free_memory()
    if free is not None and needed > free:
        half = ", model.dtype: bfloat16 (half as much)" if dtype == torch.float32 else ""
        raise ModelError(
            f"model.path '{path}': its weights take {needed / GIB:.2f} GiB as {str(dtype).removeprefix('torch.')}, and "
            f"{free / GIB:.2f} GiB are free in the memory of {device if on_gpu else 'this machine'}; training takes more "
            f"than the weights. Use a smaller checkpoint{half}, or a larger machine."
        )
    return needed


def refuse_unfit(path: str, report: Mapping[str, Any], files: Sequence[WeightFile], unused: Sequence[str]) -> None:
    """Refuse weights that do not match the config, by transformers' loading report: other shapes, too few, too many."""
    if report["mismatched_keys"]:
        name, stored_shape, wanted = sorted(report["mismatched_keys"])[0]
        raise ModelError(
            f"model.path '{path}': weights and config.json disagree on {len(report['mismatched_keys'])} shapes: {name} is "
            f"{list(stored_shape)} in the weights and {list(wanted)} by the config. Use the config that belongs to the "
            "weights."
        )
    if missing := report["missing_keys"]:
        raise ModelError(
            f"model.path '{path}': the checkpoint lacks {len(missing)} weights that its config.json asks for: "
            f"{told_by_part(missing)}. Use the config that belongs to the weights, or download the checkpoint again."
        )
    stored = {common_name(tensor.name): tensor.name for file in files for tensor in file.tensors}
    unexpected = {stored.get(common_name(key), key) for key in report["unexpected_keys"]}  # by their names in the files

    def kind(name: str) -> str:
        return re.sub(r"\b\d+\b", "N", common_name(name))  # without the numbers of layers and experts

    kinds = {kind(name) for name in stored.values() if name not in unexpected}
    if layers := [name for name in unexpected if kind(name) in kinds]:
        raise ModelError(
            f"model.path '{path}': {len(layers)} weights of the checkpoint have no place in the model that its config.json "
            f"describes, which has fewer layers or experts of the same kind: {told_by_part(layers)}. Use the config that "
            "belongs to the weights."
        )
    if others := [name for name in unexpected if not is_unloaded(name, unused)]:
        raise ModelError(
            f"model.path '{path}': {len(others)} weights of the checkpoint have no place in the model that its config.json "
            f"describes: {told_by_part(others)}. Use the config that belongs to the weights. If they are no part of the "
            f"model, name their prefixes: model.unused_weights: ['{part_of(min(others))}.'] (in Python unused_weights=…, "
            "to serve --unused-weights). They are then not loaded, and an export carries them along."
        )


def refuse_not_finite(path: str, model: torch.nn.Module) -> None:
    """Refuse weights with NaN or infinity in them."""
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


@contextmanager
def announced(size: int, folder: str) -> Iterator[None]:
    """Print that a long load begins, with a progress bar at a terminal; a short one prints nothing."""
    from transformers.utils import logging

    with quiet():  # restores what is set here
        if size >= LONG_LOAD:
            print(f"loading {size / GIB:.1f} GiB of weights from {folder} …", file=sys.stderr, flush=True)
            if sys.stderr.isatty():
                logging.enable_progress_bar()
        yield


def free_memory() -> int | None:
    """Bytes that a process may still take, swap included, within the limit of its container; None if unknown."""
    bounds = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
        bounds.append(found["MemAvailable"] + found.get("SwapFree", 0))
    except (OSError, KeyError):
        pass
    container = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((container / name).read_text()) for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (container / "memory.stat").read_text().splitlines())
        cached = int(statistics.get("inactive_file", 0)) + int(statistics.get("active_file", 0))
        bounds.append(limit - used + cached)
    except (OSError, ValueError):  # no cgroups of version 2, or no limit ('max')
        pass
    return min(bounds, default=None)

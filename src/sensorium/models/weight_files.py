"""The weight files of a checkpoint by their headers: what they hold, and whether they are complete.

A safetensors file is eight bytes (the length of the header), the header (JSON: dtype, shape and offsets of each tensor)
and the tensors' bytes without gaps, so the header alone shows that a file was cut short.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from shutil import copymode

import torch
from safetensors import SafetensorError

from sensorium.recipe.model_shape import LONGEST_HEADER
from sensorium.vocabulary.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LENGTH = 8
STORED = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip


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

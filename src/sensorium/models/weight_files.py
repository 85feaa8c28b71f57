"""The weight files of a checkpoint by their headers: what they hold, and whether they are all there and whole.

A safetensors file is eight bytes (the length of the header), the header (JSON: of each tensor its dtype, shape and place)
and the tensors' bytes without gaps, so that headers alone tell of a file cut short.
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

from safetensors import SafetensorError

from sensorium.recipe.shape import LONGEST_HEADER
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
    name = name.removeprefix("thinker.").removeprefix("model.").removeprefix("language_model.").removeprefix("model.")
    return name.replace("vision_tower.vision_model.", "vision_tower.")

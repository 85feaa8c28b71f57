"""Tensors for another process: in a file that its reader or its writer deletes."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from sensorium.vocabulary.errors import EngineError
from sensorium.workers.memory_folder import memory_folder


def write_tensors(tensors: Mapping[str, Tensor], what: str = "weights", folder: Path | None = None) -> Path:
    """A safetensors file in ``folder``; without one in shared memory, where there is room for it."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    handle, name = tempfile.mkstemp(".safetensors", f"sensorium-{what}-", folder or memory_folder(size))
    os.close(handle)
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, name)
    except Exception as error:
        Path(name).unlink(missing_ok=True)
        raise EngineError(
            f"the {what} ({size / 2**30:.1f} GiB) cannot be handed to the engine process by '{name}': {error}. Make room "
            "there, or set TMPDIR to a disk that has some."
        ) from error
    return Path(name)

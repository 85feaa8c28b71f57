"""Tensors for another process: in a file that its reader or its writer deletes."""

import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from sensorium.vocabulary.errors import RecordError
from sensorium.workers.own_folder import memory_folder


def write_tensors(tensors: Mapping[str, Tensor], what: str = "weights", folder: Path | None = None) -> Path:
    """A safetensors file in ``folder``; without one in shared memory, where there is room for it.

    One that cannot be written is no fault of an episode, and would fail all that follow: the RecordError ends the run.
    """
    size = sum(tensor.nbytes for tensor in tensors.values())
    place = str(folder or memory_folder(size) or tempfile.gettempdir())
    file = None
    try:
        handle, file = tempfile.mkstemp(".safetensors", f"sensorium-{what}-", place)
        os.close(handle)
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, file)
    except Exception as error:
        if file is not None:
            with suppress(OSError):
                os.unlink(file)
        raise RecordError(
            f"the {what} ({size / 2**20:,.1f} MiB) cannot be handed to the engine process by a file in '{place}': {error}. "
            "Make room there, or set TMPDIR to a disk that has some. A run that has begun goes on with --resume."
        ) from error
    return Path(file)

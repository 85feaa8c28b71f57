"""How pushed weights get into vLLM's workers: by a file, by broadcast, or as memory of a GPU that both processes are on."""

import base64
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sensorium.engines.tensor_files import write_tensors
from sensorium.engines.vllm.weight_backend import BROADCAST, FILE
from sensorium.engines.vllm.weights import PushedWeights
from sensorium.engines.weight_group import WeightSender


@contextmanager
def pushed_by(
    backend: str, weights: PushedWeights, folder: Path | None = None, sender: WeightSender | None = None
) -> Iterator[dict[str, Any]]:
    """What the backend's workers are told; inside, what they read is there: in ``folder``, on this machine, or sent."""
    if backend == BROADCAST:
        assert sender is not None
        with sender.sending(weights.tensors) as described:
            plain = [[one.name, one.dtype, list(one.shape)] for one in described]
            yield {"tensors": plain, "aliases": weights.aliases}
        return
    if backend == FILE:
        file = write_tensors(weights.tensors, folder=folder)
        try:
            yield {"file": str(file), "aliases": weights.aliases}
        finally:
            file.unlink(missing_ok=True)
        return
    tensors = {name: tensor.detach().contiguous() for name, tensor in weights.tensors.items()}
    yield {"handles": shared_memory(tensors), "aliases": weights.aliases}
    del tensors  # the workers have copied them


def shared_memory(tensors: dict[str, torch.Tensor]) -> str:
    """For each tensor on a GPU its name and the handle by which another process opens its memory; pickled, as text."""
    from torch.multiprocessing.reductions import reduce_tensor

    torch.cuda.synchronize()
    handles = []
    for name, tensor in tensors.items():
        gpu = str(torch.cuda.get_device_properties(tensor.device).uuid)
        handles.append((name, {gpu: reduce_tensor(tensor)[1]}))
    return base64.b64encode(pickle.dumps(handles)).decode()

"""Backends of ours for vLLM's weight transfer: by a file, by broadcast (``engines/weight_group``), as memory of one GPU.

vLLM has none for CPUs, and its own for memory of a GPU imports Ray in 0.25. ``register`` is an entry point of the group
``vllm.general_plugins``, which vLLM calls in each of its processes.
"""

import base64
import pickle
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

FILE, BROADCAST, SHARED = "sensorium_file", "sensorium_broadcast", "sensorium_shared_memory"
DEVICE_OF_HANDLE = 6
"""Where the arguments of torch's ``rebuild_cuda_tensor`` have the number of the GPU, which is each process's own."""


def register() -> None:
    """Make the backends known to vLLM in this process."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    @dataclass
    class FileInit(WeightTransferInitInfo):
        """Nothing is agreed on beforehand."""

    @dataclass
    class FileUpdate(WeightTransferUpdateInfo):
        """A safetensors file, and names that stand for a tensor of it beside its own: a head that is tied."""

        file: str
        aliases: dict[str, str] = field(default_factory=dict)

    @dataclass
    class BroadcastInit(WeightTransferInitInfo):
        """Where sender and workers meet: the fields of a ``Meeting``."""

        meeting: dict[str, Any]

    @dataclass
    class BroadcastUpdate(WeightTransferUpdateInfo):
        """The tensors that come, each by name, dtype and shape, and names that stand for one of them."""

        tensors: list[list[Any]]
        aliases: dict[str, str] = field(default_factory=dict)

    @dataclass
    class SharedUpdate(WeightTransferUpdateInfo):
        """Handles of tensors in GPU memory, pickled: a list of name, and arguments of ``rebuild_cuda_tensor`` by GPU."""

        handles: str
        aliases: dict[str, str] = field(default_factory=dict)

    class LayerwiseWeights(WeightTransferEngine):
        """Loads checkpoint tensors. One layerwise reload spans a push."""

        def start_weight_update(self) -> None:
            """From here to the end of the push, layers wait on the meta device: no request may run."""
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

        def finish_weight_update(self) -> None:
            """Layers that got nothing take their old weights back."""
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            """Load what comes; the base class would wait for an accelerator, which there may not be."""
            self.receive_weights(self.parse_update_info(update_info))

        @staticmethod
        def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
            """vLLM 0.25 asks for it of every backend; here the sender is ``transfers.pushed_by``."""
            raise NotImplementedError("weights are sent by sensorium.engines.vllm.weights.pushed_by.")

        def load(self, tensors: dict[str, Any], aliases: dict[str, str]) -> None:
            """Load tensors, those that are known by another name too under both."""
            also = {name: tensors[of] for name, of in aliases.items() if of in tensors}
            self.model.load_weights([*tensors.items(), *also.items()])

    class FileWeights(LayerwiseWeights):
        """Weights from files."""

        init_info_cls = FileInit
        update_info_cls = FileUpdate

        def init_transfer_engine(self, init_info: Any) -> None:
            """Nothing to connect."""

        def receive_weights(self, update_info: Any) -> None:
            """Load one file."""
            from safetensors.torch import load_file

            self.load(load_file(update_info.file, device=str(self.device)), update_info.aliases)

        def shutdown(self) -> None:
            """Nothing is held."""

    class BroadcastWeights(LayerwiseWeights):
        """Weights that one sender broadcasts to all workers."""

        init_info_cls = BroadcastInit
        update_info_cls = BroadcastUpdate

        def init_transfer_engine(self, init_info: Any) -> None:
            """Join the sender's group, as a worker of this rank."""
            from sensorium.engines.weight_group import Meeting, WeightReceiver

            parallel = self.parallel_config
            place = getattr(parallel, "data_parallel_index", 0) * parallel.world_size + parallel.rank
            self.receiver = WeightReceiver(Meeting(**init_info.meeting), 1 + place)

        def receive_weights(self, update_info: Any) -> None:
            """Load tensors as they come."""
            from sensorium.engines.weight_group import Described

            described = [Described(name, dtype, tuple(shape)) for name, dtype, shape in update_info.tensors]
            for tensors in self.receiver.receive(described, self.device):
                self.load(tensors, update_info.aliases)

        def shutdown(self) -> None:
            """Leave the group."""
            if hasattr(self, "receiver"):
                self.receiver.close()

    class SharedWeights(LayerwiseWeights):
        """Weights read where the learner has them: on the GPU that both processes are on."""

        init_info_cls = FileInit
        update_info_cls = SharedUpdate

        def init_transfer_engine(self, init_info: Any) -> None:
            """Nothing to connect."""

        def receive_weights(self, update_info: Any) -> None:
            """Open the memory and copy from it."""
            import torch

            opened = open_handles(update_info.handles, self.device)
            self.load(opened, update_info.aliases)
            torch.cuda.synchronize(self.device)

        def shutdown(self) -> None:
            """Nothing is held."""

    for name, backend in ((FILE, FileWeights), (BROADCAST, BroadcastWeights), (SHARED, SharedWeights)):
        with suppress(ValueError):  # known already: an installed package and a folder on the path both name the entry point
            WeightTransferEngineFactory.register_engine(name, backend)


def open_handles(handles: str, device: Any) -> dict[str, Any]:
    """Tensors of another process, by their handles (``transfers.shared_memory``), on the GPU that they are on."""
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    number = torch.cuda.current_device() if device.index is None else device.index
    own = str(torch.cuda.get_device_properties(number).uuid)
    tensors = {}
    for name, by_gpu in pickle.loads(base64.b64decode(handles)):
        if own not in by_gpu:
            raise ValueError(
                f"the learner's weights are on GPU {', '.join(by_gpu)} and vLLM's on {own}: memory is shared on one GPU "
                "alone. Use rollout.engine.options.push: broadcast, or file."
            )
        arguments = list(by_gpu[own])
        arguments[DEVICE_OF_HANDLE] = number
        tensors[name] = rebuild_cuda_tensor(*arguments)
    return tensors

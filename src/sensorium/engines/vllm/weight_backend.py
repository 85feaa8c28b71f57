"""Our backends for vLLM's weight transfer: by a file, by broadcast (``engines/weight_group``), as memory of one GPU.

vLLM has none for CPUs, and its own for GPU memory imports Ray in 0.25. ``register`` is an entry point of the group
``vllm.general_plugins``, which vLLM calls in each of its processes.
"""

import base64
import pickle
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

FILE, BROADCAST, SHARED = "sensorium_file", "sensorium_broadcast", "sensorium_shared_memory"
DEVICE_OF_HANDLE = 6  # index of the GPU's number, which differs between processes, in rebuild_cuda_tensor's arguments


def register() -> None:
    """Make the backends known to vLLM in this process."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    @dataclass
    class NoInit(WeightTransferInitInfo):
        """No information is needed beforehand."""

    @dataclass
    class FileUpdate(WeightTransferUpdateInfo):
        """A safetensors file, and further names of its tensors: a tied head."""

        file: str
        aliases: dict[str, str] = field(default_factory=dict)

    @dataclass
    class BroadcastInit(WeightTransferInitInfo):
        """Where sender and workers meet: the fields of a ``Meeting``."""

        meeting: dict[str, Any]

    @dataclass
    class BroadcastUpdate(WeightTransferUpdateInfo):
        """The name, dtype and shape of each tensor that comes, and further names."""

        tensors: list[list[Any]]
        aliases: dict[str, str] = field(default_factory=dict)

    @dataclass
    class SharedUpdate(WeightTransferUpdateInfo):
        """Handles of tensors in GPU memory, pickled: a list of name, and arguments of ``rebuild_cuda_tensor`` by GPU."""

        handles: str
        aliases: dict[str, str] = field(default_factory=dict)

    class LayerwiseWeights(WeightTransferEngine):
        """Loads checkpoint tensors. One layerwise reload spans a push."""

        init_info_cls = NoInit

        def init_transfer_engine(self, init_info: Any) -> None:
            """Nothing to connect."""

        def shutdown(self) -> None:
            """Nothing to release."""

        def start_weight_update(self) -> None:
            """From here to the end of the push, layers wait on the meta device: no request may run."""
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            self.kernels = expert_kernels(self.model)
            for method in self.kernels:
                method.moe_kernel = None
            initialize_layerwise_reload(self.model)

        def finish_weight_update(self) -> None:
            """Layers that got nothing get their old weights back."""
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)
            for method, kernel in self.kernels.items():
                method.moe_kernel = method.moe_kernel or kernel

        def update_weights(self, update_info: dict[str, Any]) -> None:
            """Load the update; the base class would wait for an accelerator, which may not exist."""
            self.receive_weights(self.parse_update_info(update_info))

        @staticmethod
        def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
            """vLLM 0.25 requires it of every backend; here the sender is ``weights.pushed_by``."""
            raise NotImplementedError("weights are sent by sensorium.engines.vllm.weights.pushed_by.")

        def load(self, tensors: dict[str, Any], aliases: dict[str, str]) -> None:
            """Load tensors under all their names."""
            also = {name: tensors[of] for name, of in aliases.items() if of in tensors}
            self.model.load_weights([*tensors.items(), *also.items()])

    class FileWeights(LayerwiseWeights):
        update_info_cls = FileUpdate

        def receive_weights(self, update_info: Any) -> None:
            from safetensors.torch import load_file

            self.load(load_file(update_info.file, device=str(self.device)), update_info.aliases)

    class BroadcastWeights(LayerwiseWeights):
        """Weights that one sender broadcasts to all workers."""

        init_info_cls = BroadcastInit
        update_info_cls = BroadcastUpdate

        def init_transfer_engine(self, init_info: Any) -> None:
            from sensorium.engines.weight_group import Meeting, WeightReceiver

            parallel = self.parallel_config
            place = getattr(parallel, "data_parallel_index", 0) * parallel.world_size + parallel.rank
            self.receiver = WeightReceiver(Meeting(**init_info.meeting), 1 + place)

        def receive_weights(self, update_info: Any) -> None:
            from sensorium.engines.weight_group import Described

            described = [Described(name, dtype, tuple(shape)) for name, dtype, shape in update_info.tensors]
            for tensors in self.receiver.receive(described, self.device):
                self.load(tensors, update_info.aliases)

        def shutdown(self) -> None:
            if hasattr(self, "receiver"):
                self.receiver.close()

    class SharedWeights(LayerwiseWeights):
        """Weights read where the learner has them: on the GPU that both processes are on."""

        update_info_cls = SharedUpdate

        def receive_weights(self, update_info: Any) -> None:
            import torch

            opened = open_handles(update_info.handles, self.device)
            self.load(opened, update_info.aliases)
            torch.cuda.synchronize(self.device)

    for name, backend in ((FILE, FileWeights), (BROADCAST, BroadcastWeights), (SHARED, SharedWeights)):
        with suppress(ValueError):  # registered already: an installed package has the entry point too
            WeightTransferEngineFactory.register_engine(name, backend)


def expert_kernels(model: Any) -> dict[Any, Any]:
    """The kernels of a model's experts on a CPU, by what makes them.

    vLLM packs experts where it makes their kernel, and not where weights are loaded again: it would compute with unpacked
    ones, without an error. So a push lets it make the kernels of all experts that it loads again.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return {}
    methods: list[Any] = [getattr(layer, "quant_method", None) for layer in model.modules()]
    return {method: method.moe_kernel for method in methods if getattr(method, "moe_kernel", None) is not None}


def open_handles(handles: str, device: Any) -> dict[str, Any]:
    """Tensors of another process on the same GPU, by their handles (``weights.shared_memory``)."""
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    number = torch.cuda.current_device() if device.index is None else device.index
    own = str(torch.cuda.get_device_properties(number).uuid)
    tensors = {}
    for name, by_gpu in pickle.loads(base64.b64decode(handles)):
        if own not in by_gpu:
            raise ValueError(
                f"the learner's weights are on GPU {', '.join(by_gpu)} and vLLM's on {own}: memory is only shared "
                "on one GPU. Use rollout.engine.options.push: broadcast, or file."
            )
        arguments = list(by_gpu[own])
        arguments[DEVICE_OF_HANDLE] = number
        tensors[name] = rebuild_cuda_tensor(*arguments)
    return tensors

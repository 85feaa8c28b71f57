"""How weights are pushed to vLLM: under the names of published checkpoints, which its loaders read, by backends of our own.

policy (transformers 5)                                       pushed
model.language_model.layers.0.mlp.up_proj.weight           →  the same
…self_attn.q_proj.base_layer.weight (under LoRA)           →  …self_attn.q_proj.weight
…mlp.experts.gate_up_proj [E, 2I, H]                       →  the same; of Qwen3-VL [E, H, 2I]
a tied head                                                →  lm_head.weight beside the embeddings
all of an Omni model's thinker                             →  thinker.…
of Qwen2-Audio and on the general path, what transformers itself would save:
model.language_model.layers.0.mlp.up_proj.weight           →  language_model.model.layers.0.mlp.up_proj.weight
rotary tables and other buffers that are not saved, adapters  →  nothing

They go by a file, by broadcast (``engines/weight_group``), or as memory of one GPU. vLLM has no backend for CPUs, and its
own for GPU memory imports Ray in 0.25. ``register`` is an entry point of the group ``vllm.general_plugins``, which vLLM
calls in each of its processes.
"""

import base64
import pickle
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sensorium.engines.weight_group import Described, Meeting, WeightReceiver, WeightSender, write_tensors
from sensorium.vocabulary.errors import EngineError

FILE, BROADCAST, SHARED = "sensorium_file", "sensorium_broadcast", "sensorium_shared_memory"
DEVICE_OF_HANDLE = 6  # index of the GPU's number, which differs between processes, in rebuild_cuda_tensor's arguments
BESIDE = re.compile(r"(^|\.)model\.embed_tokens\.weight$")  # embeddings whose model has its head beside it
EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")


@dataclass(frozen=True)
class PushedWeights:
    """Tensors by their published names. ``aliases``: further names of some of them."""

    tensors: dict[str, Tensor]
    aliases: dict[str, str]


def published(
    tensors: Mapping[str, Tensor],
    names: Collection[str],
    *,
    tied: Mapping[str, str] = MappingProxyType({}),
    turned: bool = False,
    under: str = "",
    model: Any = None,
) -> PushedWeights:
    """The tensors of ``names``, as vLLM reads them: below the prefix ``under``, experts turned or not.

    ``model``: they get the names and shapes that transformers gives them when it saves this model. ``tied``: further names
    of some. A head tied to the embeddings goes with them: vLLM keeps its own copy, which would stay at the old weights.
    """
    if missing := sorted(set(names) - tensors.keys()):
        raise EngineError(f"the weights to push lack {len(missing)} parameters of the model, {missing[0]} among them.")
    sent = {name.replace(".base_layer.", "."): tensors[name] for name in names if ".lora_" not in name}
    also = {name: of for name, of in tied.items() if of in sent}
    if model is None:
        turn = [name for name in sent if turned and name.endswith(EXPERTS)]
        sent = {under + name: tensor.mT if name in turn else tensor for name, tensor in sent.items()}
        return PushedWeights(sent, {under + name: under + of for name, of in also.items()})
    from transformers.core_model_loading import revert_weight_conversion

    with torch.no_grad():
        saved = revert_weight_conversion(model, dict(sent))
    names_by_place = {_place(tensor): name for name, tensor in saved.items()}
    owners = {name: names_by_place[_place(sent[of])] for name, of in also.items()}
    return PushedWeights(
        saved, {BESIDE.sub(r"\1lm_head.weight", own) if BESIDE.search(own) else name: own for name, own in owners.items()}
    )


def _place(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


class ChangedWeights:
    """Which parameters a push must carry: those that may have changed since the last one, whole layers at a time.

    vLLM fuses parameters of a layer (queries, keys and values; gate and up), so a layer that changed is sent whole.
    """

    def __init__(self) -> None:
        self._sent: dict[str, tuple[int, int]] = {}

    def select(self, tensors: Mapping[str, Tensor], parameters: Collection[str]) -> set[str]:
        """The names to send now. What learns is always sent: it may be written to in ways that torch does not count."""
        moved = {
            name for name in parameters if tensors[name].requires_grad or self._sent.get(name) != _state(tensors[name])
        }
        layers = {layer_of(name) for name in moved}
        return {name for name in parameters if layer_of(name) in layers}

    def note(self, tensors: Mapping[str, Tensor], parameters: Collection[str]) -> None:
        """These have arrived."""
        self._sent |= {name: _state(tensors[name]) for name in parameters}

    def forget(self) -> None:
        """vLLM has none any more."""
        self._sent.clear()


def layer_of(name: str) -> str:
    """The decoder layer or tower block of a parameter; its own name where it belongs to none."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return name if number is None else ".".join(parts[: number + 1])


def _state(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor._version


@contextmanager
def pushed_by(
    backend: str, weights: PushedWeights, folder: Path | None = None, sender: WeightSender | None = None
) -> Iterator[dict[str, Any]]:
    """The update for the backend's workers; inside, they can read it: in ``folder``, on this machine, or by broadcast."""
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
    """The names of tensors on a GPU and the handles by which another process opens their memory; pickled, as text."""
    from torch.multiprocessing.reductions import reduce_tensor

    torch.cuda.synchronize()
    handles = []
    for name, tensor in tensors.items():
        gpu = str(torch.cuda.get_device_properties(tensor.device).uuid)
        handles.append((name, {gpu: reduce_tensor(tensor)[1]}))
    return base64.b64encode(pickle.dumps(handles)).decode()


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
            """vLLM 0.25 requires it of every backend; here the sender is ``pushed_by``."""
            raise NotImplementedError("weights are sent by pushed_by.")

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
            parallel = self.parallel_config
            place = getattr(parallel, "data_parallel_index", 0) * parallel.world_size + parallel.rank
            self.receiver = WeightReceiver(Meeting(**init_info.meeting), 1 + place)

        def receive_weights(self, update_info: Any) -> None:
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
    """Tensors of another process on the same GPU, by their handles (``shared_memory``)."""
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

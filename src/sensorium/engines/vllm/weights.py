"""How weights are pushed to vLLM: under the names of the published checkpoints, which its loaders read.

policy (transformers 5)                                       pushed
model.language_model.layers.0.mlp.up_proj.weight           →  the same
…self_attn.q_proj.base_layer.weight (under LoRA)           →  …self_attn.q_proj.weight
…mlp.experts.gate_up_proj [E, 2I, H]                       →  the same; of Qwen3-VL [E, H, 2I]
a tied head                                                →  lm_head.weight beside the embeddings
all of an Omni model's thinker                             →  thinker.…
of Qwen2-Audio and on the general path, what transformers itself would save:
model.language_model.layers.0.mlp.up_proj.weight           →  language_model.model.layers.0.mlp.up_proj.weight
rotary tables and other buffers that are not saved, adapters  →  nothing
"""

import base64
import pickle
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sensorium.engines.vllm.weight_backend import BROADCAST, FILE
from sensorium.engines.weight_group import WeightSender, write_tensors
from sensorium.vocabulary.errors import EngineError

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

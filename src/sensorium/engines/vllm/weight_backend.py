"""Weights by a file on this machine, as a backend of vLLM's weight transfer: for CPUs, where vLLM has none of its own.

``register`` is an entry point of the group ``vllm.general_plugins``, which vLLM calls in each of its processes.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

BACKEND = "sensorium_file"


def register() -> None:
    """Make the backend known to vLLM in this process."""
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

    class FileWeights(WeightTransferEngine):
        """Loads checkpoint tensors from files. One layerwise reload spans all files of a push."""

        init_info_cls = FileInit
        update_info_cls = FileUpdate

        def init_transfer_engine(self, init_info: Any) -> None:
            """Nothing to connect."""

        def start_weight_update(self) -> None:
            """From here to the end of the push, layers wait on the meta device: no request may run."""
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

        def finish_weight_update(self) -> None:
            """Layers that got nothing take their old weights back."""
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            """Load one file; the base class would wait for an accelerator, which there may not be."""
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Any) -> None:
            """Load one file."""
            from safetensors.torch import load_file

            tensors = load_file(update_info.file, device=str(self.device))
            tensors |= {name: tensors[of] for name, of in update_info.aliases.items()}
            self.model.load_weights(tensors.items())

        def shutdown(self) -> None:
            """Nothing is held."""

    with suppress(ValueError):  # known already: an installed package and a folder on the path both name this entry point
        WeightTransferEngineFactory.register_engine(BACKEND, FileWeights)

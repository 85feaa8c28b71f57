"""Low-rank adapters (peft's) on the linear layers of named groups of a model. The rest of the model is frozen.

The model computes W·x + α/r·B·A·x when sampled and trained; a checkpoint holds the sum. On CUDA the language model's layers
sample and train with the sum, too (``Adapters.merge``): one product each, as fast as without adapters, unless
``model.lora.merge`` is false or a learner is sharded. Embeddings, the patch projection of a tower and a head tied to the
embeddings are never adapted. Nor are the experts and routers of a mixture (Qwen3-VL-MoE), which are bare tensors: in its
language model only attention and shared experts have some. Of gated delta nets the linear layers are adapted, not the
convolution and the decay.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sensorium.kernels.layer_ops import AdaptedLinear, summed
from sensorium.models.family import group_of
from sensorium.models.published_layout import common_name, raw_bytes
from sensorium.models.weight_files import weight_files
from sensorium.recipe.model_shape import ends_in
from sensorium.recipe.schema import LoraSection
from sensorium.vocabulary.errors import CheckpointError, RecipeError, nearest

WEIGHTS = "adapter_model.safetensors"
NAME = "default"  # peft's name of a model's only adapter
Prefixes = Mapping[str, tuple[str, ...]]  # of parameter names, by group


def add_adapters(model: Any, groups: Prefixes, section: LoraSection, seed: int, base: str) -> "Adapters":
    """Put fresh adapters into ``model`` and freeze the rest; the model computes what it did, since B is zero.

    The A matrices depend on the seed and the layer's name alone, not on the device. ``base`` names the model.
    """
    adapters = inject(model, groups, section, base)
    with torch.no_grad():
        for name, layer in adapters.layers.items():
            matrix_RI = layer.lora_A[NAME].weight
            key = blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key, "big"))
            # Uniform within 1/√inputs, as a linear layer is initialized.
            matrix_RI.copy_((2 * torch.rand(matrix_RI.shape, generator=generator) - 1) / matrix_RI.shape[1] ** 0.5)
    return adapters


def inject(model: Any, groups: Prefixes, section: LoraSection, base: str, *, empty: bool = False) -> "Adapters":
    """Adapters with the numbers that peft draws, or on the device ``meta`` if the model is there too (``empty``)."""
    import peft

    chosen = choose_layers(model, groups, section)
    try:
        with torch.random.fork_rng(devices=[]):  # peft draws its own A, on the CPU
            peft.inject_adapter_in_model(_config(section, chosen, base), model, low_cpu_mem_usage=empty)
    except ValueError as error:  # of some mixtures it takes the layers of all experts or none
        raise RecipeError(f"model.lora.modules: peft refuses these layers: {error} Name others.") from error
    adapters = Adapters(model.eval(), section, base)
    if strange := sorted(adapters.layers.keys() ^ set(chosen)):
        taken = _endings([layer for layer in chosen if layer in adapters.layers])
        raise RecipeError(
            f"model.lora: the installed peft adapts other layers than it is asked for ({strange[0]} differs). Name those "
            f"that it takes as they are, model.lora.modules: [{taken}], or use another version of peft."
        )
    return adapters


def choose_layers(model: Any, groups: Prefixes, section: LoraSection) -> list[str]:
    """The linear layers of the section's groups whose name ends in one of its modules, by full name."""
    by_group = linear_layers(model, groups)
    if not section.groups:
        raise RecipeError("model.lora.groups names no group; name one, or set model.lora.rank to 0.")
    chosen: list[str] = []
    for group in section.groups:
        if group not in groups:
            raise RecipeError(
                f"model.lora.groups: the model has no parameter group '{group}'{nearest(group, list(groups))}"
            )
        if not by_group[group]:
            with_some = ", ".join(name for name, layers in by_group.items() if layers)
            tied = " (its head shares the weights of the embeddings)" if group == "head" else ""
            where = (
                f"this model has some in: {with_some}" if with_some else "no other part has any: set model.lora.rank to 0"
            )
            raise RecipeError(f"model.lora.groups: '{group}' has no linear layers to adapt{tied}; {where}.")
        fitting = [layer for layer in by_group[group] if ends_in(layer, section.modules)]
        if not fitting:
            raise RecipeError(
                f"model.lora.modules: no layer of '{group}' ends in {', '.join(section.modules)}; its layers end in: "
                f"{_endings(by_group[group])}."
            )
        chosen += fitting
    for module in section.modules:
        if not any(ends_in(layer, [module]) for layer in chosen):
            raise RecipeError(f"model.lora.modules: no layer ends in '{module}'; the adapted end in: {_endings(chosen)}.")
    return chosen


def linear_layers(model: Any, groups: Prefixes) -> dict[str, list[str]]:
    """The linear layers of each group, without a head that shares the embeddings' weights."""
    embeddings = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    found: dict[str, list[str]] = {group: [] for group in groups}
    for name, part in model.named_modules():
        group = group_of(f"{name}.weight", groups)
        if group is not None and isinstance(part, nn.Linear) and id(part.weight) not in embeddings:
            found[group].append(name)
    return found


class Adapters:
    """The adapters of a model: ``layers`` by name, ``parameters`` by their name in the model."""

    def __init__(self, model: Any, section: LoraSection, base: str) -> None:
        from peft.tuners.lora import LoraLayer

        self._model, self.section, self.base = model, section, base
        self.layers: dict[str, Any] = {name: part for name, part in model.named_modules() if isinstance(part, LoraLayer)}
        self.parameters: dict[str, nn.Parameter] = {
            f"{name}.{part}.{NAME}.weight": getattr(layer, part)[NAME].weight
            for name, layer in self.layers.items()
            for part in ("lora_A", "lora_B")
        }

    def of(self, model: Any) -> "Adapters":
        return Adapters(model, self.section, self.base)

    def merge(self, layers: nn.Module) -> None:
        """Give the adapted layers inside a module products of their own, which ``layer_ops.product_of`` finds."""
        inside = {id(part) for part in layers.modules()}
        for layer in self.layers.values():
            if id(layer) in inside and type(layer.base_layer) is nn.Linear and not hasattr(layer, "product"):
                layer.product = (AdaptedLinear(layer, NAME),)  # in a tuple: its weight is in no checkpoint

    def settle(self) -> None:
        """Make the weights of merged layers anew where A, B or the base changed."""
        for layer in self.layers.values():
            if hasattr(layer, "product"):
                layer.product[0].settle()

    def snapshot(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    @contextmanager
    def off(self) -> Iterator[None]:
        learning = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        try:
            for layer in self.layers.values():
                layer.enable_adapters(False)
            yield
        finally:
            for layer in self.layers.values():
                layer.enable_adapters(True)
            for parameter in self.parameters.values():  # peft's switch also changes which parameters are trained
                parameter.requires_grad_(False)
            for parameter in learning:
                parameter.requires_grad_()

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """The model with the adapters of a snapshot. Nothing is copied: parameters point to the snapshot inside."""
        assert tensors.keys() == self.parameters.keys(), "the snapshot is of other adapters"
        own = {name: parameter.data for name, parameter in self.parameters.items()}
        try:
            for name, parameter in self.parameters.items():
                parameter.data = tensors[name]
            yield
        finally:
            for name, parameter in self.parameters.items():
                parameter.data = own[name]

    def base_state(self) -> dict[str, Tensor]:
        """The state dict of the model without adapters, under the names it has without them; not copies."""
        state: dict[str, Tensor] = {}
        for name, tensor in self._model.state_dict().items():
            owner, _, leaf = name.rpartition(".")
            layer = owner.removesuffix(".base_layer")
            if name not in self.parameters:
                state[f"{layer}.{leaf}" if layer in self.layers else name] = tensor
        return state

    @torch.no_grad()
    def sums(self) -> Iterator[tuple[str, Tensor]]:
        """Every adapted weight with its adapter added, one at a time: what merged layers compute with."""
        for name, layer in self.layers.items():
            parts = layer.base_layer.weight, layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
            yield f"{name}.weight", summed(*parts, layer.scaling[NAME]).cpu()

    def add_into(self, folder: Path) -> None:
        """Add the adapters into the weight files of ``base_state``, in place and one weight in memory at a time."""
        files = {common_name(tensor.name): (file, tensor) for file in weight_files(folder) for tensor in file.tensors}
        for name, weight_OI in self.sums():
            file, tensor = files[common_name(name)]
            file.overwrite(tensor, raw_bytes(weight_OI))

    def save(self, folder: Path, *, under: str = "") -> None:
        """Write the adapters as a standard peft folder, for ``PeftModel.from_pretrained(base, folder)``.

        ``under``: the prefix of the model's names in a base that holds more than this model.
        """
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {_key(under + name): parameter.detach().contiguous() for name, parameter in self.parameters.items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        config = _config(self.section, sorted(self.layers), self.base)
        config.target_modules = [
            under + layer for layer in sorted(self.layers)
        ]  # peft makes a set, written in a different order every time
        config.inference_mode = True
        config.save_pretrained(str(folder))

    def load(self, folder: Path) -> None:
        """Load the adapters of a folder, bit for bit."""
        tensors = self.read(folder)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[name])

    def read(self, folder: Path) -> dict[str, Tensor]:
        """The adapters of a folder as a snapshot, which must be of the same layers and rank."""
        path = folder / WEIGHTS
        if not path.is_file():
            raise CheckpointError(f"'{folder}' holds no adapters ({WEIGHTS}); it was not written by a run with model.lora.")
        try:
            found = load_file(path)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"'{path}' is cut short or damaged ({error}). Use an earlier checkpoint.") from error
        wanted = {_key(name): parameter.shape for name, parameter in self.parameters.items()}
        if {key: tensor.shape for key, tensor in found.items()} != wanted:
            strange = sorted(found.keys() ^ wanted.keys())[:1] or ["their rank"]
            raise CheckpointError(
                f"the adapters in '{folder}' are of other layers or another rank ({strange[0]} differs); use the "
                "model.path and model.lora that they were trained with."
            )
        return {name: found[_key(name)].to(p.device, p.dtype) for name, p in self.parameters.items()}


def _endings(layers: list[str]) -> str:
    """The distinct last parts of layer names; a number includes the part before it."""
    words = [layer.split(".") for layer in layers]
    return ", ".join(sorted({".".join(w[-2:]) if w[-1].isdigit() else w[-1] for w in words}))


def _config(section: LoraSection, layers: list[str], base: str) -> Any:
    from peft import LoraConfig

    alpha = int(section.alpha) if section.alpha.is_integer() else section.alpha  # some readers want a whole number
    common: dict[str, Any] = {"lora_dropout": 0.0, "bias": "none", "base_model_name_or_path": base}
    return LoraConfig(r=section.rank, lora_alpha=alpha, target_modules=list(layers), **common)


def _key(name: str) -> str:
    """The name of a parameter in peft's files."""
    return "base_model.model." + name.removesuffix(f".{NAME}.weight") + ".weight"

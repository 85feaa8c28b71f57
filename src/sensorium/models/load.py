"""From a model path to a policy, or to a check that the path would become one."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd

from sensorium.data.decoder import Decoder
from sensorium.data.media_store import MediaStore
from sensorium.models.checkpoint_path import (
    LOADING,
    find_checkpoint,
    has_weights,
    is_hub_id,
    may_be_hub_id,
    model_class,
    naming,
    own_config,
)
from sensorium.models.load_chat import CheckpointConfig, chat_processor_of, config_at, of_its_family, read_config
from sensorium.models.lora import add_adapters, choose_layers
from sensorium.models.policy import Policy, Precision
from sensorium.models.quiet import quiet
from sensorium.models.weight_files import STORED, announced, check_memory, refuse_not_finite, refuse_unfit, whole_weights
from sensorium.recipe.schema import LoraSection, ModelSection
from sensorium.recipe.shape import cached_folder, is_ours
from sensorium.vocabulary.errors import ModelError, nearest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_policy(
    path: str,
    *,
    store: MediaStore,
    dtype: str = "float32",
    device: str = "auto",
    family: str = "auto",
    revision: str = "",
    dequantize: bool = False,
    unused_weights: Sequence[str] = (),
    lora: LoraSection | None = None,
    seed: int = 0,
    decoder: Decoder | None = None,
    media_bytes: int = 1 << 29,
    precision: Precision = "fast",
) -> Policy:
    """Load a checkpoint. ``path``: a folder, a hub id, ``package:NAME`` (shipped) or ``tiny:FAMILY`` (random weights).

    ``revision``: a branch, tag or commit of a hub id. ``dequantize``: load FP8 weights as plain numbers.
    ``unused_weights``: name prefixes of checkpoint weights to ignore. ``lora`` with a rank adds fresh adapters, drawn by
    ``seed``. ``decoder``: of the store's media, where others share it (judges, the log); else the policy has its own.
    ``media_bytes`` of preprocessed media are cached in memory. ``precision``: see ``Policy``.
    """
    with LOADING:
        if dtype not in DTYPES:
            raise ModelError(f"model.dtype: unknown dtype '{dtype}'{nearest(dtype, list(DTYPES))}")
        checkpoint = read_config(path, family, revision, dequantize=dequantize)
        chosen = find_device(device)
        model = _read_model(checkpoint, DTYPES[dtype], chosen, unused_weights)
        chat = chat_processor_of(checkpoint, store, decoder, media_bytes)
        model.to(chosen).eval()
        adapters = None
        if lora is not None and lora.rank:
            # How the adapters name their base model: a hub id, a folder, or the name of one made here.
            named = path.startswith("tiny:") or is_hub_id(path)
            base = path if named else str(Path(checkpoint.place).resolve())
            adapters = add_adapters(model, checkpoint.adapter_class.groups, lora, seed, base)
        with of_its_family(checkpoint):
            adapter = checkpoint.adapter_class(model)
        return Policy(chat, adapter, model, adapters, precision)


def _read_model(checkpoint: CheckpointConfig, dtype: torch.dtype, device: torch.device, unused: Sequence[str]) -> Any:
    """The model with its weights on ``device``. A GPU gets them one by one, without a copy of the model in CPU memory."""
    path, place = checkpoint.path, checkpoint.place
    files = whole_weights(path, Path(place))
    size = check_memory(path, files, dtype, device, unused)
    with naming(path, place, weights=True), announced(size, place):
        model, report = model_class(checkpoint.config).from_pretrained(
            place,
            use_safetensors=True,  # older weight files are pickles
            trust_remote_code=False,  # None would ask at a terminal whether to run a checkpoint's own code
            device_map=None if device.type == "cpu" else {"": device},
            **_loading_options(checkpoint, dtype),
        )
    if checkpoint.dequantize:
        model._weight_conversions = None  # or its checkpoints would be FP8 again
    refuse_unfit(path, report, files, unused)
    refuse_not_finite(path, model)
    _refuse_dropout(path, model)
    return model


def _loading_options(checkpoint: CheckpointConfig, dtype: torch.dtype) -> dict[str, Any]:
    from transformers import FineGrainedFP8Config

    return {
        "dtype": dtype,
        "attn_implementation": checkpoint.adapter_class.attention,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # refused afterwards, by name
        **({"quantization_config": FineGrainedFP8Config(dequantize=True)} if checkpoint.dequantize else {}),
    }


def build_policy(
    path: str,
    *,
    store: MediaStore,
    dtype: str,
    device: str,
    family: str = "auto",
    lora: LoraSection | None = None,
    precision: Precision = "fast",
) -> Policy:
    """The policy that a checkpoint's small files describe, with uninitialized weights: all come from elsewhere."""
    from transformers.initialization import no_init_weights

    checkpoint = read_config(path, family, weights=False)
    adapter_class = checkpoint.adapter_class
    with LOADING, naming(path, checkpoint.place), quiet(), no_init_weights():
        chosen = model_class(checkpoint.config)
        build = getattr(chosen, "from_config", None) or chosen._from_config  # of an auto class, or of a model class
        model = build(checkpoint.config, dtype=DTYPES[dtype], attn_implementation=adapter_class.attention)
    model.tie_weights()  # skipped with the initialization
    model.to(find_device(device)).eval()
    adapters = None if lora is None else add_adapters(model, adapter_class.groups, lora, 0, path)
    chat = chat_processor_of(checkpoint, store, None, 1 << 29)
    return Policy(chat, adapter_class(model), model, adapters, precision)


def check_checkpoint(section: ModelSection, path: str = "") -> list[str]:
    """Refuse what a run would refuse about its model, without reading weights; returns what could not be checked.

    transformers loads the model as for a run, but from tensors without numbers (torch's device ``meta``): names and shapes
    are compared by the code that will load them, and 30 GB take as long as 30 MB. ``path`` replaces the section's. A hub id
    is looked up in the hub's cache alone: nothing is fetched.
    """
    path = path or section.path
    if is_ours(path):
        return []
    revision = section.revision if path == section.path else ""
    if Path(path).expanduser().is_dir() or not may_be_hub_id(path):
        folder = Path(find_checkpoint(path, revision))
    else:
        cached = cached_folder(path, revision)
        if cached is None or not (cached / "config.json").is_file():
            return [f"model.path '{path}' was not checked: it is a hub id that is fetched when the run starts."]
        folder = cached
    dtype = DTYPES[section.dtype]
    with LOADING:
        checkpoint = config_at(path, str(folder), section.family, dequantize=section.dequantize)
        chat_processor_of(checkpoint, MediaStore(), None, 0).decoder.close()
        if is_hub_id(path) and not has_weights(folder):
            return [f"the weights of '{path}' were not checked: they are fetched when the run starts."]
        files = whole_weights(path, folder)
        tensors = {tensor.name: tensor for file in files for tensor in file.tensors}
        if unknown := sorted({tensor.dtype for tensor in tensors.values()} - STORED.keys()):
            raise ModelError(f"model.path '{path}': its weights are stored as {unknown[0]}, which is not known here.")
        empty = {name: torch.empty(t.shape, dtype=STORED[t.dtype], device="meta") for name, t in tensors.items()}
        with naming(path, str(folder), weights=True), quiet():
            chosen = model_class(checkpoint.config)
            by_config = getattr(chosen, "_model_mapping", None)  # of an auto class
            model, report = (chosen if by_config is None else by_config[type(checkpoint.config)]).from_pretrained(
                None,
                config=own_config(checkpoint.config),
                state_dict=empty,
                device_map={"": "meta"},
                **_loading_options(checkpoint, dtype),
            )
        refuse_unfit(path, report, files, section.unused_weights)
        _refuse_dropout(path, model)
        with of_its_family(checkpoint):
            checkpoint.adapter_class(model)
        if section.lora.rank:
            choose_layers(model, checkpoint.adapter_class.groups, section.lora)
    try:
        check_memory(path, files, dtype, find_device(section.device), section.unused_weights)
    except ModelError as error:
        return [f"on this machine the run would be refused: {error}"]
    return []


def find_device(device: str) -> torch.device:
    """``auto`` is the GPU where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"model.device: unknown device '{device}'; use 'auto', 'cpu' or 'cuda'.") from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if chosen.type == "cuda" and not count:
        raise ModelError(
            f"model.device is '{device}', but torch finds no CUDA device here. Use 'auto' or 'cpu', or repair the driver "
            "(nvidia-smi should list the GPU)."
            if torch.version.cuda
            else f"model.device is '{device}', but this torch {torch.__version__} was built without CUDA. Use 'auto' or "
            "'cpu', or install a build of the same version with CUDA: docs/start/gpu.md has the command."
        )
    if chosen.type == "cuda" and (chosen.index or 0) >= count:
        raise ModelError(f"model.device is '{device}', but there are {count} CUDA devices here, counted from 0.")
    return chosen


def _refuse_dropout(path: str, model: Any) -> None:
    """Refuse dropout anywhere: training would then see another policy than the one that was sampled."""
    modules = [(f"module {name}", part.p) for name, part in model.named_modules() if isinstance(part, _DropoutNd)]
    for name, share in [*_dropouts(model.config, "config.json"), *modules]:
        if share > 0:
            raise ModelError(
                f"model.path '{path}': {name} has dropout {share:g}, which would make training see another policy than the "
                "one that was sampled; set it to 0 in the checkpoint's config.json."
            )


def _dropouts(config: Any, place: str) -> Iterator[tuple[str, float]]:
    """Every dropout of a config and of the configs inside it."""
    from transformers import PreTrainedConfig

    for key, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _dropouts(value, f"{place}, {key}")
        elif any(word in key for word in ("dropout", "layerdrop", "drop_path")) and isinstance(value, int | float):
            yield f"{key} ({place})", float(value)

"""From a model path to a policy, or to a check that the path would become one."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
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
    quiet,
)
from sensorium.models.family import groups_of
from sensorium.models.general_path import check_general
from sensorium.models.load_chat import (
    NO_DEFAULTS,
    CheckpointConfig,
    TemplateDefaults,
    chat_processor_of,
    config_at,
    of_its_family,
    read_config,
)
from sensorium.models.lora import add_adapters, inject
from sensorium.models.policy import Policy, Precision
from sensorium.models.published_layout import common_name
from sensorium.models.tried_versions import check_versions
from sensorium.models.weight_files import STORED, WeightFile, whole_weights
from sensorium.recipe.family_facts import GENERAL, is_unloaded
from sensorium.recipe.model_shape import cached_folder, is_ours, part_of, told_by_part
from sensorium.recipe.plan import free_memory
from sensorium.recipe.schema import LoraSection, ModelSection
from sensorium.vocabulary.errors import ModelError, RecipeError, nearest

GIB = 1 << 30
LONG_LOAD = 4 * GIB  # loads of at least so many bytes are announced
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
    template_defaults: TemplateDefaults = NO_DEFAULTS,
) -> Policy:
    """Load a checkpoint. ``path``: a folder, a hub id, ``package:NAME`` (shipped) or ``tiny:FAMILY`` (random weights).

    ``revision``: a branch, tag or commit of a hub id. ``dequantize``: load FP8 weights as plain numbers.
    ``unused_weights``: name prefixes of checkpoint weights to ignore. ``lora`` with a rank adds fresh adapters, drawn by
    ``seed``. ``decoder``: of the store's media, where others share it (judges, the log); else the policy has its own.
    ``media_bytes`` of preprocessed media are cached in memory. ``precision``: see ``Policy``. ``template_defaults``:
    values of variables of the chat template that are not given otherwise.
    """
    with LOADING:
        if dtype not in DTYPES:
            raise ModelError(f"model.dtype: unknown dtype '{dtype}'{nearest(dtype, list(DTYPES))}")
        checkpoint = read_config(path, family, revision, dequantize=dequantize)
        check_versions(checkpoint.family)
        chosen = find_device(device)
        chat = chat_processor_of(checkpoint, store, decoder, media_bytes, template_defaults)
        model = _read_model(checkpoint, DTYPES[dtype], chosen, unused_weights)
        model.to(chosen).eval()
        adapters = None
        if lora is not None and lora.rank:
            # How the adapters name their base model: a hub id, a folder, or the name of one made here.
            named = path.startswith("tiny:") or is_hub_id(path)
            base = path if named else str(Path(checkpoint.place).resolve())
            adapters = add_adapters(model, groups_of(checkpoint.adapter_class, model), lora, seed, base)
        with of_its_family(checkpoint):
            adapter = checkpoint.adapter_class(model)
        policy = Policy(chat, adapter, model, adapters, precision)
        if policy.general is not None:
            try:
                check_general(policy)
            except ModelError as error:
                raise ModelError(f"model.path '{path}': {error}") from error
            for name, share in list(_dropouts(model))[:1]:
                left_out = f"its dropout ({name}: {share:g}) is left out: what is sampled is what is trained"
                policy.general.notes = (*policy.general.notes, left_out)
        return policy


def _read_model(checkpoint: CheckpointConfig, dtype: torch.dtype, device: torch.device, unused: Sequence[str]) -> Any:
    """The model with its weights on ``device``. A GPU gets them one by one, without a copy of the model in CPU memory."""
    path, place = checkpoint.path, checkpoint.place
    files = whole_weights(path, Path(place))
    size = _check_memory(path, files, dtype, device, unused)
    with naming(path, place, weights=True), _announced(size, place):
        model, report = model_class(checkpoint.config).from_pretrained(
            place,
            use_safetensors=True,  # older weight files are pickles
            trust_remote_code=False,  # None would ask at a terminal whether to run a checkpoint's own code
            device_map=None if device.type == "cpu" else {"": device},
            **_loading_options(checkpoint, dtype),
        )
    if checkpoint.dequantize:
        model._weight_conversions = None  # or its checkpoints would be FP8 again
    _refuse_unfit(path, report, files, unused)
    _refuse_not_finite(path, model)
    if checkpoint.family != GENERAL:  # which computes without, and says so
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
    adapters = None if lora is None else add_adapters(model, groups_of(adapter_class, model), lora, 0, path)
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
        check_versions(read_config(path, section.family, weights=False).family)
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
        check_versions(checkpoint.family)
        chat = chat_processor_of(checkpoint, MediaStore(), None, 0, section.chat_template_kwargs)
        chat.decoder.close()
        notes = [f"model: {note}" for note in getattr(chat.media_format, "notes", ())]
        if is_hub_id(path) and not has_weights(folder):
            return [*notes, f"the weights of '{path}' were not checked: they are fetched when the run starts."]
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
        _refuse_unfit(path, report, files, section.unused_weights)
        if checkpoint.family != GENERAL:
            _refuse_dropout(path, model)
        with of_its_family(checkpoint):
            checkpoint.adapter_class(model)
        groups = groups_of(checkpoint.adapter_class, model)
        for group in section.freeze:
            if group not in groups:
                raise RecipeError(f"model.freeze: the model has no parameter group '{group}'{nearest(group, list(groups))}")
        if section.lora.rank:
            inject(model, groups, section.lora, path, empty=True)
    try:
        _check_memory(path, files, dtype, find_device(section.device), section.unused_weights)
    except ModelError as error:
        return [*notes, f"on this machine the run would be refused: {error}"]
    return notes


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


def _check_memory(
    path: str, files: Sequence[WeightFile], dtype: torch.dtype, device: torch.device, unused: Sequence[str] = ()
) -> int:
    """Refuse weights that do not fit into memory, by headers alone; returns their bytes in memory."""
    numbers = sum(prod(tensor.shape) for file in files for tensor in file.tensors if not is_unloaded(tensor.name, unused))
    needed = numbers * dtype.itemsize
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else free_memory()
    if free is not None and needed > free:
        half = ", model.dtype: bfloat16 (half as much)" if dtype == torch.float32 else ""
        raise ModelError(
            f"model.path '{path}': its weights take {needed / GIB:.2f} GiB as {str(dtype).removeprefix('torch.')}, and "
            f"{free / GIB:.2f} GiB are free in the memory of {device if on_gpu else 'this machine'}; training takes more "
            f"than the weights. Use a smaller checkpoint{half}, or a larger machine."
        )
    return needed


def _refuse_unfit(path: str, report: Mapping[str, Any], files: Sequence[WeightFile], unused: Sequence[str]) -> None:
    """Refuse weights that do not match the config, by transformers' loading report: other shapes, too few, too many."""
    if report["mismatched_keys"]:
        name, stored_shape, wanted = sorted(report["mismatched_keys"])[0]
        raise ModelError(
            f"model.path '{path}': weights and config.json disagree on {len(report['mismatched_keys'])} shapes: {name} is "
            f"{list(stored_shape)} in the weights and {list(wanted)} by the config. Use the config that belongs to the "
            "weights."
        )
    if missing := report["missing_keys"]:
        raise ModelError(
            f"model.path '{path}': the checkpoint lacks {len(missing)} weights that its config.json asks for: "
            f"{told_by_part(missing)}. Use the config that belongs to the weights, or download the checkpoint again."
        )
    stored = {common_name(tensor.name): tensor.name for file in files for tensor in file.tensors}
    unexpected = {stored.get(common_name(key), key) for key in report["unexpected_keys"]}  # by their names in the files

    def kind(name: str) -> str:
        return re.sub(r"\b\d+\b", "N", common_name(name))  # without the numbers of layers and experts

    kinds = {kind(name) for name in stored.values() if name not in unexpected}
    if layers := [name for name in unexpected if kind(name) in kinds]:
        raise ModelError(
            f"model.path '{path}': {len(layers)} weights of the checkpoint have no place in the model that its config.json "
            f"describes, which has fewer layers or experts of the same kind: {told_by_part(layers)}. Use the config that "
            "belongs to the weights."
        )
    if others := [name for name in unexpected if not is_unloaded(name, unused)]:
        raise ModelError(
            f"model.path '{path}': {len(others)} weights of the checkpoint have no place in the model that its config.json "
            f"describes: {told_by_part(others)}. Use the config that belongs to the weights. If they are no part of the "
            f"model, name their prefixes: model.unused_weights: ['{part_of(min(others))}.'] (in Python unused_weights=…, "
            "to serve --unused-weights). They are then not loaded, and an export carries them along."
        )


def _refuse_not_finite(path: str, model: torch.nn.Module) -> None:
    broken = [
        name
        for name, weight in model.named_parameters()
        if weight.numel() and not all(bound.isfinite() for bound in torch.aminmax(weight.detach()))
    ]
    if broken:
        raise ModelError(
            f"model.path '{path}': {len(broken)} weights of the checkpoint hold numbers that are not finite: "
            f"{told_by_part(broken)}. It was saved after its training had failed, or damaged since; use another copy or an "
            "earlier checkpoint."
        )


@contextmanager
def _announced(size: int, folder: str) -> Iterator[None]:
    """Print that a long load begins, with a progress bar at a terminal; a short one prints nothing."""
    from transformers.utils import logging

    with quiet():  # restores what is set here
        if size >= LONG_LOAD:
            print(f"loading {size / GIB:.1f} GiB of weights from {folder} …", file=sys.stderr, flush=True)
            if sys.stderr.isatty():
                logging.enable_progress_bar()
        yield


def _refuse_dropout(path: str, model: Any) -> None:
    """Refuse dropout anywhere: training would then see another policy than the one that was sampled."""
    for name, share in _dropouts(model):
        raise ModelError(
            f"model.path '{path}': {name} has dropout {share:g}, which would make training see another policy than the "
            "one that was sampled; set it to 0 in the checkpoint's config.json."
        )


def _dropouts(model: Any) -> Iterator[tuple[str, float]]:
    """Shares of dropout in a model's config and modules."""
    yield from _dropout_keys(model.config, "config.json")
    modules = ((f"module {name}", part.p) for name, part in model.named_modules() if isinstance(part, _DropoutNd))
    yield from ((name, share) for name, share in modules if share > 0)


def _dropout_keys(config: Any, place: str) -> Iterator[tuple[str, float]]:
    from transformers import PreTrainedConfig

    for key, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _dropout_keys(value, f"{place}, {key}")
        elif (
            any(word in key for word in ("dropout", "layerdrop", "drop_path"))
            and isinstance(value, int | float)
            and value > 0
        ):
            yield f"{key} ({place})", float(value)

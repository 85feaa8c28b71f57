"""Whether a checkpoint would load, without its weights: its config, tokenizer and processor, and the headers of its files.

transformers loads it as for a run, but of tensors without numbers (torch's device ``meta``), so that names and shapes are
compared by the code that will load them. A checkpoint of 30 GB takes as long as one of 30 MB.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sensorium.data.media_store import MediaStore
from sensorium.models.checkpoint_path import (
    LOADING,
    concrete_class,
    find_checkpoint,
    has_weights,
    is_hub_id,
    may_be_hub_id,
    naming,
    own_config,
)
from sensorium.models.load import DTYPES, find_device, loading_options, refuse_dropout
from sensorium.models.load_chat import CheckpointConfig, chat_processor_of, config_at, of_its_family
from sensorium.models.lora import choose_layers
from sensorium.models.quiet import quiet
from sensorium.models.weight_files import WeightFile, check_memory, refuse_unfit, whole_weights
from sensorium.recipe.schema import ModelSection
from sensorium.recipe.shape import cached_folder, is_ours
from sensorium.vocabulary.errors import ModelError

STORED = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip


def check_checkpoint(section: ModelSection, path: str = "") -> list[str]:
    """Refuse what a run would refuse of its model; returns what could not be checked, or not for this machine.

    ``path`` stands for the section's own. A hub id is looked for in the hub's cache alone: nothing is fetched.
    """
    path = path or section.path
    if is_ours(path):
        return []
    place = _place(path, section.revision if path == section.path else "")
    if place is None:
        return [f"model.path '{path}' was not checked: as a hub id it is fetched when the run starts; it is not here yet."]
    with LOADING:
        checkpoint = config_at(path, place, section.family, dequantize=section.dequantize)
        chat_processor_of(checkpoint, MediaStore(), None, 0).decoder.close()
        if is_hub_id(path) and not has_weights(Path(place)):
            return [
                f"the weights of '{path}' were not checked: they are not here yet, and are fetched when the run starts."
            ]
        files = whole_weights(path, Path(place))
        _check_fit(checkpoint, files, section)
    return _for_this_machine(path, files, section)


def _place(path: str, revision: str) -> str | None:
    """The folder of a checkpoint; None for a hub id that is not in the cache."""
    if Path(path).expanduser().is_dir() or not may_be_hub_id(path):
        return find_checkpoint(path, revision)
    folder = cached_folder(path, revision)
    return str(folder) if folder is not None and (folder / "config.json").is_file() else None


def _check_fit(checkpoint: CheckpointConfig, files: Sequence[WeightFile], section: ModelSection) -> None:
    """Build the model without numbers and give it tensors without numbers, of the names and shapes in the files."""
    tensors = {tensor.name: tensor for file in files for tensor in file.tensors}
    if strange := sorted({tensor.dtype for tensor in tensors.values()} - STORED.keys()):
        raise ModelError(
            f"model.path '{checkpoint.path}': its weights are stored as {strange[0]}, which is not known here."
        )
    named = {name: torch.empty(t.shape, dtype=STORED[t.dtype], device="meta") for name, t in tensors.items()}
    with naming(checkpoint.path, checkpoint.place, weights=True), quiet():
        model, report = _load(checkpoint, named, DTYPES[section.dtype])
    refuse_unfit(checkpoint.path, report, files, section.unused_weights)
    refuse_dropout(checkpoint.path, model)
    with of_its_family(checkpoint):
        checkpoint.adapter_class(model)
    if section.lora.rank:
        choose_layers(model, checkpoint.adapter_class.groups, section.lora)


def _load(checkpoint: CheckpointConfig, named: dict[str, Any], dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    loaded: tuple[Any, dict[str, Any]] = concrete_class(checkpoint.config).from_pretrained(
        None,
        config=own_config(checkpoint.config),
        state_dict=named,
        device_map={"": "meta"},
        **loading_options(checkpoint, dtype),
    )
    return loaded


def _for_this_machine(path: str, files: Sequence[WeightFile], section: ModelSection) -> list[str]:
    """What this machine would refuse, which another one may not."""
    try:
        check_memory(path, files, DTYPES[section.dtype], find_device(section.device), section.unused_weights)
    except ModelError as error:
        return [f"on this machine the run would be refused: {error}"]
    return []

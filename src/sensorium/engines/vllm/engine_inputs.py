"""vLLM's own form of a prompt whose media are preprocessed already. Runs in the actor."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

PATCHES = ("pixel_values", "pixel_values_videos")


def engine_input(told: Mapping[str, Any]) -> Any:
    """The engine input of a request: expanded ids, and of each medium its tensors (None: sent before), hash and range."""
    from vllm.inputs import mm_input, tokens_input
    from vllm.multimodal.inputs import PlaceholderRange

    ids: list[int] = told["ids"]
    if not told["media"]:
        return tokens_input(ids)
    from safetensors.torch import load_file

    stored = load_file(told["file"]) if told["file"] else {}
    items: dict[str, list[Any]] = {}
    hashes: dict[str, list[str]] = {}
    ranges: dict[str, list[Any]] = {}
    for i, medium in enumerate(told["media"]):
        modality = medium["modality"]
        fields = None if medium["fields"] is None else {name: stored[f"{i}.{name}"] for name in medium["fields"]}
        mask = None if medium["mask"] is None else torch.tensor(medium["mask"])
        items.setdefault(modality, []).append(None if fields is None else _item(modality, fields))
        hashes.setdefault(modality, []).append(medium["key"])
        ranges.setdefault(modality, []).append(PlaceholderRange(medium["start"], medium["length"], mask))
    return mm_input(ids, items, hashes, ranges)


def _item(modality: str, fields: Mapping[str, Tensor]) -> Any:
    """One medium of vLLM's: patches lie flat, all else is one row for each medium and stays on the CPU."""
    from transformers import BatchFeature
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    config = {
        name: MultiModalFieldConfig.flat_from_sizes(modality, torch.tensor([len(tensor)]))
        if name in PATCHES
        else MultiModalFieldConfig.batched(modality, keep_on_cpu=True)
        for name, tensor in fields.items()
    }
    return MultiModalKwargsItems.from_hf_inputs(BatchFeature(dict(fields)), config)[modality][0]

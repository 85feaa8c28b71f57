"""From a recipe's model path to a policy: a folder, a hub id, a shipped model or a tiny one made on the spot."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd

from sensorium.data.decoder import Decoder
from sensorium.data.media_store import MediaStore
from sensorium.models.checkpoint_path import LOADING, builder_of, is_hub_id, model_class, naming
from sensorium.models.load_chat import CheckpointConfig, chat_processor_of, of_its_family, read_config
from sensorium.models.lora import add_adapters
from sensorium.models.policy import Policy, Precision
from sensorium.models.quiet import quiet
from sensorium.models.weight_files import announced, check_memory, refuse_not_finite, refuse_unfit, whole_weights
from sensorium.recipe.schema import LoraSection
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

    ``revision``: a branch, tag or commit of a hub id. ``dequantize``: FP8 weights are loaded as plain numbers.
    ``unused_weights``: prefixes of weights that the model has no place for and that are left out.
    ``lora`` with a rank puts fresh adapters into it, drawn by ``seed``. ``decoder``: of the store's media, where others
    share it (judges, the log); else the policy has its own. ``media_bytes`` of preprocessed media are kept in memory.
    ``precision``: see ``Policy``.
    """
    with LOADING:
        if dtype not in DTYPES:
            raise ModelError(f"model.dtype: unknown dtype '{dtype}'{nearest(dtype, list(DTYPES))}")
        checkpoint = read_config(path, family, revision, dequantize=dequantize)
        chosen = find_device(device)
        model = _read_model(checkpoint, DTYPES[dtype], chosen, unused_weights)
        chat = chat_processor_of(checkpoint, store, decoder, media_bytes)
        model.to(chosen).eval()
        adapter_class, adapters = checkpoint.adapter_class, None
        if lora is not None and lora.rank:
            adapters = add_adapters(model, adapter_class.groups, lora, seed, _base_name(path, checkpoint.place))
        with of_its_family(checkpoint):
            adapter = adapter_class(model)
        return Policy(chat, adapter, model, adapters, precision)


def _read_model(checkpoint: CheckpointConfig, dtype: torch.dtype, device: torch.device, unused: Sequence[str]) -> Any:
    """The model with its weights on ``device``; what is missing or does not fit is refused.

    Weights of a GPU go there one by one, straight from their files: this machine's memory holds no copy of the model.
    """
    path, place = checkpoint.path, checkpoint.place
    files = whole_weights(path, Path(place))
    size = check_memory(path, files, dtype, device, unused)
    with naming(path, place, weights=True), announced(size, place):
        model, report = model_class(checkpoint.config).from_pretrained(
            place,
            use_safetensors=True,  # older weight files are pickles
            trust_remote_code=False,  # None would ask at a terminal whether to run a checkpoint's own code
            device_map=None if device.type == "cpu" else {"": device},
            **loading_options(checkpoint, dtype),
        )
    if checkpoint.dequantize:
        model._weight_conversions = None  # or its checkpoints would be FP8 again
    refuse_unfit(path, report, files, unused)
    refuse_not_finite(path, model)
    refuse_dropout(path, model)
    return model


def loading_options(checkpoint: CheckpointConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What transformers is told of a load, wherever the weights come from."""
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
    """The policy that a checkpoint's small files describe, its weights unset: they come from elsewhere, all of them."""
    from transformers.initialization import no_init_weights

    checkpoint = read_config(path, family, weights=False)
    adapter_class, chosen = checkpoint.adapter_class, find_device(device)
    with LOADING, naming(path, checkpoint.place), quiet(), no_init_weights():
        build = builder_of(model_class(checkpoint.config))
        model = build(checkpoint.config, dtype=DTYPES[dtype], attn_implementation=adapter_class.attention)
    model.tie_weights()  # left out with their initialization
    model.to(chosen).eval()
    adapters = None
    if lora is not None:
        adapters = add_adapters(model, adapter_class.groups, lora, 0, path)
    chat = chat_processor_of(checkpoint, store, None, 1 << 29)
    return Policy(chat, adapter_class(model), model, adapters, precision)


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
            f"model.device is '{device}', but torch finds no CUDA device here. Use 'auto' or 'cpu', or mend the driver "
            "(nvidia-smi should list the GPU)."
            if torch.version.cuda
            else f"model.device is '{device}', but this torch {torch.__version__} was built without CUDA. Use 'auto' or "
            "'cpu', or install a build of the same version with CUDA: docs/start/gpu.md has the command."
        )
    if chosen.type == "cuda" and (chosen.index or 0) >= count:
        raise ModelError(f"model.device is '{device}', but there are {count} CUDA devices here, counted from 0.")
    return chosen


def _base_name(path: str, place: str) -> str:
    """What an adapter calls the model it was made for: a hub id, or a folder; one made on the spot has only its name."""
    return path if path.startswith("tiny:") or is_hub_id(path) else str(Path(place).resolve())


def refuse_dropout(path: str, model: Any) -> None:
    """A policy is one distribution: what was sampled must be what is trained, so nothing may be left out by chance."""
    modules = [(name, part.p) for name, part in model.named_modules() if isinstance(part, _DropoutNd)]
    found = [*_dropouts(model.config, "config.json"), *((f"module {name}", share) for name, share in modules)]
    for name, share in found:
        if share > 0:
            raise ModelError(
                f"model.path '{path}': {name} has dropout {share:g}, which would make training see another policy than the "
                "one that was sampled; set it to 0 in the checkpoint's config.json."
            )


def _dropouts(config: Any, place: str) -> Iterator[tuple[str, float]]:
    """Every share of a config, and of the configs inside it, that is left out by chance."""
    from transformers import PreTrainedConfig

    for key, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _dropouts(value, f"{place}, {key}")
        elif any(word in key for word in ("dropout", "layerdrop", "drop_path")) and isinstance(value, int | float):
            yield f"{key} ({place})", float(value)

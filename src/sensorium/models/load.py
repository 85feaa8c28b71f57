"""From a recipe's model path to a policy: a folder, a hub id, a shipped model or a tiny one made on the spot."""

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.nn.modules.dropout import _DropoutNd

import sensorium.models.torchvision_fix  # noqa: F401  (before transformers imports torchvision)
from sensorium.media.decoder import Decoder
from sensorium.media.store import MediaStore
from sensorium.models.lora import add_adapters
from sensorium.models.policy import Policy
from sensorium.models.quiet import quiet
from sensorium.recipe.names import resolve, table
from sensorium.recipe.schema import LoraSection
from sensorium.vocabulary.errors import ModelError, nearest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


_loading = threading.Lock()
"""While transformers loads a model it changes torch for the whole process: loads in two threads would spoil each other."""


def load_policy(
    path: str,
    *,
    store: MediaStore,
    dtype: str = "float32",
    device: str = "auto",
    family: str = "auto",
    lora: LoraSection | None = None,
    seed: int = 0,
    decoder: Decoder | None = None,
    media_bytes: int = 1 << 29,
) -> Policy:
    """Load a checkpoint. ``path``: a folder, a hub id, ``package:NAME`` (shipped) or ``tiny:FAMILY`` (random weights).

    ``lora`` with a rank puts fresh adapters into it, drawn by ``seed``. ``decoder``: of the store's media, where others
    share it (judges, the log); else the policy has its own. ``media_bytes`` of preprocessed media are kept in memory.
    """
    with _loading:
        return _load(path, store, dtype, device, family, lora, seed, decoder, media_bytes)


def _load(
    path: str,
    store: MediaStore,
    dtype: str,
    device: str,
    family: str,
    lora: LoraSection | None,
    seed: int,
    decoder: Decoder | None,
    media_bytes: int,
) -> Policy:
    from transformers import AutoConfig, AutoTokenizer

    if dtype not in DTYPES:
        raise ModelError(f"model.dtype: unknown dtype '{dtype}'{nearest(dtype, list(DTYPES))}")
    place = find_checkpoint(path)
    with _naming(path, place):
        config = AutoConfig.from_pretrained(place, trust_remote_code=False)
    _refuse_quantized(path, config)
    chosen = find_device(device)
    family = family_of(config.model_type, family)
    adapter_class = resolve("family", family, "model.family")
    with _naming(path, place), quiet():
        model, report = _model_class(config).from_pretrained(
            place,
            use_safetensors=True,  # older weight files are pickles
            trust_remote_code=False,  # None would ask at a terminal whether to run a checkpoint's own code
            dtype=DTYPES[dtype],
            attn_implementation=adapter_class.attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
        )
        processor = _processor(place, config)
        tokenizer = getattr(processor, "tokenizer", None) or AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    if report["mismatched_keys"]:
        name, there, wanted = sorted(report["mismatched_keys"])[0]
        raise ModelError(
            f"model.path '{path}': weights and config.json disagree on {len(report['mismatched_keys'])} shapes: {name} is "
            f"{list(there)} in the weights and {list(wanted)} by the config. Use the config that belongs to the weights."
        )
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:4])
        raise ModelError(f"model.path '{path}': the checkpoint lacks {len(report['missing_keys'])} weights: {missing}, ….")
    _refuse_dropout(path, model)
    model.to(chosen).eval()
    adapters = None
    if lora is not None and lora.rank:
        adapters = add_adapters(model, adapter_class.groups, lora, seed, _base_name(path, place))
    adapter = adapter_class(model, processor)
    return Policy(family, adapter, model, tokenizer, processor, store, adapters, decoder, media_bytes)


def find_checkpoint(path: str) -> str:
    """The folder or hub id that a model path stands for."""
    kind, colon, name = path.partition(":")
    if colon and kind == "package":
        return _shipped(name)
    if colon and kind == "tiny":
        from sensorium.models.tiny import make_tiny

        with quiet():
            return str(make_tiny(name, Path(tempfile.mkdtemp(prefix=f"sensorium-tiny-{name}-"))))
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise ModelError(f"model.path '{path}': the folder has no config.json; it is not a Hugging Face checkpoint.")
        return str(folder)
    local = folder.is_absolute() or path.startswith((".", "~"))
    if local or path.count("/") > 1 or ("/" in path and folder.parent.is_dir()):
        raise ModelError(f"model.path '{path}': there is no such folder{_beside(folder)}")
    return path


def family_of(model_type: str, wanted: str = "auto") -> str:
    """The family of a checkpoint by its ``model_type``; an unknown one is refused with the nearest name."""
    if wanted != "auto":
        return wanted
    model_type = model_type.removesuffix("_thinker")  # Qwen2.5-Omni's, saved without the parts that speak
    if model_type not in table("family"):
        raise ModelError(f"no adapter for model type '{model_type}'{nearest(model_type, list(table('family')))}")
    return model_type


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
        built = "" if torch.version.cuda else ", and this torch was built without CUDA"
        raise ModelError(
            f"model.device is '{device}', but torch finds no CUDA device here{built}. Use 'auto' or 'cpu', or mend the "
            "driver (nvidia-smi should list the GPU)."
        )
    if chosen.type == "cuda" and (chosen.index or 0) >= count:
        raise ModelError(f"model.device is '{device}', but there are {count} CUDA devices here, counted from 0.")
    return chosen


def _shipped(name: str) -> str:
    assets = Path(str(files("sensorium"))) / "assets"
    folder = assets / name
    if not (folder / "config.json").exists():
        known = sorted(entry.parent.name for entry in assets.glob("*/config.json"))
        raise ModelError(f"model.path 'package:{name}': no such shipped model{nearest(name, known)}")
    return str(folder)


def _model_class(config: Any) -> Any:
    import transformers

    if hasattr(config, "thinker_config"):  # a whole Qwen2.5-Omni: what speaks is left aside
        return transformers.Qwen2_5OmniThinkerForConditionalGeneration
    return transformers.AutoModelForImageTextToText if _has_towers(config) else transformers.AutoModelForCausalLM


def _has_towers(config: Any) -> bool:
    return hasattr(config, "vision_config") or hasattr(config, "thinker_config")


def _processor(place: str, config: Any) -> Any:
    if not _has_towers(config):
        return None
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(place, trust_remote_code=False)
    if not processor.chat_template:  # older checkpoints keep it in tokenizer_config.json alone
        processor.chat_template = processor.tokenizer.chat_template
    return processor


def _base_name(path: str, place: str) -> str:
    """What an adapter calls the model it was made for: a hub id, or a folder; one made on the spot has only its name."""
    if path.startswith("tiny:"):
        return path
    return str(Path(place).resolve()) if Path(place).is_dir() else place


def _refuse_dropout(path: str, model: Any) -> None:
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


def _refuse_quantized(path: str, config: Any) -> None:
    """Weights of a few bits cannot be trained here, and transformers would want packages of its own to read them."""
    for part in (config, *(vars(config).get(name) for name in ("text_config", "thinker_config"))):
        said = getattr(part, "quantization_config", None)
        if said:
            method = said.get("quant_method") if isinstance(said, dict) else getattr(said, "quant_method", None)
            name = getattr(method, "value", method) or "method not named"
            raise ModelError(
                f"model.path '{path}': the checkpoint is quantized ({name}), "
                "which is not supported. Use the model it was made from, in float32 or bfloat16 (model.dtype), with "
                "model.lora if memory is short."
            )


@contextmanager
def _naming(path: str, place: str) -> Iterator[None]:
    """Turn the errors of transformers and safetensors into one that names the model path and what to do."""
    try:
        yield
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, ImportError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ModelError(f"model.path '{path}': cannot load the checkpoint: {_reason(error, place)}") from error


def _reason(error: BaseException, place: str) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    if "custom code" in reason:
        return "it brings Python code of its own, which is not run. Use a checkpoint of a family that transformers knows."
    if Path(place).is_dir() and not any(Path(place).glob("*.safetensors")):
        return "it has no weights as safetensors, and no other kind is read (pickles can run code). Save it as safetensors."
    if isinstance(error, SafetensorError):
        return f"a weight file is cut short or damaged ({reason}). Copy or download it again."
    return reason if Path(place).is_dir() else f"it is no folder here, and not to be had as a hub id: {reason}"


def _beside(folder: Path) -> str:
    """What there is in place of a folder that is missing."""
    if not folder.parent.is_dir():
        return "."
    return nearest(folder.name, sorted(entry.name for entry in folder.parent.iterdir() if entry.is_dir())[:40])

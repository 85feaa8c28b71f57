"""Where a recipe's model path leads, and errors of reading what is there that name the path and the way out."""

import atexit
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from sensorium.models.hub_files import NotFetched, fetch_small_files, fetch_weights
from sensorium.models.quiet import quiet
from sensorium.models.unsupported import unknown_type
from sensorium.models.wrong_path import may_be_hub_id, near_to_hub_id, nowhere, shipped_models
from sensorium.recipe.shape import is_ours
from sensorium.recipe.tiny_sizes import family_and_layers
from sensorium.vocabulary.errors import ModelError, nearest

CANNOT_LOAD = re.compile(r"Can't load (?:the )?(.+?) for '")
UNKNOWN_TYPE = re.compile(r"model type [`'\"]([^`'\"]+)[`'\"] but Transformers does not recognize")

FOREIGN = (
    SafetensorError, StrictDataclassError, OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError,
    ImportError, ArithmeticError, AssertionError,
)  # fmt: skip
"""What transformers and the libraries below it raise over a checkpoint's files."""


def find_checkpoint(path: str, revision: str = "") -> str:
    """The folder that a model path stands for. That of a hub id is in the hub's cache, perhaps without its weights."""
    kind, colon, name = path.partition(":")
    folder = Path(path).expanduser()
    if revision and not is_hub_id(path):
        raise ModelError(f"model.revision '{revision}' is for hub ids, and model.path '{path}' is none; leave it out.")
    if colon and kind == "package":
        return _shipped(name)
    if colon and kind == "tiny":
        return _made(name)
    if folder.is_dir():
        if not (folder / "config.json").exists():
            found = (*folder.glob("*/config.json"), *folder.glob("checkpoints/*/config.json"))
            inside = sorted(str(entry.parent.relative_to(folder)) for entry in found)
            below = f" Below it are checkpoints in: {', '.join(inside[:8])}; name one of them." if inside else ""
            raise ModelError(
                f"model.path '{path}': the folder has no config.json; it is not a Hugging Face checkpoint.{below}"
            )
        return str(folder)
    if not may_be_hub_id(path):
        raise ModelError(f"model.path '{path}': {nowhere(path)}")
    with _fetching(path):
        return str(fetch_small_files(path, revision))


def find_weights(path: str, place: str) -> str:
    """The folder that was found for a path, with its weights: those of a hub id are fetched where they are missing."""
    if not is_hub_id(path):
        return place
    with _fetching(path):
        return str(fetch_weights(path, Path(place)))


def is_hub_id(path: str) -> bool:
    """Whether a path that was found is one of the hub's."""
    return not is_ours(path) and not Path(path).expanduser().is_dir()


@contextmanager
def naming(path: str, place: str, *, weights: bool = False) -> Iterator[None]:
    """Turn the errors of transformers and safetensors into one that names the model path and what to do.

    ``weights``: weight files are read, so that their absence may be the cause.
    """
    try:
        yield
    except Exception as error:
        bare = type(error) is Exception  # of the library tokenizers
        if isinstance(error, torch.OutOfMemoryError) or not (bare or isinstance(error, FOREIGN)):
            raise
        raise ModelError(f"model.path '{path}': cannot load the checkpoint: {_reason(error, place, weights)}") from error


@contextmanager
def _fetching(path: str) -> Iterator[None]:
    try:
        yield
    except NotFetched as error:
        raise ModelError(f"model.path '{path}': {error}{near_to_hub_id(path) or '.'}") from error


def _made(name: str) -> str:
    """A tiny model in a folder of its own, which goes when this process ends."""
    from sensorium.models.tiny import make_tiny

    family, layers = family_and_layers(name)
    folder, maker = Path(tempfile.mkdtemp(prefix=f"sensorium-tiny-{family}-")), os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == maker else None)
    with quiet():
        return str(make_tiny(family, folder, num_hidden_layers=layers))


def _shipped(name: str) -> str:
    folder = shipped_models() / name
    if not (folder / "config.json").exists():
        known = sorted(entry.parent.name for entry in shipped_models().glob("*/config.json"))
        raise ModelError(f"model.path 'package:{name}': no such shipped model{nearest(name, known)}")
    return str(folder)


def _reason(error: BaseException, place: str, weights: bool) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    if reason.endswith(":") and len(lines) > 1:  # what it is about, and then what is wrong with it
        reason = f"{reason} {lines[1]}"
    if unknown := UNKNOWN_TYPE.search(str(error)):
        return unknown_type(unknown[1])
    if damaged := _damaged_json(Path(place)):
        return f"its {damaged} is damaged: it is no whole JSON. Copy or download it again."
    if lacking := CANNOT_LOAD.match(reason):
        return (
            f"its folder lacks the files of the {lacking[1]}. Copy them from the published checkpoint: tokenizer.json, "
            "tokenizer_config.json, preprocessor_config.json and what else stands there beside the weights."
        )
    if "custom code" in reason:
        return "it brings Python code of its own, which is not run. Use a checkpoint of a family that transformers knows."
    if weights and Path(place).is_dir() and not any(Path(place).glob("*.safetensors")):
        return "it has no weights as safetensors, and no other kind is read (pickles can run code). Save it as safetensors."
    if isinstance(error, SafetensorError):
        return f"a weight file is cut short or damaged ({reason}). Copy or download it again."
    if isinstance(error, StrictDataclassError | ArithmeticError):
        return f"{reason.rstrip('.')}. Use the config.json that belongs to the weights."
    if isinstance(error, KeyError):
        return f"its files name {reason}, which transformers does not know. Do they all belong to one checkpoint?"
    if isinstance(error, AttributeError):
        return f"{reason}. Do the files in its folder all belong to one checkpoint?"
    return reason


def _damaged_json(folder: Path) -> str:
    """The name of a JSON file in a folder that cannot be read; empty if all can."""
    for file in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError):
            return file.name
    return ""

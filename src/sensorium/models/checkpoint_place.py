"""Where a recipe's model path leads, and errors of reading what is there that name the path and the way out."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import torch
from safetensors import SafetensorError

from sensorium.models.quiet import quiet
from sensorium.vocabulary.errors import ModelError, nearest


def find_checkpoint(path: str) -> str:
    """The folder or hub id that a model path stands for."""
    kind, colon, name = path.partition(":")
    if colon and kind == "package":
        return _shipped(name)
    if colon and kind == "tiny":
        return _made(name)
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise ModelError(f"model.path '{path}': the folder has no config.json; it is not a Hugging Face checkpoint.")
        return str(folder)
    local = folder.is_absolute() or path.startswith((".", "~"))
    if local or path.count("/") > 1 or ("/" in path and folder.parent.is_dir()):
        raise ModelError(f"model.path '{path}': there is no such folder{_beside(folder)}")
    return path


@contextmanager
def naming(path: str, place: str, *, weights: bool = False) -> Iterator[None]:
    """Turn the errors of transformers and safetensors into one that names the model path and what to do.

    ``weights``: weight files are read, so that their absence may be the cause.
    """
    try:
        yield
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, ImportError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ModelError(f"model.path '{path}': cannot load the checkpoint: {_reason(error, place, weights)}") from error


def _made(name: str) -> str:
    """A tiny model in a folder of its own, which goes when this process ends."""
    from sensorium.models.tiny import make_tiny

    folder, maker = Path(tempfile.mkdtemp(prefix=f"sensorium-tiny-{name}-")), os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == maker else None)
    with quiet():
        return str(make_tiny(name, folder))


def _shipped(name: str) -> str:
    assets = Path(str(files("sensorium"))) / "assets"
    folder = assets / name
    if not (folder / "config.json").exists():
        known = sorted(entry.parent.name for entry in assets.glob("*/config.json"))
        raise ModelError(f"model.path 'package:{name}': no such shipped model{nearest(name, known)}")
    return str(folder)


def _reason(error: BaseException, place: str, weights: bool) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    if "custom code" in reason:
        return "it brings Python code of its own, which is not run. Use a checkpoint of a family that transformers knows."
    if weights and Path(place).is_dir() and not any(Path(place).glob("*.safetensors")):
        return "it has no weights as safetensors, and no other kind is read (pickles can run code). Save it as safetensors."
    if isinstance(error, SafetensorError):
        return f"a weight file is cut short or damaged ({reason}). Copy or download it again."
    return reason if Path(place).is_dir() else f"it is no folder here, and not to be had as a hub id: {reason}"


def _beside(folder: Path) -> str:
    """What there is in place of a folder that is missing."""
    if not folder.parent.is_dir():
        return "."
    return nearest(folder.name, sorted(entry.name for entry in folder.parent.iterdir() if entry.is_dir())[:40])

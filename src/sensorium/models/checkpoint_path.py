"""From a model path to a folder: a folder, a hub id (cached or fetched), a shipped model or a tiny one made here.

Also the transformers class of a checkpoint, why a checkpoint is refused, what identifies a model, and transformers without
its progress bars and loading reports.
"""

import atexit
import hashlib
import json
import logging as standard_logging
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import logging

from sensorium.models.tried_versions import first_with
from sensorium.models.weight_files import INDEX, SINGLE
from sensorium.recipe.family_facts import FAMILIES
from sensorium.recipe.model_shape import family_and_layers, is_ours
from sensorium.recipe.registry import table
from sensorium.vocabulary.errors import CheckpointError, ModelError, nearest

if TYPE_CHECKING:  # it imports transformers' models, which a chat processor does without
    from sensorium.models.policy import Policy

# Our own displays show progress. Nor are configs rendered for log lines that nobody sees: comparing each with a default
# config took a third of the loading time of a small model.
_UNSEEN: ContextVar[bool] = ContextVar("unseen", default=False)


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no report inside, and configs are shown by the name of their class."""
    shown = logging.is_progress_bar_enabled()
    reporter = standard_logging.getLogger("transformers.modeling_utils")
    logging.disable_progress_bar()
    reporter.addFilter(_no_report)
    before = _UNSEEN.set(logging.get_verbosity() > logging.INFO)
    try:
        yield
    finally:
        _UNSEEN.reset(before)
        reporter.removeFilter(_no_report)
        if shown:
            logging.enable_progress_bar()


def _no_report(record: standard_logging.LogRecord) -> bool:
    """False for a loading report, unless it is the only explanation of a failed load."""
    text = record.getMessage()
    return "LOAD REPORT" not in text or "CONVERSION" in text


def _shortened(whole: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda config: f"<{type(config).__name__}>" if _UNSEEN.get() else whole(config)


for _config_class in (PreTrainedConfig, GenerationConfig):
    _config_class.__repr__ = _shortened(_config_class.__repr__)


# transformers changes torch for the whole process while it builds a model, so only one thread may.
LOADING = threading.Lock()


def own_config(config: Any) -> Any:
    """A copy of the config of the model that is trained: towers change a loaded model's config."""
    return deepcopy(getattr(config, "thinker_config", config))


def model_class(config: Any) -> Any:
    """The transformers class that a checkpoint is loaded as."""
    import transformers

    facts = FAMILIES.get(config.model_type.removesuffix("_thinker"))
    if facts is not None:
        return getattr(transformers, facts.model_class)
    # The auto class of texts would load only the language model of some that see.
    return transformers.AutoModelForMultimodalLM if has_towers(config) else transformers.AutoModelForCausalLM


def has_towers(config: Any) -> bool:
    """Whether a model takes more than text."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    parts = any(hasattr(config, f"{part}_config") for part in ("vision", "audio", "thinker"))
    return parts or config.model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES


HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
FORMS = "model.path is a folder, a hub id (owner/name), package:NAME or tiny:FAMILY."
SHOWN = 12  # folder names listed in an error
SMALL_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "LICENSE*", "spk_dict.pt")  # the last: Qwen2.5-Omni's voices


def find_checkpoint(path: str, revision: str = "") -> str:
    """The folder of a model path. A hub id's is in the hub's cache, perhaps without its weights."""
    name = path.partition(":")[2]
    folder = Path(path).expanduser()
    if revision and not is_hub_id(path):
        raise ModelError(f"model.revision '{revision}' is for hub ids, and model.path '{path}' is none; leave it out.")
    if path.startswith("package:"):
        shipped = {file.parent.name: str(file.parent) for file in _shipped_configs()}
        if name not in shipped:
            raise ModelError(f"model.path 'package:{name}': no such shipped model{nearest(name, sorted(shipped))}")
        return shipped[name]
    if path.startswith("tiny:"):
        return _make_tiny(name)
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
        raise ModelError(f"model.path '{path}': {_why_missing(path)}")
    return _fetch(path, revision, SMALL_FILES)


def find_weights(path: str, folder: str) -> str:
    """The folder found for a path, with its weights: those of a hub id are fetched, at the same commit."""
    if not is_hub_id(path) or has_weights(Path(folder)):
        return folder
    return _fetch(path, Path(folder).name, _weight_names(Path(folder)))


def is_hub_id(path: str) -> bool:
    """Whether a path that was found is a hub id."""
    return not is_ours(path) and not Path(path).expanduser().is_dir()


def may_be_hub_id(path: str) -> bool:
    """Whether a path that is no folder may be a hub id: ``owner/name``, where no folder here is called ``owner``."""
    local = path.startswith((".", "~")) or Path(path).parent.is_dir()
    return HUB_ID.fullmatch(path) is not None and not local


def has_weights(folder: Path) -> bool:
    """Whether a folder of the hub's cache has the weight files that its small files name."""
    return all((folder / name).is_file() for name in _weight_names(folder))


def _weight_names(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # a damaged index is refused later, by name
        return (SINGLE,)


def _shipped_configs() -> Iterator[Path]:
    return Path(str(files("sensorium"))).glob("assets/*/config.json")


def _make_tiny(name: str) -> str:
    """A tiny model in a temporary folder, which is removed when this process ends."""
    from sensorium.models.tiny import make_tiny

    family, layers = family_and_layers(name)
    folder, maker = Path(tempfile.mkdtemp(prefix=f"sensorium-tiny-{family}-")), os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == maker else None)
    with quiet():
        return str(make_tiny(family, folder, num_hidden_layers=layers))


def _fetch(path: str, revision: str, patterns: tuple[str, ...]) -> str:
    """The folder of a hub id with the files of these patterns, from the cache or the hub."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    offline = bool(constants.HF_HUB_OFFLINE)
    try:
        # Without local_files_only a commit, unlike a branch, is looked up on the hub even when offline.
        return str(
            snapshot_download(path, revision=revision or None, allow_patterns=list(patterns), local_files_only=offline)
        )
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        at = f" at revision '{revision}'" if revision else ""
        if offline:
            reason = f"HF_HUB_OFFLINE is set and the cache {constants.HF_HUB_CACHE} does not have it{at}"
        elif isinstance(error, LocalEntryNotFoundError):
            reason = (
                f"the hub cannot be reached from here ({reason.removeprefix('Got: ')}), and its cache "
                f"{constants.HF_HUB_CACHE} does not have it. Without a network, bring the checkpoint onto this machine and "
                "give its folder, or fill the cache on a machine with a network"
            )
        hint = _did_you_mean(path.partition("/")[2], _checkpoints_here()) or "."
        raise ModelError(
            f"model.path '{path}': it is no folder here ('{Path.cwd()}'), and cannot be fetched as a hub id{at}: "
            f"{reason}{hint}"
        ) from error


def _why_missing(path: str) -> str:
    """Why a path that is neither a folder nor a hub id cannot be used, and what may be meant."""
    folder = Path(path).expanduser()
    if folder.is_file():
        return f"it is a file, and a checkpoint is a folder; give '{folder.parent}'. {FORMS}"
    if not folder.is_absolute() and "/" not in path:
        shipped = [f"package:{file.parent.name}" for file in _shipped_configs()]
        hint = _did_you_mean(path, [*(f"tiny:{family}" for family in FAMILIES), *shipped, *_checkpoints_here()])
        return f"there is no such folder in '{Path.cwd()}', and a hub id has an owner (owner/name){hint or '.'} {FORMS}"
    parent, missing = folder.parent, folder
    while not parent.is_dir():
        parent, missing = parent.parent, parent
    names = _folders(parent)
    hint = _did_you_mean(missing.name, names, parent)
    listed = ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
    return (
        f"there is no such folder{hint or '.'} '{parent.resolve()}' is the nearest folder that exists, and it holds "
        f"{f'the folders {listed}' if names else 'no folders'}."
    )


def _did_you_mean(name: str, known: Iterable[str], parent: Path = Path()) -> str:
    """``; did you mean 'models/Qwen3-VL'?``, or nothing where no name is close."""

    def bare(name: str) -> str:  # ``tiny:qwen3_vl``, ``tiny_qwen3-vl`` and ``models/Qwen3-VL`` are close to each other
        last = name.rpartition(":")[2].rpartition("/")[2].lower()
        return re.sub(r"[-_. ]+", "_", re.sub(r"^(tiny|package)[-_]", "", last))

    by_bare = {bare(other): other for other in known}
    close = get_close_matches(bare(name), by_bare, n=1, cutoff=0.6)
    return f"; did you mean '{parent / by_bare[close[0]]}'?" if close else ""


def _checkpoints_here() -> Iterator[str]:
    """Folders of the working directory, and checkpoints one folder below."""
    here = Path.cwd()
    yield from _folders(here)
    yield from (str(path.parent.relative_to(here)) for path in here.glob("*/*/config.json"))


def _folders(parent: Path) -> list[str]:
    try:
        return sorted(path.name for path in parent.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []


CANNOT_LOAD = re.compile(r"Can't load (?:the )?(.+?) for '")
UNKNOWN_TYPE = re.compile(r"model type [`'\"]([^`'\"]+)[`'\"] but Transformers does not recognize")

# What transformers and the libraries below it raise for bad checkpoint files.
FOREIGN = (
    SafetensorError, StrictDataclassError, OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError,
    ImportError, ArithmeticError, AssertionError,
)  # fmt: skip


@contextmanager
def naming(path: str, folder: str, *, weights: bool = False) -> Iterator[None]:
    """Turn errors of transformers and safetensors into a ModelError that names the model path and what to do.

    ``weights``: weight files are read inside, so their absence may be the cause.
    """
    try:
        yield
    except Exception as error:
        bare = type(error) is Exception  # raised by the library tokenizers
        if isinstance(error, torch.OutOfMemoryError) or not (bare or isinstance(error, FOREIGN)):
            raise
        reason = _reason(error, Path(folder), weights)
        raise ModelError(f"model.path '{path}': cannot load the checkpoint: {reason}") from error


def _reason(error: Exception, folder: Path, weights: bool) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    if reason.endswith(":") and len(lines) > 1:  # a title, followed by the problem
        reason = f"{reason} {lines[1]}"
    if isinstance(error, ImportError):  # a package is missing: the sentence that names it goes over two lines
        return " ".join(lines)
    if unknown := UNKNOWN_TYPE.search(str(error)):
        from transformers import __version__

        if first := first_with(unknown[1]):
            return (
                f"its config.json names the model type '{unknown[1]}', which transformers {__version__} does not know; "
                f"{first} is the first that does. Install a newer one: pip install 'transformers>={first},<6'."
            )
        return (
            f"its config.json names the model type '{unknown[1]}', which transformers {__version__} does not know, so "
            f"neither its layers nor its towers are available{nearest(unknown[1], list(table('family')))} If the model "
            "type is right, a newer transformers may know it; it would then need an adapter (docs/guides/families.md)."
        )
    for file in sorted(folder.glob("*.json")):
        try:
            json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError):
            return f"its {file.name} is damaged: it is not complete JSON. Copy or download it again."
    if lacking := CANNOT_LOAD.match(reason):
        return (
            f"its folder lacks the files of the {lacking[1]}. Copy them from the published checkpoint: tokenizer.json, "
            "tokenizer_config.json, preprocessor_config.json and the other files beside the weights."
        )
    if "custom code" in reason:
        return "it brings its own Python code, which is not run. Use a checkpoint of a family that transformers knows."
    if weights and folder.is_dir() and not any(folder.glob("*.safetensors")):
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


@dataclass(frozen=True)
class CheckpointSource:
    """``path`` as in the recipe, ``folder`` where it was (absolute), ``revision``: the hub's commit, for a hub id.

    ``sampling``: how the run's family samples frames of videos that name no rule.
    """

    path: str
    folder: str = ""
    revision: str = ""
    sampling: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def read(cls, file: Path) -> "CheckpointSource":
        try:
            return cls(**json.loads(file.read_bytes()))
        except (ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"'{file}' is damaged: it does not name the checkpoint that the run started from. Name it with --source."
            ) from error

    def find(self) -> Path:
        """The folder with its files; a ``CheckpointError`` if it is gone or cannot be fetched."""
        if self.folder:
            if not (Path(self.folder) / "config.json").is_file():
                raise CheckpointError(f"the checkpoint that the run started from is gone ('{self.folder}')")
            return Path(self.folder)
        try:
            return Path(find_weights(self.path, find_checkpoint(self.path, self.revision)))
        except ModelError as error:
            raise CheckpointError(f"the checkpoint that the run started from is gone: {error}") from error


def describe_source(path: str, revision: str = "") -> CheckpointSource:
    """The source of a run by its recipe's model path; of a hub id with the commit of the cached files."""
    from huggingface_hub import try_to_load_from_cache

    if is_ours(path):
        return CheckpointSource(path)
    folder = Path(path).expanduser()
    if folder.is_dir():
        return CheckpointSource(path, str(folder.resolve()))
    cached = try_to_load_from_cache(path, "config.json", revision=revision or None)
    return CheckpointSource(path, revision=Path(cached).parent.name if isinstance(cached, str) else revision)


NOT_THE_MODEL = ("transformers_version", "_name_or_path")


def identity(policy: "Policy") -> str:
    """A digest of everything that decides the model's input and output."""
    named = sorted(policy.model.state_dict().items())
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        weights = list(pool.map(_digest, (tensor for _, tensor in named)))
    digest = hashlib.blake2b(digest_size=16)
    for (name, tensor), content in zip(named, weights, strict=True):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {content}\n".encode())
    config = {key: value for key, value in policy.model.config.to_dict().items() if key not in NOT_THE_MODEL}
    chat = policy.chat
    processing = chat.processor.to_json_string() if chat.processor is not None else ""
    tokens = chat.tokenizer.backend_tokenizer.to_str()
    settings = json.dumps(config, sort_keys=True, default=str)
    for part in (settings, chat.owner.chat_template, processing, tokens, chat.stop_ids):
        digest.update(f"{part}\n".encode())
    return digest.hexdigest()


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().contiguous().cpu().flatten()
    return hashlib.blake2b(flat.view(torch.uint8).numpy().data, digest_size=16).hexdigest()

"""The transformers class that a checkpoint is loaded as, and how one is built of a config."""

import atexit
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from importlib.resources import files
from os import cpu_count
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor

from sensorium.models.policy import Policy
from sensorium.models.quiet import quiet
from sensorium.models.weight_files import INDEX, SINGLE
from sensorium.recipe.family_facts import FAMILIES
from sensorium.recipe.names import table
from sensorium.recipe.shape import family_and_layers, is_ours
from sensorium.vocabulary.errors import CheckpointError, ModelError, nearest

LOADING = threading.Lock()
"""While transformers builds a model it changes torch for the whole process: two threads would spoil each other's."""


def own_config(config: Any) -> Any:
    """The config of the model that is trained, as a copy: a loaded model's own is changed by its towers."""
    return deepcopy(getattr(config, "thinker_config", config))


def builder_of(model_class: Any) -> Any:
    """The function that builds a model from a config; auto classes and model classes name it differently."""
    return getattr(model_class, "from_config", None) or model_class._from_config


def model_class(config: Any) -> Any:
    """The transformers class that a checkpoint is loaded as."""
    import transformers

    facts = FAMILIES.get(config.model_type.removesuffix("_thinker"))
    if facts is not None:
        return getattr(transformers, facts.model_class)
    return transformers.AutoModelForImageTextToText if has_towers(config) else transformers.AutoModelForCausalLM


def concrete_class(config: Any) -> Any:
    """The same class by its own name, where ``model_class`` is one that chooses by the config."""
    chosen = model_class(config)
    mapping = getattr(chosen, "_model_mapping", None)
    return chosen if mapping is None else mapping[type(config)]


def has_towers(config: Any) -> bool:
    """Whether a model takes more than text."""
    return any(hasattr(config, f"{part}_config") for part in ("vision", "audio", "thinker"))


HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
FORMS = "model.path is a folder, a hub id (owner/name), package:NAME or tiny:FAMILY."
SHOWN = 12
"""Names of a folder that are listed."""


def may_be_hub_id(path: str) -> bool:
    """Whether a path that is no folder may be one of the hub's: ``owner/name``, and no folder here is called ``owner``."""
    local = path.startswith((".", "~")) or Path(path).parent.is_dir()
    return HUB_ID.fullmatch(path) is not None and not local


def nowhere(path: str) -> str:
    """Why a path that is neither a folder nor a hub id means nothing, and what may be meant."""
    folder = Path(path).expanduser()
    if folder.is_file():
        return f"it is a file, and a checkpoint is a folder; give '{folder.parent}'. {FORMS}"
    if folder.is_absolute() or "/" in path:
        return f"there is no such folder{_in_parent(folder)}"
    close = _close(path, {_plain(name): name for name in candidates()})
    hint = f"; did you mean '{close}'?" if close else "."
    return f"there is no such folder in '{Path.cwd()}', and a hub id has an owner (owner/name){hint} {FORMS}"


def near_to_hub_id(path: str) -> str:
    """The folder here whose name a hub id nearly has: ``; did you mean 'models/Qwen3-VL'?``, or nothing."""
    close = _close(path.partition("/")[2], {_plain(name): name for name in _checkpoints_here()})
    return f"; did you mean '{close}'?" if close else ""


def candidates() -> Iterator[str]:
    """What is here by name: models that are made or shipped, and folders."""
    yield from (f"tiny:{family}" for family in FAMILIES)
    yield from (f"package:{entry.parent.name}" for entry in shipped_models().glob("*/config.json"))
    yield from _checkpoints_here()


def _checkpoints_here() -> Iterator[str]:
    """Folders of the working directory, and checkpoints one folder below."""
    here = Path.cwd()
    yield from (path.name for path in _folders(here))
    yield from (str(path.parent.relative_to(here)) for path in here.glob("*/*/config.json"))


def shipped_models() -> Path:
    """Where the models are that come with the package."""
    return Path(str(files("sensorium"))) / "assets"


def _in_parent(folder: Path) -> str:
    """What the nearest folder above holds that is there, and which of it is nearly the right name."""
    parent, missing = folder.parent, folder
    while not parent.is_dir():
        parent, missing = parent.parent, parent
    names = [path.name for path in _folders(parent)]
    close = _close(missing.name, {_plain(name): name for name in names})
    hint = f"; did you mean '{parent / close}'?" if close else "."
    holds = ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
    at = f" '{parent.resolve()}' is the nearest folder that is there, and it holds"
    return f"{hint}{at} {f'the folders {holds}' if names else 'no folders'}."


def _folders(place: Path) -> list[Path]:
    try:
        return sorted(path for path in place.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []


def _close(name: str, known: dict[str, str]) -> str:
    found = get_close_matches(_plain(name), known, n=1, cutoff=0.6)
    return known[found[0]] if found else ""


def _plain(name: str) -> str:
    """A name as it is compared: ``tiny:qwen3_vl``, ``tiny_qwen3-vl`` and ``models/Qwen3-VL`` are near each other."""
    bare = name.rpartition(":")[2].rpartition("/")[2].lower()
    return re.sub(r"[-_. ]+", "_", re.sub(r"^(tiny|package)[-_]", "", bare))


OTHER_LAYERS = ("llama", "mistral")
"""Language models, beside those of the families of text, whose layers engine and learner compute as they stand."""

REASONS = {
    "gemma3": "the tokens of one of its pictures see each other both ways, so that no chunk of a prompt, cached prefix or "
    "packed row may end inside a picture, and five of six layers see the last 1024 tokens only. Neither the engine's "
    "prefix cache nor the learner's shared prompts compute that, and leaving it out would train another model (its logits "
    "move by more than 2). Use Qwen2.5-VL, Qwen3-VL, InternVL3 or SmolVLM2",
}
"""Families that were looked at and are refused, with the reason."""


def unknown_type(model_type: str) -> str:
    """Why a checkpoint cannot be loaded whose ``model_type`` not even transformers knows."""
    from transformers import __version__

    return (
        f"its config.json names the model type '{model_type}', which transformers {__version__} does not know, so neither "
        f"its layers nor its towers are to be had{nearest(model_type, list(table('family')))} If the model type is right, "
        "a newer transformers may know it; a family of it would then have to be written (docs/guides/families.md)."
    )


def missing_family(model_type: str, config: Any | None) -> str:
    """Why a checkpoint cannot be loaded, and what would have to be written for it."""
    if model_type in REASONS:
        return f"no adapter for model type '{model_type}': {REASONS[model_type]}."
    named = nearest(model_type, list(table("family")))
    if config is None:
        return f"no adapter for model type '{model_type}'{named}"
    own = own_config(config)
    known_layers = [*(family for family, facts in FAMILIES.items() if not facts.has_towers), *OTHER_LAYERS]
    towers = [kind for kind, key in TOWERS.items() if hasattr(own, key)]
    text = own.get_text_config()
    obstacles = list(_obstacles(text))
    if obstacles:
        return f"no adapter for model type '{model_type}'{named} Its language model has {' and '.join(obstacles)}, which " \
            "engine and learner do not compute, so that a family alone would not help."  # fmt: skip
    if not towers:
        return (
            f"no adapter for model type '{model_type}'{named} It is a model of text: if its layers are those of "
            f"{', '.join(known_layers)}, register it with TextModel (docs/guides/families.md)."
        )
    known = "" if text.model_type in known_layers else ", if its layers are built as Qwen's are"
    return (
        f"no adapter for model type '{model_type}'{named} Engine and learner can compute its language model "
        f"({text.model_type}){known}. What is missing is how its {' and '.join(towers)} become tokens, positions and "
        "features: a media format and a family, about a hundred lines. docs/guides/families.md shows how, by InternVL."
    )


TOWERS = {"pictures": "vision_config", "sounds": "audio_config"}


def _obstacles(text: Any) -> "list[str]":
    found = []
    kinds = set(getattr(text, "layer_types", None) or ())
    if "sliding_attention" in kinds or "chunked_attention" in kinds:
        found.append("layers that see a window of the text only")
    if any("linear" in kind or "mamba" in kind or "conv" in kind for kind in kinds):
        found.append("layers without attention over all tokens")
    return found


# The cache is where ``HF_HOME`` or ``HF_HUB_CACHE`` say. What it lacks is fetched, unless ``HF_HUB_OFFLINE`` forbids
# it.


SMALL_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "LICENSE*", "spk_dict.pt")
"""What stands beside the weights; the last one is Qwen2.5-Omni's table of voices, which exports carry along."""


class NotFetched(Exception):
    """A checkpoint cannot be had from the hub or its cache; the message says why in one sentence, without a stop."""


def fetch_small_files(name: str, revision: str) -> Path:
    """The folder of a hub id at a branch, tag or commit (none: the main branch), with all but its weights."""
    return _fetch(name, revision, SMALL_FILES)


def fetch_weights(name: str, folder: Path) -> Path:
    """The same with its weights, of the same commit, though the branch may have moved on."""
    return folder if has_weights(folder) else _fetch(name, folder.name, _weight_names(folder))


def has_weights(folder: Path) -> bool:
    """Whether a folder of the cache has the weight files that its small files name."""
    return all((folder / name).is_file() for name in _weight_names(folder))


def cached_commit(name: str, revision: str) -> str | None:
    """The commit of the files in the cache that a hub id at a revision stands for; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json", revision=revision or None)
    return Path(cached).parent.name if isinstance(cached, str) else None


def _fetch(name: str, revision: str, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        # A commit is looked for in the cache alone only if that is said here; a branch is even without.
        offline = bool(constants.HF_HUB_OFFLINE)
        return Path(
            snapshot_download(name, revision=revision or None, allow_patterns=list(patterns), local_files_only=offline)
        )
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        at = f" at revision '{revision}'" if revision else ""
        if constants.HF_HUB_OFFLINE:
            reason = f"HF_HUB_OFFLINE is set and the cache {constants.HF_HUB_CACHE} does not have it{at}"
        elif isinstance(error, LocalEntryNotFoundError):  # the hub does not answer, which is said last
            reason = (
                f"the hub cannot be reached from here ({reason.removeprefix('Got: ')}), and its cache "
                f"{constants.HF_HUB_CACHE} does not have it. Without a network, bring the checkpoint onto this machine and "
                "give its folder, or fill the cache where there is one"
            )
        raise NotFetched(f"it is no folder here ('{Path.cwd()}'), and not to be had as a hub id{at}: {reason}") from error


def _weight_names(folder: Path) -> tuple[str, ...]:
    """The weight files that the small files name; a damaged index is refused later, by name."""
    try:
        return tuple(sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return (SINGLE,)


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


@dataclass(frozen=True)
class CheckpointSource:
    """``path`` as the recipe names it, ``folder`` where it lay (absolute), ``revision``: the hub's commit, for a hub id.

    ``sampling``: the rule by which the run's family takes the frames of videos that say none.
    """

    path: str
    folder: str = ""
    revision: str = ""
    sampling: str = ""

    def to_json(self) -> str:
        """What ``read`` reads."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def read(cls, file: Path) -> "CheckpointSource":
        """The source that a file describes."""
        try:
            return cls(**json.loads(file.read_bytes()))
        except (ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"'{file}' is damaged: it does not say which checkpoint the run started from. Name it with --source."
            ) from error

    def find(self) -> Path:
        """The folder of its files; one that is gone, or not to be had from the hub, is a ``CheckpointError``."""
        if self.folder:
            if not (Path(self.folder) / "config.json").is_file():
                raise CheckpointError(f"the checkpoint that the run started from is gone ('{self.folder}')")
            return Path(self.folder)
        try:
            return Path(find_weights(self.path, find_checkpoint(self.path, self.revision)))
        except ModelError as error:
            raise CheckpointError(f"the checkpoint that the run started from is gone: {error}") from error


def describe_source(path: str, revision: str = "") -> CheckpointSource:
    """A recipe's model path as a run writes it down; the commit of a hub id is that of the files in the hub's cache."""
    if is_ours(path):
        return CheckpointSource(path)
    folder = Path(path).expanduser()
    if folder.is_dir():
        return CheckpointSource(path, str(folder.resolve()))
    return CheckpointSource(path, revision=cached_commit(path, revision) or revision)


NOT_THE_MODEL = ("transformers_version", "_name_or_path")


def identity(policy: Policy) -> str:
    """A digest of everything that decides the model's input and output."""
    named = sorted(policy.model.state_dict().items())
    with ThreadPoolExecutor(max_workers=cpu_count() or 1) as pool:
        weights = list(pool.map(_digest, (tensor for _, tensor in named)))
    digest = hashlib.blake2b(digest_size=16)
    for (name, tensor), content in zip(named, weights, strict=True):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {content}\n".encode())
    config = {key: value for key, value in policy.model.config.to_dict().items() if key not in NOT_THE_MODEL}
    chat = policy.chat
    processing = chat.processor.to_json_string() if chat.processor is not None else ""
    tokens = chat.tokenizer.backend_tokenizer.to_str()
    said = json.dumps(config, sort_keys=True, default=str)
    for part in (said, chat.owner.chat_template, processing, tokens, chat.stop_ids):
        digest.update(f"{part}\n".encode())
    return digest.hexdigest()


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().contiguous().cpu().flatten()
    return hashlib.blake2b(flat.view(torch.uint8).numpy().data, digest_size=16).hexdigest()

"""The checkpoint that a run started from, written down so that it is found again when the run is exported."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from os import cpu_count
from pathlib import Path

import torch
from torch import Tensor

from sensorium.models.checkpoint_path import cached_commit, find_checkpoint, find_weights
from sensorium.models.policy import Policy
from sensorium.recipe.shape import is_ours
from sensorium.vocabulary.errors import CheckpointError, ModelError


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

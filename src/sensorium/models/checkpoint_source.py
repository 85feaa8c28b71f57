"""The checkpoint that a run started from, written down so that it is found again when the run is exported."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from sensorium.models.checkpoint_place import find_checkpoint, find_weights
from sensorium.models.hub_files import cached_commit
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

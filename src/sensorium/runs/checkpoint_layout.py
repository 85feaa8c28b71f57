"""The checkpoints of a run as they are laid out on disk: which are there, whole, or the best."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sensorium.runs.durable import read_json, write_whole, writing
from sensorium.runs.run_directory import RunDirectory
from sensorium.vocabulary.errors import CheckpointError, RecordError

# A file's digest is the SHA-256 of the SHA-256 digests of its 16 MiB pieces, in order. Processors have instructions for
# it (1.5 GB/s a core), and pieces are hashed in threads, so that a large checkpoint costs little beside writing it.


PIECE = 16 << 20
THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class FileContent:
    """Size and digest of a file; an older record has no digest."""

    size: int
    digest: str = ""


def contents_of(folder: Path) -> dict[str, FileContent]:
    """Every file below a folder, by its path in it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): FileContent(path.stat().st_size, digest) for path, digest in _digests(files)
    }


def differences(folder: Path, recorded: Mapping[str, FileContent]) -> list[str]:
    """What is not as recorded, in words: missing files, other sizes, other bytes. Empty if all is well."""
    found = size_differences(folder, recorded)
    if found:
        return found
    known = [(folder / name, content.digest) for name, content in recorded.items() if content.digest]
    now = dict(_digests([path for path, _ in known]))
    return [f"{path.relative_to(folder)} has other bytes than were written" for path, d in known if now[path] != d]


def size_differences(folder: Path, recorded: Mapping[str, FileContent]) -> list[str]:
    """As ``differences``, by a look at the sizes alone."""
    found = []
    for name, content in recorded.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.stat().st_size != content.size:
            found.append(f"{name} has {path.stat().st_size:,} bytes instead of {content.size:,}")
    return found


def digest_of(path: Path) -> str:
    """The digest of one file."""
    return dict(_digests([path]))[path]


def _digests(paths: list[Path]) -> list[tuple[Path, str]]:
    pieces = [(path, at) for path in paths for at in range(0, max(path.stat().st_size, 1), PIECE)]
    wholes = {path: hashlib.sha256() for path in paths}
    with ThreadPoolExecutor(THREADS) as pool:
        for (path, _), digest in zip(pieces, pool.map(_piece, pieces), strict=True):
            wholes[path].update(digest)
    return [(path, whole.hexdigest()) for path, whole in wholes.items()]


def _piece(place: tuple[Path, int]) -> bytes:
    path, at = place
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(at)
        left = PIECE
        while left and (block := file.read(min(left, 1 << 20))):
            digest.update(block)
            left -= len(block)
    return digest.digest()


# A checkpoint's marker lists every file with its size and digest.


MARKER = "COMPLETE"
READ_FOLDERS = ("trainer/", "adapter/")
"""Of these folders every file may be read: all shards that lie in trainer/shards are one state."""
READ_FILES = frozenset(
    f"{name}.json"
    for name in (
        "model.safetensors.index", "generation_config", "processor_config", "preprocessor_config", "chat_template",
        "video_preprocessor_config", "image_processor_config", "tokenizer", "tokenizer_config", "special_tokens_map",
        "added_tokens", "vocab", "adapter_config",
    )
) | {"chat_template.jinja", "merges.txt"}  # fmt: skip
"""Files that a model or its processors are read from, if they are there."""


@dataclass(frozen=True)
class Best:
    """The best checkpoint so far. ``metric`` is what it was chosen by; empty: the recipe's ``checkpoint.best``."""

    step: int
    value: float
    metric: str = ""

    def plain(self) -> dict[str, Any]:
        """As files have it."""
        return {"step": self.step, "value": float(self.value), **({"metric": self.metric} if self.metric else {})}


@dataclass(frozen=True)
class Damage:
    """A checkpoint that cannot be trusted, why, and where it was put."""

    step: int
    reason: str
    place: Path


class CheckpointFolder:
    """The ``checkpoints/`` folder of a run. ``verified`` are the steps whose every byte was read and found good."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.verified: set[int] = set()

    def path(self, step: int) -> Path:
        """Where a step's checkpoint lies."""
        return self.folder / f"step_{step:06d}"

    def complete(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first, by a look at names and sizes."""
        return [step for step in self._steps() if is_complete(self.path(step))]

    def best(self) -> Best | None:
        """The best checkpoint, where one was marked."""
        path = self.folder / "best.json"
        if not path.exists():
            return None
        way_out = "Remove it, or name a checkpoint yourself (--last or --step)."
        data = read_json(path, way_out)
        step, value = data.get("step"), data.get("value")
        if not isinstance(step, int) or not isinstance(value, int | float):
            raise RecordError(f"'{path}' is damaged: it names no step with its value. {way_out}")
        return Best(step, value, str(data.get("metric", "")))

    def set_damaged_aside(self) -> list[Damage]:
        """Verify from the newest backwards until one is good; the damaged ones before it get another name and are told."""
        found = []
        for step in reversed(self._steps()):
            problems = problems_of(self.path(step))
            if not problems:
                self.verified.add(step)
                break
            place = self._free_name(step)
            with writing(place):
                os.replace(self.path(step), place)
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            found.append(Damage(step, f"{problems[0]}{more}", place))
        return found

    def newer_than_complete(self) -> tuple[int, str] | None:
        """The newest checkpoint and what is wrong with it, if it is not complete."""
        steps = self._steps()
        if not steps or is_complete(self.path(steps[-1])):
            return None
        return steps[-1], problems_of(self.path(steps[-1]))[0]

    def clear_after(self, step: int, best: Best | None = None) -> None:
        """Drop drafts and checkpoints past a step: the run goes on from there, with ``best`` as it was then."""
        for path in [*self.folder.glob(".draft_*"), *self.folder.glob(".removed_*")]:
            shutil.rmtree(path, ignore_errors=True)
        for later in self.complete():
            if later > step:
                remove_checkpoint(self.path(later))
        if best is None:
            (self.folder / "best.json").unlink(missing_ok=True)
        elif self.folder.is_dir():
            write_whole(self.folder / "best.json", json.dumps(best.plain()))

    def _steps(self) -> list[int]:
        """Steps that have a folder, whole or not, oldest first."""
        return sorted(int(p.name[5:]) for p in self.folder.glob("step_*") if p.is_dir() and p.name[5:].isdecimal())

    def _free_name(self, step: int) -> Path:
        name = f"damaged_{self.path(step).name}"
        taken = len(list(self.folder.glob(f"{name}*")))
        return self.folder / (f"{name}_{taken}" if taken else name)


def why_taken(directory: RunDirectory) -> str:
    """Why a run cannot begin in a directory, and the ways on; empty if it can."""
    if not directory.exists() or directory.is_barren():
        return ""
    complete = CheckpointFolder(directory.checkpoints).complete()
    way_on = (
        f"Go on with it from step {complete[-1]} (--resume, in Python sn.resume)"
        if complete
        else "It has no checkpoint to go on from: start over in it (--restart)"
    )
    return (
        f"run directory '{directory.path}' exists. {way_on}, choose another (name=… or run_dir=…), or remove it (in Python "
        "overwrite=True does)."
    )


def checkpoint_of_run(source: Path, *, step: int | None = None, last: bool = False) -> Path:
    """The checkpoint that is meant: a folder that is one, or of a run a given step's, the best, or the last."""
    if is_complete(source):
        return source
    directory = RunDirectory(source)
    if not directory.checkpoints.is_dir():
        refuse_damaged(source)
        raise CheckpointError(f"'{source}' is neither a complete checkpoint nor a run directory.")
    checkpoints = CheckpointFolder(directory.checkpoints)
    complete = checkpoints.complete()
    best = None if last else checkpoints.best()
    if step is None and best is None and (unfit := checkpoints.newer_than_complete()):
        instead = f"take the last complete one with --step {complete[-1]}" if complete else "there is no complete one"
        raise CheckpointError(
            f"the newest checkpoint of '{source}', of step {unfit[0]}, is damaged: {unfit[1]}. Resume the run, which makes "
            f"it again, or {instead}."
        )
    wanted = step if step is not None else best.step if best is not None else complete[-1] if complete else None
    if wanted not in complete:
        there = ", ".join(str(known) for known in complete) or "none"
        raise CheckpointError(f"'{source}' has no complete checkpoint of step {wanted}; there are: {there}.")
    return directory.checkpoint_of(wanted)


def is_complete(path: Path) -> bool:
    """True if a checkpoint folder has its marker and every file it lists, at its size."""
    try:
        return not size_differences(path, listed_files(path))
    except CheckpointError:
        return False


def refuse_damaged(path: Path) -> None:
    """Refuse a checkpoint of a run whose files are not what was written; of any other folder nothing is known."""
    if not (path / MARKER).exists():
        return
    problems = problems_of(path)
    if problems:
        raise CheckpointError(
            f"checkpoint '{path}' is damaged: {problems[0]}. Take another one of its run (--step or --last), or resume the "
            "run, which falls back to its last good one."
        )
    refuse_foreign(path)


def problems_of(path: Path) -> list[str]:
    """What is wrong with a checkpoint, every byte of it read; empty if it is as it was written.

    Of a checkpoint that was written without digests only sizes are known.
    """
    try:
        return differences(path, listed_files(path))
    except CheckpointError as error:
        return [str(error)]


def refuse_foreign(path: Path) -> list[str]:
    """Refuse a complete checkpoint with files of others among those that are read; the names of all other unlisted files.

    A copy ("shard-1 (copy).safetensors") or the shard of another checkpoint would be read as part of the state, in silence.
    """
    foreign = unlisted_files(path)
    read = [name for name in foreign if _is_read(name)]
    if read:
        more = f" (and {len(read) - 1} more)" if len(read) > 1 else ""
        raise CheckpointError(
            f"the checkpoint '{path}' holds '{read[0]}'{more}, which its run did not write ({MARKER} lists what it wrote), "
            "and which could change what is read of it. Move it elsewhere, then go on."
        )
    return foreign


def unlisted_files(path: Path) -> list[str]:
    """Files below a checkpoint that its marker does not list."""
    listed = {*listed_files(path), MARKER}
    there = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    return [name for name in there if name not in listed]


def _is_read(name: str) -> bool:
    return name.startswith(READ_FOLDERS) or name.endswith(".safetensors") or name in READ_FILES


def has_digests(path: Path) -> bool:
    """True if a complete checkpoint says what its files hold, not only how large they are."""
    return all(content.digest for content in listed_files(path).values())


def listed_files(path: Path) -> dict[str, FileContent]:
    """The files that a checkpoint's marker lists."""
    marker = path / MARKER
    if not marker.is_file():
        raise CheckpointError(f"it has no {MARKER}")
    try:
        files = json.loads(marker.read_bytes())["files"]
        return {
            name: FileContent(entry) if isinstance(entry, int) else FileContent(entry["size"], entry["digest"])
            for name, entry in files.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"its {MARKER} is damaged") from error


def remove_checkpoint(path: Path) -> None:
    """Take a checkpoint away at once (by renaming), then delete it."""
    hidden = path.with_name(f".removed_{path.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    os.replace(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)

"""The layout of a run's checkpoints, all of it in this file: which are there, whole, or the best.

checkpoints/best.json                         step and value of the best checkpoint so far
checkpoints/step_000012/                      a Hugging Face model: config.json, *.safetensors, tokenizer, …
                        adapter/              LoRA weights alone
                        trainer/state.pt      the trainer's state: step, tasks, random numbers
                        trainer/learner.pt    the learner's state; trainer/shards/ has the rows of each rank
                        COMPLETE              every file with its size and digest, written last
checkpoints/.draft_step_000013/               being written; .removed_step_000010/ is being deleted
checkpoints/damaged_step_000011/              set aside by a resume
"""

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
from sensorium.runs.run_directory import RunDirectory, step_name
from sensorium.vocabulary.errors import CheckpointError, RecordError

MARKER = "COMPLETE"
ADAPTER_FOLDER = "adapter"
TRAINER_FOLDER = "trainer"
TRAINER_STATE = f"{TRAINER_FOLDER}/state.pt"
LEARNER_STATE, LEARNER_SHARDS = "learner.pt", "shards"  # in TRAINER_FOLDER
BEST = "best.json"
DRAFT, REMOVED = ".draft_", ".removed_"

# Files that a model or its processors are read from. All files of trainer/ and adapter/ may be read, too: for one, all
# shards in trainer/shards are one state.
READ_FOLDERS = (f"{TRAINER_FOLDER}/", f"{ADAPTER_FOLDER}/")
READ_FILES = frozenset(
    f"{name}.json"
    for name in (
        "model.safetensors.index", "generation_config", "processor_config", "preprocessor_config", "chat_template",
        "video_preprocessor_config", "image_processor_config", "tokenizer", "tokenizer_config", "special_tokens_map",
        "added_tokens", "vocab", "adapter_config",
    )
) | {"chat_template.jinja", "merges.txt"}  # fmt: skip

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
    digests = digests_of(files)
    return {path.relative_to(folder).as_posix(): FileContent(path.stat().st_size, digests[path]) for path in files}


def differences(folder: Path, recorded: Mapping[str, FileContent], *, sizes_only: bool = False) -> list[str]:
    """What is not as recorded, in words: missing files, other sizes, other bytes. Empty if all is well."""
    found = []
    for name, content in recorded.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.stat().st_size != content.size:
            found.append(f"{name} has {path.stat().st_size:,} bytes instead of {content.size:,}")
    if found or sizes_only:
        return found
    known = {folder / name: content.digest for name, content in recorded.items() if content.digest}
    now = digests_of(list(known))
    return [f"{path.relative_to(folder)} has other bytes than were written" for path in known if now[path] != known[path]]


def digests_of(paths: list[Path]) -> dict[Path, str]:
    """The digests of files: SHA-256 of the SHA-256 digests of 16 MiB pieces, which threads compute (1.5 GB/s a core)."""

    def piece(place: tuple[Path, int]) -> bytes:
        with place[0].open("rb") as file:
            file.seek(place[1])
            return hashlib.sha256(file.read(PIECE)).digest()

    pieces = [(path, at) for path in paths for at in range(0, max(path.stat().st_size, 1), PIECE)]
    wholes = {path: hashlib.sha256() for path in paths}
    with ThreadPoolExecutor(THREADS) as pool:
        for (path, _), digest in zip(pieces, pool.map(piece, pieces), strict=True):
            wholes[path].update(digest)
    return {path: whole.hexdigest() for path, whole in wholes.items()}


@dataclass(frozen=True)
class Best:
    """The best checkpoint so far. ``metric`` is what it was chosen by; empty: the recipe's ``checkpoint.best``."""

    step: int
    value: float
    metric: str = ""

    def plain(self) -> dict[str, Any]:
        return {"step": self.step, "value": float(self.value), **({"metric": self.metric} if self.metric else {})}


class CheckpointFolder:
    """The ``checkpoints/`` folder of a run. ``verified`` are the steps whose every byte was read and found good."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.verified: set[int] = set()

    def path(self, step: int) -> Path:
        """Where a step's checkpoint lies."""
        return self.folder / step_name(step)

    def steps(self) -> list[int]:
        """Steps that have a folder, whole or not, oldest first."""
        return sorted(int(p.name[5:]) for p in self.folder.glob("step_*") if p.is_dir() and p.name[5:].isdecimal())

    def complete(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first, by names and sizes alone."""
        return [step for step in self.steps() if is_complete(self.path(step))]

    def best(self) -> Best | None:
        """The best checkpoint, where one was marked."""
        path = self.folder / BEST
        if not path.exists():
            return None
        way_out = "Remove it, or name a checkpoint yourself (--last or --step)."
        data = read_json(path, way_out)
        step, value = data.get("step"), data.get("value")
        if not isinstance(step, int) or not isinstance(value, int | float):
            raise RecordError(f"'{path}' is damaged: it names no step with its value. {way_out}")
        return Best(step, value, str(data.get("metric", "")))

    def write_best(self, best: Best) -> None:
        write_whole(self.folder / BEST, json.dumps(best.plain()))

    def set_damaged_aside(self) -> list[str]:
        """Verify checkpoints from the newest backwards until one is good; rename damaged ones. Returns a note for each."""
        notes = []
        for step in reversed(self.steps()):
            problems = problems_of(self.path(step))
            if not problems:
                self.verified.add(step)
                break
            name = f"damaged_{self.path(step).name}"
            taken = len(list(self.folder.glob(f"{name}*")))
            place = self.folder / (f"{name}_{taken}" if taken else name)
            with writing(place):
                os.replace(self.path(step), place)
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            notes.append(
                f"ATTENTION: the checkpoint of step {step} is damaged ({problems[0]}{more}); it was set aside as '{place}'."
            )
        return notes

    def clear_after(self, step: int, best: Best | None = None) -> None:
        """Drop drafts and checkpoints past a step, from which the run continues with ``best`` as it was then."""
        for path in [*self.folder.glob(f"{DRAFT}*"), *self.folder.glob(f"{REMOVED}*")]:
            shutil.rmtree(path, ignore_errors=True)
        for later in self.complete():
            if later > step:
                remove_checkpoint(self.path(later))
        if best is None:
            (self.folder / BEST).unlink(missing_ok=True)
        elif self.folder.is_dir():
            self.write_best(best)


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
    """The checkpoint that is meant: a folder that is one, or of a run that of a given step, the best, or the last."""
    if is_complete(source):
        return source
    directory = RunDirectory(source)
    if not directory.checkpoints.is_dir():
        refuse_damaged(source)
        raise CheckpointError(f"'{source}' is neither a complete checkpoint nor a run directory.")
    checkpoints = CheckpointFolder(directory.checkpoints)
    complete = checkpoints.complete()
    best = None if last else checkpoints.best()
    newest = checkpoints.steps()[-1:]
    if step is None and best is None and newest and newest[0] not in complete:
        instead = f"take the last complete one with --step {complete[-1]}" if complete else "there is no complete one"
        raise CheckpointError(
            f"the newest checkpoint of '{source}', of step {newest[0]}, is damaged: "
            f"{problems_of(checkpoints.path(newest[0]))[0]}. Resume the run, which makes it again, or {instead}."
        )
    wanted = step if step is not None else best.step if best is not None else complete[-1] if complete else None
    if wanted not in complete:
        there = ", ".join(str(known) for known in complete) or "none"
        raise CheckpointError(f"'{source}' has no complete checkpoint of step {wanted}; there are: {there}.")
    return directory.checkpoint_of(wanted)


def is_complete(path: Path) -> bool:
    """True if a checkpoint folder has its marker and every file it lists, at its size."""
    try:
        return not differences(path, listed_files(path), sizes_only=True)
    except CheckpointError:
        return False


def refuse_damaged(path: Path) -> None:
    """Refuse a run's checkpoint whose files are not what was written. Folders without a marker are not checked."""
    if not (path / MARKER).exists():
        return
    if problems := problems_of(path):
        raise CheckpointError(
            f"checkpoint '{path}' is damaged: {problems[0]}. Take another one of its run (--step or --last), or resume the "
            "run, which falls back to its last good one."
        )
    refuse_foreign(path)


def problems_of(path: Path) -> list[str]:
    """What is wrong with a checkpoint, by reading every byte; by sizes alone where it was written without digests."""
    try:
        return differences(path, listed_files(path))
    except CheckpointError as error:
        return [str(error)]


def refuse_foreign(path: Path) -> list[str]:
    """Refuse unlisted files in a complete checkpoint that would be read; returns the names of all other unlisted files.

    A copy ("shard-1 (copy).safetensors") or the shard of another checkpoint would silently be read as part of the state.
    """
    listed = {*listed_files(path), MARKER}
    files = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    foreign = [name for name in files if name not in listed]
    read = [n for n in foreign if n.startswith(READ_FOLDERS) or n.endswith(".safetensors") or n in READ_FILES]
    if read:
        more = f" (and {len(read) - 1} more)" if len(read) > 1 else ""
        raise CheckpointError(
            f"the checkpoint '{path}' holds '{read[0]}'{more}, which its run did not write ({MARKER} lists what it wrote), "
            "and which could change what is read from it. Move it elsewhere, then go on."
        )
    return foreign


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
    """Rename a checkpoint, so that it is gone at once, then delete it."""
    hidden = path.with_name(f"{REMOVED}{path.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    os.replace(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)

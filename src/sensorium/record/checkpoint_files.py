"""Whether a checkpoint folder is whole: its marker lists every file with its size and digest."""

import json
from pathlib import Path

from sensorium.record.contents import FileContent, differences, size_differences
from sensorium.vocabulary.errors import CheckpointError

MARKER = "COMPLETE"


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


def problems_of(path: Path) -> list[str]:
    """What is wrong with a checkpoint, every byte of it read; empty if it is as it was written.

    Of a checkpoint that was written without digests only sizes are known.
    """
    try:
        return differences(path, listed_files(path))
    except CheckpointError as error:
        return [str(error)]


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

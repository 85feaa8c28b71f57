"""The run directory: where a run keeps everything, and how rows are written so that a kill costs at most an open row.

A row of a ``.jsonl`` file is appended in one write; a torn last row (no newline) is no row. Whole files are written beside
and renamed into place.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from sensorium.vocabulary.errors import SensoriumError

STEP = re.compile(r"step_(\d+)")


class RunDirectory:
    """Paths below ``runs/<name>``."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.recipe = self.path / "recipe.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.ledger = self.path / "ledger.sqlite"
        self.report = self.path / "report.html"
        self.episodes = self.path / "episodes"
        self.media = self.path / "media"
        self.decoded = self.path / "decoded"
        self.eval = self.path / "eval"
        self.checkpoints = self.path / "checkpoints"
        self.kept = self.path / "kept"
        self.reference = self.path / "reference"

    def create(self) -> "RunDirectory":
        """Make the folders."""
        for folder in (self.path, self.episodes, self.media, self.eval, self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        return self

    def exists(self) -> bool:
        """True if a run was started here."""
        return self.recipe.exists()

    def is_barren(self) -> bool:
        """True if the run here never finished a step: a start that failed, which costs nothing to forget."""
        kept = (self.checkpoints, self.kept, self.eval)
        return not self.metrics.exists() and not any(folder.is_dir() and any(folder.iterdir()) for folder in kept)

    def clear(self) -> None:
        """Take away a barren run's files; anything else in the folder stays."""
        if self.exists():
            self.recipe.unlink()
            for path in (*self.path.glob("ledger.sqlite*"), *self.path.glob("report.html")):
                path.unlink()

    def episodes_of(self, step: int) -> Path:
        """The episodes of a training step."""
        return self.episodes / f"{step_name(step)}.jsonl"

    def summary_of(self, step: int, name: str = "eval") -> Path:
        """The summary of an evaluation at a step."""
        return self.eval / f"{step_name(step)}_{name}.json"

    def eval_episodes_of(self, step: int, name: str = "eval") -> Path:
        """The episodes of an evaluation at a step."""
        return self.eval / f"{step_name(step)}_{name}.jsonl"

    def checkpoint_of(self, step: int) -> Path:
        """The checkpoint of a step."""
        return self.checkpoints / step_name(step)

    def write_summary(self, step: int, summary: dict[str, Any]) -> Path:
        """Keep an evaluation's summary under its name."""
        path = self.summary_of(step, str(summary.get("name", "eval")))
        write_whole(path, json.dumps({"step": step, **summary}, indent=1) + "\n")
        return path

    def summaries(self) -> list[dict[str, Any]]:
        """Every evaluation's summary, by step, then name."""
        found = [json.loads(path.read_text()) for path in sorted(self.eval.glob("step_*.json"))]
        return sorted(found, key=lambda summary: (summary["step"], summary["name"]))

    def drop_after(self, step: int) -> None:
        """Forget rows and files of steps past ``step``: a resumed run writes them again."""
        rewrite_rows(self.metrics, lambda row: row.get("step", 0) <= step)
        for folder in (self.episodes, self.eval):
            for path in folder.glob("step_*"):
                if step_of(path) > step:
                    path.unlink()


def step_name(step: int) -> str:
    """The name of a step's files: ``step_000012``."""
    return f"step_{step:06d}"


def step_of(path: Path) -> int:
    """The step a file or folder belongs to."""
    match = STEP.match(path.name)
    assert match, f"'{path}' is not named after a step"
    return int(match.group(1))


def to_line(row: Any) -> str:
    """A row as one compact JSON line; key order is the row's own."""
    return json.dumps(row, separators=(",", ":"), ensure_ascii=False, default=_plain) + "\n"


def append_row(path: Path, row: Any) -> None:
    """Append one row in one write, after taking away a torn row left by a kill."""
    data = to_line(row).encode()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        end = os.fstat(descriptor).st_size
        if end and os.pread(descriptor, 1, end - 1) != b"\n":
            os.ftruncate(descriptor, _whole_rows(os.pread(descriptor, end, 0)))
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, without a torn last one; a broken row before it is an error that names its line."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                raise SensoriumError(
                    f"{path}, line {number}: not a JSON row ({error}); mend or remove that line."
                ) from error


def rewrite_rows(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Keep only some rows of a file, atomically and byte for byte; an untouched file stays as it is."""
    if not path.exists():
        return
    data = path.read_bytes()
    lines = data[: _whole_rows(data)].splitlines(keepends=True)
    kept = b"".join(line for line in lines if keep(json.loads(line)))
    if kept != data:
        write_whole(path, kept)


def write_rows(path: Path, rows: Iterable[Any]) -> None:
    """Write a whole file of rows, complete or absent."""
    write_whole(path, "".join(to_line(row) for row in rows))


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file beside its place, flush it and rename it in: complete or absent, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def _plain(value: Any) -> Any:
    """A JSON value from what a user's code put into a row: numbers and arrays of numpy or torch, else its words."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _whole_rows(data: bytes) -> int:
    """How many bytes of a file are whole rows."""
    return data.rfind(b"\n") + 1

"""The run directory: the paths of its files, and the lock that keeps a second process out.

Example: process 17 trains into ``runs/a``, so ``runs/a/run.lock`` is locked and holds ``{"pid": 17, …}``. Process 18 that
wants to resume ``runs/a`` is refused with who holds it. Process 17 is killed: the system releases its lock, and 18 may
start. The text in the file only names the holder; without the lock it means nothing.

The folder itself is locked too, where the file system can do that: somebody may delete ``run.lock``, and a folder that is
moved during its run takes its lock along. ``refuse_moved`` finds the latter before the run writes elsewhere.
"""

import errno
import fcntl
import json
import os
import re
import shlex
import socket
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from sensorium.runs.durable import read_json, rewrite_rows, write_all, write_rows, write_whole, writing
from sensorium.vocabulary.errors import RecordError

STEP = re.compile(r"step_(\d+)")


class RunDirectory:
    """Paths below ``runs/<name>``."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.recipe = self.path / "recipe.yaml"
        self.modules = self.path / "modules.json"
        self.source = self.path / "source.json"
        self.ancestor = self.path / "ancestor.json"
        self.tasks = self.path / "tasks.json"
        self.media_files = self.path / "media_files.jsonl"
        self.metrics = self.path / "metrics.jsonl"
        self.health = self.path / "health.jsonl"
        self.ledger = self.path / "ledger.sqlite"
        self.report = self.path / "report.html"
        self.episodes = self.path / "episodes"
        self.media = self.path / "media"
        self.decoded = self.path / "decoded"
        self.eval = self.path / "eval"
        self.outcomes = self.eval / "outcomes"
        self.checkpoints = self.path / "checkpoints"
        self.kept = self.path / "kept"
        self.reference = self.path / "reference"

    def create(self) -> "RunDirectory":
        for folder in (self.path, self.episodes, self.media, self.eval, self.checkpoints):
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
        return self

    def exists(self) -> bool:
        return self.recipe.exists()

    def absence(self) -> str:
        """That no run is here, and which folder was meant if one of the same name is in the usual place."""
        meant = Path("runs") / self.path
        found = f" There is one in '{meant}'." if RunDirectory(meant).exists() else ""
        return f"'{self.path}' holds no run: it has no recipe.yaml.{found}"

    def is_barren(self) -> bool:
        """True if the run here never finished a step, so that nothing is lost by removing it."""
        kept = (self.checkpoints, self.kept, self.eval)
        return not self.metrics.exists() and not any(folder.is_dir() and any(folder.iterdir()) for folder in kept)

    def how_to_continue(self) -> str:
        """How to continue a run that was stopped: from its last checkpoint, or from the start."""
        if any(self.checkpoints.glob("step_*")):
            return f"to go on from the last checkpoint: sensorium train {self.path} --resume"
        again = "the same command starts over" if self.is_barren() else "the same command with --restart starts over"
        return f"no checkpoint was written yet (checkpoint.every says how often that is done): {again}"

    def clear(self) -> None:
        """Remove a barren run's files; anything else in the folder stays."""
        if self.exists():
            for path in (self.recipe, self.report, self.health, *self.path.glob("ledger.sqlite*")):
                path.unlink(missing_ok=True)

    def forget(self, *, ledger: bool) -> None:
        """Remove a run's rows, episodes, evaluations and report, and its ledger if asked to."""
        for path in (self.metrics, self.health, self.report, *(self.path.glob("ledger.sqlite*") if ledger else ())):
            path.unlink(missing_ok=True)
        for folder in (self.episodes, self.eval, self.outcomes):
            for path in folder.glob("step_*"):
                path.unlink()

    def recipe_until(self, step: int) -> Path:
        """The recipe that a run had until a step, where it continued with another."""
        return self.path / f"recipe_until_{step_name(step)}.yaml"

    def episodes_of(self, step: int) -> Path:
        return self.episodes / f"{step_name(step)}.jsonl"

    def summary_of(self, step: int, name: str = "eval") -> Path:
        return self.eval / f"{step_name(step)}_{name}.json"

    def eval_episodes_of(self, step: int, name: str = "eval") -> Path:
        return self.eval / f"{step_name(step)}_{name}.jsonl"

    def outcomes_of(self, step: int, name: str = "eval") -> Path:
        """Every sample of an evaluation without its text: what comparing runs needs, however few episodes are logged."""
        return self.outcomes / f"{step_name(step)}_{name}.jsonl"

    def write_outcomes(self, step: int, rows: Iterable[Any]) -> None:
        with writing(self.outcomes):
            self.outcomes.mkdir(exist_ok=True)
        write_rows(self.outcomes_of(step), rows)

    def checkpoint_of(self, step: int) -> Path:
        return self.checkpoints / step_name(step)

    def forked_at(self) -> tuple[str, int, dict[str, Any]] | None:
        """The run that this one was forked from, after which step, and what was changed then."""
        if not self.ancestor.exists():
            return None
        data = read_json(self.ancestor, "Remove it: then nothing says which run this one was forked from.")
        return str(data.get("run")), int(data.get("step", 0)), dict(data.get("changed", {}))

    def write_summary(self, step: int, summary: dict[str, Any]) -> Path:
        path = self.summary_of(step, str(summary.get("name", "eval")))
        write_whole(path, json.dumps({"step": step, **summary}, indent=1) + "\n")
        return path

    def summaries(self) -> list[dict[str, Any]]:
        """Every evaluation's summary, by step, then name."""
        way_out = "Remove it (that evaluation is then missing in the report), or put back a copy."
        found = []
        for path in sorted(self.eval.glob("step_*.json")):
            summary = read_json(path, way_out)
            if not isinstance(summary.get("step"), int) or not isinstance(summary.get("name"), str):
                raise RecordError(f"'{path}' is damaged: it is no evaluation's summary. {way_out}")
            found.append(summary)
        return sorted(found, key=lambda summary: (summary["step"], summary["name"]))

    def drop_after(self, step: int) -> None:
        """Remove rows and files of steps past ``step``: a resumed run writes them again."""
        for rows in (self.metrics, self.health):
            rewrite_rows(rows, partial(_is_up_to, rows, step))
        for folder in (self.episodes, self.eval, self.outcomes):
            for path in folder.glob("step_*"):
                if STEP.match(path.name) and step_of(path) > step:
                    path.unlink()


def _is_up_to(path: Path, last: int, row: dict[str, Any]) -> bool:
    step = row.get("step", 0)
    if not isinstance(step, int):
        raise RecordError(f"'{path}' is damaged: the step of a row is no number ({str(row)[:60]}…). Mend or remove it.")
    return step <= last


def step_name(step: int) -> str:
    """The name of a step's files: ``step_000012``."""
    return f"step_{step:06d}"


def step_of(path: Path) -> int:
    """The step a file or folder belongs to."""
    match = STEP.match(path.name)
    assert match, f"'{path}' is not named after a step"
    return int(match.group(1))


NAME = "run.lock"
UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_held: set[int] = set()  # descriptors
_folders: dict[str, int] = {}  # the folders that this process holds, and the descriptor of each


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Hold a run directory for this process alone, making the folder if need be; refused with who holds it."""
    with ExitStack() as opened:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = _open(folder / NAME, os.O_RDWR | os.O_CREAT, opened)
            itself = _open(folder, os.O_RDONLY | os.O_DIRECTORY, opened)
        _take(descriptor, descriptor, folder)
        with suppress(OSError):  # a network file system may lock files only; then run.lock must do
            _take(itself, descriptor, folder)
        with writing(folder / NAME):
            os.ftruncate(descriptor, 0)
            holder = {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "command": shlex.join(sys.argv)[:500],
                "since": datetime.now().astimezone().isoformat(timespec="seconds"),
            }
            write_all(descriptor, (json.dumps(holder) + "\n").encode())
        name = os.path.abspath(folder)
        _folders[name] = itself
        try:
            yield
        finally:
            del _folders[name]
            with suppress(OSError):
                os.ftruncate(descriptor, 0)


def last_holder(folder: Path) -> tuple[int, str] | None:
    """Process id and host of the last holder of a run directory; it may have been killed since."""
    try:
        who = json.loads((folder / NAME).read_text())
        return int(who["pid"]), str(who["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def refuse_moved(folder: Path) -> None:
    """Refuse to write where the folder that this process holds no longer is: the run would be in two places."""
    held = _folders.get(os.path.abspath(folder))
    if held is None:
        return
    try:
        if os.path.samestat(os.stat(folder), os.fstat(held)):
            return
        now = "another folder is in its place"
    except OSError as error:
        now = error.strerror or str(error)
    raise RecordError(
        f"run directory '{folder}' was moved or removed while its run was going on ({now}), so nothing more is written. "
        "Go on from its last checkpoint where it is now: sensorium train THERE --resume."
    )


def _open(path: Path, flags: int, opened: ExitStack) -> int:
    descriptor = os.open(path, flags, 0o644)
    _held.add(descriptor)
    opened.callback(_close, descriptor)
    return descriptor


def _close(descriptor: int) -> None:
    _held.discard(descriptor)
    os.close(descriptor)


def _take(descriptor: int, text: int, folder: Path) -> None:
    """Lock a descriptor; ``text`` is that of the file that names the holder."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        try:
            who = json.loads(os.pread(text, 4096, 0))
            holder = f"process {who['pid']} on {who['host']} since {who['since']} ({who['command']})"
        except (ValueError, KeyError, TypeError):
            holder = "another process, which has not written its id yet"
        raise RecordError(
            f"run directory '{folder}' is in use by {holder}. Wait for it or stop it; a run of its own needs another "
            "directory (name=… or run_dir=…)."
        ) from error
    except OSError as error:
        if descriptor != text:
            raise
        if error.errno not in UNSUPPORTED:
            raise RecordError(f"cannot lock '{folder / NAME}': {error.strerror}. Choose another run_dir.") from error
        warnings.warn(
            f"the file system of '{folder}' does not support locks ({error.strerror}): nothing keeps a second process out "
            "of this run directory, so see to it yourself that there is none.",
            stacklevel=4,
        )


def _let_go_in_child() -> None:
    """A forked child must not keep the lock when its parent has died."""
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)

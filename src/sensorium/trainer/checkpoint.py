"""Checkpoints: every one is a Hugging Face model with a ``trainer/`` folder beside it, complete or absent, never half.

A checkpoint is written into a hidden folder, flushed, marked COMPLETE with the sizes and digests of its files, then renamed
into place. A kill at any point, and a disk that is full, leave the last complete one as it was. A model with a number that
is not finite is never written.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sensorium.learner.plain_state import load_state, save_state
from sensorium.learner.protocol import RunLearner
from sensorium.record.checkpoint_files import MARKER, is_complete, problems_of
from sensorium.record.contents import contents_of
from sensorium.record.durable import cannot_write, flush, read_json, write_whole, writing
from sensorium.trainer.health.finite import refuse_ruined
from sensorium.vocabulary.errors import CheckpointError, RecordError

STATE = Path("trainer") / "state.pt"


@dataclass(frozen=True)
class Best:
    """The best checkpoint so far."""

    step: int
    value: float


@dataclass(frozen=True)
class Damage:
    """A checkpoint that cannot be trusted, why, and where it was put."""

    step: int
    reason: str
    place: Path


class Checkpoints:
    """The ``checkpoints/`` folder of a run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        self._verified: set[int] = set()

    def save(
        self, step: int, learner: RunLearner, state: dict[str, Any], best: Best | None, protect: int | None = None
    ) -> Path:
        """Write a checkpoint of the learner's policy and everything needed to go on exactly; then apply retention.

        ``protect`` is the step of an earlier one that must stay, because what came after it may be damaged.
        """
        refuse_ruined(learner, step, self.complete)
        target = self.path(step)
        draft = self.folder / f".draft_{target.name}"
        shutil.rmtree(draft, ignore_errors=True)
        with _writing(draft):
            self.folder.mkdir(parents=True, exist_ok=True)
            learner.save(draft)
            (draft / STATE).parent.mkdir(exist_ok=True)
            save_state(state, draft / STATE)
            files = contents_of(draft)
            for name in files:
                flush(draft / name)
            listed = {name: {"size": content.size, "digest": content.digest} for name, content in files.items()}
            (draft / MARKER).write_text(json.dumps({"step": step, "files": listed}, indent=1))
            flush(draft / MARKER)
            flush(draft)
            if target.exists():
                _remove(target)
            os.replace(draft, target)
            flush(self.folder)
        if best is not None:
            write_whole(self.folder / "best.json", json.dumps({"step": best.step, "value": best.value}))
        self._retain(step, best, protect)
        return target

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
        return Best(step, value)

    def load(self, step: int) -> dict[str, Any]:
        """The trainer's state of a checkpoint."""
        path = self.path(step)
        problems = [] if step in self._verified else problems_of(path)
        if problems:
            last = ", ".join(map(str, self.complete()[-1:])) or "none"
            raise CheckpointError(
                f"checkpoint '{path}' is not complete: {problems[0]}. The last complete one is of step: {last}."
            )
        return load_state(path / STATE)

    def set_damaged_aside(self) -> list[Damage]:
        """Verify from the newest backwards until one is good; the damaged ones before it get another name and are told."""
        found = []
        for step in reversed(self._steps()):
            problems = problems_of(self.path(step))
            if not problems:
                self._verified.add(step)
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
                _remove(self.path(later))
        if best is None:
            (self.folder / "best.json").unlink(missing_ok=True)
        elif self.folder.is_dir():
            write_whole(self.folder / "best.json", json.dumps({"step": best.step, "value": best.value}))

    def _steps(self) -> list[int]:
        """Steps that have a folder, whole or not, oldest first."""
        return sorted(int(p.name[5:]) for p in self.folder.glob("step_*") if p.is_dir() and p.name[5:].isdecimal())

    def _free_name(self, step: int) -> Path:
        name = f"damaged_{self.path(step).name}"
        taken = len(list(self.folder.glob(f"{name}*")))
        return self.folder / (f"{name}_{taken}" if taken else name)

    def _retain(self, step: int, best: Best | None, protect: int | None) -> None:
        kept = {*self.complete()[-self.keep :], step, protect}
        if best is not None:
            kept.add(best.step)
        for old in self.complete():
            if old not in kept:
                _remove(self.path(old))


@contextmanager
def _writing(draft: Path) -> Iterator[None]:
    """A save that fails leaves no draft behind; a disk that is full is said in one sentence, whatever library meets it."""
    try:
        with writing(draft):
            yield
    except RecordError:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    except Exception as error:  # torch and safetensors have errors of their own for a write that failed
        full = _failed_write(error, draft)
        shutil.rmtree(draft, ignore_errors=True)
        if full is None:
            raise
        raise full from error


def _failed_write(error: Exception, draft: Path) -> RecordError | None:
    """The failed write behind a library's error; None if it was something else."""
    text = str(error)
    words = ("No space left", "File too large", "Disk quota", "I/O error", "IoError", "file write failed", "unexpected pos")
    if not any(word in text for word in words):
        return None
    try:
        with (draft / ".probe").open("wb") as probe:  # what the system says of a write of that size now
            probe.write(b"\0" * (1 << 20))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as reason:
        return cannot_write(draft, reason)
    return RecordError(f"cannot write '{draft}': {text.splitlines()[0]} What was complete before is as it was.")


def _remove(path: Path) -> None:
    """Take a checkpoint away at once (by renaming), then delete it."""
    hidden = path.with_name(f".removed_{path.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    os.replace(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)

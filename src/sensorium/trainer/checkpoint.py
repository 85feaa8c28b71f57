"""Checkpoints: every one is a Hugging Face model with a ``trainer/`` folder beside it, complete or absent, never half.

A checkpoint is written into a hidden folder, flushed, marked COMPLETE with the sizes of its files, then renamed into
place. A kill at any point leaves the last complete one as it was.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sensorium.models.policy import Policy
from sensorium.vocabulary.errors import CheckpointError

MARKER = "COMPLETE"


@dataclass(frozen=True)
class Best:
    """The best checkpoint so far."""

    step: int
    value: float


class Checkpoints:
    """The ``checkpoints/`` folder of a run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, policy: Policy, state: dict[str, Any], best: Best | None, protect: int | None = None) -> Path:
        """Write a checkpoint of the policy and everything needed to go on exactly; then apply retention.

        ``protect`` is the step of an earlier one that must stay, because what came after it may be damaged.
        """
        target = self.path(step)
        draft = self.folder / f".draft_{target.name}"
        shutil.rmtree(draft, ignore_errors=True)
        policy.save(draft)
        trainer = draft / "trainer"
        trainer.mkdir()
        torch.save(state, trainer / "state.pt")
        sizes = {str(p.relative_to(draft)): p.stat().st_size for p in sorted(draft.rglob("*")) if p.is_file()}
        for name in sizes:
            _flush(draft / name)
        (draft / MARKER).write_text(json.dumps({"step": step, "files": sizes}, indent=1))
        _flush(draft / MARKER)
        _flush(draft)
        if target.exists():
            _remove(target)
        os.replace(draft, target)
        _flush(self.folder)
        if best is not None:
            self._write_best(best)
        self._retain(step, best, protect)
        return target

    def path(self, step: int) -> Path:
        """Where a step's checkpoint lies."""
        return self.folder / f"step_{step:06d}"

    def complete(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        return sorted(int(p.name[5:]) for p in self.folder.glob("step_*") if is_complete(p))

    def best(self) -> Best | None:
        """The best checkpoint, where one was marked."""
        path = self.folder / "best.json"
        return Best(**json.loads(path.read_text())) if path.exists() else None

    def load(self, step: int) -> dict[str, Any]:
        """The trainer's state of a checkpoint."""
        path = self.path(step)
        if not is_complete(path):
            raise CheckpointError(f"checkpoint '{path}' is not complete; the last complete one is {self.complete()[-1:]}.")
        return torch.load(path / "trainer" / "state.pt", map_location="cpu", weights_only=False)

    def clear_after(self, step: int) -> None:
        """Drop drafts and checkpoints past a step: the run goes on from there."""
        for path in [*self.folder.glob(".draft_*"), *self.folder.glob(".removed_*")]:
            shutil.rmtree(path, ignore_errors=True)
        for later in self.complete():
            if later > step:
                _remove(self.path(later))
        best = self.best()
        if best is not None and best.step > step:
            (self.folder / "best.json").unlink()

    def _write_best(self, best: Best) -> None:
        draft = self.folder / ".best.json"
        draft.write_text(json.dumps({"step": best.step, "value": best.value}))
        _flush(draft)
        os.replace(draft, self.folder / "best.json")

    def _retain(self, step: int, best: Best | None, protect: int | None) -> None:
        kept = {*self.complete()[-self.keep :], step, protect}
        if best is not None:
            kept.add(best.step)
        for old in self.complete():
            if old not in kept:
                _remove(self.path(old))


def is_complete(path: Path) -> bool:
    """True if a checkpoint folder has its marker and every file it lists, at its size."""
    marker = path / MARKER
    if not marker.exists():
        return False
    files = json.loads(marker.read_text())["files"]
    return all((path / name).exists() and (path / name).stat().st_size == size for name, size in files.items())


def _remove(path: Path) -> None:
    """Take a checkpoint away at once (by renaming), then delete it."""
    hidden = path.with_name(f".removed_{path.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    os.replace(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

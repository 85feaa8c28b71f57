"""Tiny checkpoints are made once a test run: the first test that asks for one makes it, others get copies of its files."""

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sensorium.models import tiny

_make = tiny.make_tiny
SHELF: list[Path] = []
"""Where they are kept: one folder for all workers of a test run."""


def keep() -> None:
    """Let everything that makes a tiny model come here. Has to be called before a test module imports ``make_tiny``."""
    tiny.make_tiny = make_tiny


def make_tiny(family: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """What ``sensorium.models.tiny.make_tiny`` does, from the kept ones where it can."""
    asked = repr((family, seed, sorted(overrides.items())))
    return kept_copy(asked, folder, lambda made: _make(family, made, seed, **overrides))


def kept_copy(asked: str, folder: Path, make: Callable[[Path], Any]) -> Path:
    """A copy in ``folder`` of what ``make`` writes into a folder; made once for all that ask for the same."""
    if not SHELF:  # outside of a test run
        make(Path(folder))
        return Path(folder)
    kept = SHELF[0] / hashlib.sha256(asked.encode()).hexdigest()[:24]
    if not kept.exists():
        made = Path(tempfile.mkdtemp(dir=SHELF[0]))
        make(made)
        try:
            made.rename(kept)
        except OSError:  # another worker was faster
            shutil.rmtree(made)
    shutil.copytree(kept, folder, dirs_exist_ok=True)
    return Path(folder)

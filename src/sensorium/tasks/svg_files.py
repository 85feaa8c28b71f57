"""Pictures of a folder as tasks of the environment ``svg``: SVG files and pictures, one task a file.

Train and test are told apart by a hash of the file's bytes, and equal files are one task, so the sides share nothing.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from sensorium.media.sources import read_bytes
from sensorium.media.store import MediaStore
from sensorium.recipe.names import wrong_options
from sensorium.tasks.environment_tasks import side
from sensorium.vocabulary.content import Message
from sensorium.vocabulary.errors import MediaError, RecipeError, TaskError, nearest
from sensorium.vocabulary.task import EnvironmentSpec, Task

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")


class SvgFiles:
    """The files of ``path`` (and of folders in it) on one side of the split; ``options`` are the environment's.

    An SVG file is drawn, and its code is the demonstration; of a picture only the pixels are known.
    """

    def __init__(
        self,
        path: str,
        store: MediaStore,
        options: Mapping[str, Any] | None = None,
        split: Literal["train", "test", "all"] = "train",
    ) -> None:
        if split not in ("train", "test", "all"):
            raise RecipeError(f"svg_files: unknown split '{split}'{nearest(str(split), ['train', 'test', 'all'])}")
        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise TaskError(f"svg_files: '{path}' is no folder.")
        self.options = dict(options or {})
        _, problem = wrong_options("environment", "svg", self.options)
        if problem:
            raise RecipeError(f"svg_files: {problem}")
        files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in (".svg", *PICTURES))
        seen: set[str] = set()
        digest = hashlib.blake2b(digest_size=16)
        self._tasks = []
        for file in files:
            if not file.resolve().is_relative_to(folder.resolve()):
                raise TaskError(f"svg_files: '{file}' is a link that leads out of its folder; copy the file there.")
            held, task = self._task(file, str(file.relative_to(folder)), store)
            digest.update(json.dumps([task.id, held]).encode())
            if held not in seen and split in ("all", side(held)):
                self._tasks.append(task)
            seen.add(held)
        self.row_digests = {path: digest.hexdigest()}
        if not self._tasks:
            raise TaskError(
                f"svg_files: of {len(files)} SVG files and pictures in '{path}' none is on side '{split}' of the split; "
                "add files, or use split: all."
            )

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Task:
        return self._tasks[index]

    def _task(self, file: Path, name: str, store: MediaStore) -> tuple[str, Task]:
        """A file's content, as text, and its task."""
        environment = EnvironmentSpec("svg", self.options)
        if file.suffix.lower() != ".svg":
            shown = store.put_picture(read_bytes(file, "picture", str(file)), str(file))
            return shown.hash, Task(name, (Message("user", (shown,)),), environment=environment)
        try:
            code = read_bytes(file, "picture", str(file)).decode()
        except UnicodeDecodeError as error:
            raise MediaError(f"{file}: the SVG file is not UTF-8 text: {error}.") from error
        if "<svg" not in code or not code.rstrip().endswith("</svg>"):
            raise TaskError(f"{file}: there is no complete <svg>…</svg> in it.")
        return " ".join(code.split()), Task(name, answer=code, environment=environment)

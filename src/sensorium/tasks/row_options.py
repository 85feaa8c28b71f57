"""The options that all sources of rows have in common, and what is made of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from sensorium.tasks.clip_options import ClipOptions
from sensorium.tasks.row_format import layout_of
from sensorium.vocabulary.errors import TaskError


class RowOptions(TypedDict, total=False):
    """What a recipe may say of rows.

    ``columns``, ``instruction``, ``system`` and ``media_first`` are of flat rows (see ``FlatRows``). Without ``columns`` a
    row is a task with content blocks. ``limit`` takes the first rows only (0: all). ``video`` and ``sound`` say how clips
    are decoded (``ClipOptions``). ``environments`` {name: module:Class} are those that rows may name beside the registered;
    ``environment`` {name, options} is the one that rows are played in that name none.
    """

    columns: Mapping[str, str] | None
    limit: int
    instruction: str
    system: str
    media_first: bool
    video: Mapping[str, Any] | None
    sound: Mapping[str, Any] | None
    environments: Mapping[str, str] | None
    environment: Mapping[str, Any] | None


class FileRowOptions(RowOptions, total=False):
    """Also ``media_roots``: folders that media may lie in, beside the data's own."""

    media_roots: Sequence[str]


class RowReading:
    """How the rows of a source are read: their format, how clips are decoded, and how many there are at most."""

    def __init__(self, options: RowOptions, where: str) -> None:
        self.clips = ClipOptions(options.get("video"), options.get("sound"), where)
        self.format = layout_of(
            options.get("columns"),
            options.get("instruction", ""),
            options.get("system", ""),
            options.get("media_first", False),
            options.get("environments"),
            options.get("environment"),
        )
        self.limit = options.get("limit", 0)
        for folder in options.get("media_roots", ()):  # type: ignore[attr-defined]
            if not Path(str(folder)).expanduser().is_dir():
                raise TaskError(f"{where}: media_roots names '{folder}', and there is no such folder.")

    def length(self, rows: int) -> int:
        """How many of so many rows are taken."""
        return min(self.limit, rows) if self.limit else rows

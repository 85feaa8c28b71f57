"""TaskMem's rows: clips of videos in the order of their curriculum, each told what was written of the clips before it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from sensorium.media.store import MediaStore
from sensorium.tasks.causal import ClipPlace
from sensorium.tasks.face_ids import FaceMaps, read_face_maps, rewrite_faces
from sensorium.tasks.message_parsing import Place, messages_of
from sensorium.tasks.row_options import FileRowOptions
from sensorium.tasks.rows import JsonlRows
from sensorium.vocabulary.content import Block, Message, Text
from sensorium.vocabulary.errors import TaskError
from sensorium.vocabulary.task import Task

MARK = "[Description of the preceding part]:"
MOST_BEFORE = 4
TYPES = ("episodic_on_policy", "semantic")


class TaskMemRows:
    """Rows ``{id: VIDEO*KEY, type, step, video_idx, episodic_folder, input, memory_tag?}`` of a JSONL file.

    A row of step > 0 needs the memories of the min(step, 4) clips before it: ``tasks.planner: causal_history`` gives it
    those that the policy wrote. Asked by itself (evaluation), it takes them from ``history_folder`` (``VIDEO.json``), or
    none with ``blank_history``.
    """

    def __init__(
        self,
        path: str,
        store: MediaStore,
        history_folder: str = "",
        blank_history: bool = False,
        **options: Unpack[FileRowOptions],
    ) -> None:
        self._lines = _RawRows(path, store, **options)
        self.history_folder, self.blank_history = history_folder, blank_history
        self._maps: dict[Path, FaceMaps] = {}
        self._places = [self._placed(index) for index in range(len(self._lines))]

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Task:
        place = self._places[index]
        if not place.needs or self.blank_history:
            return self.with_history(index, {})
        if not self.history_folder:
            raise TaskError(
                f"{self._lines.place(index).where}: clip {place.clip} of video '{place.video}' needs what was written of "
                "earlier clips. Train with tasks.planner: causal_history; elsewhere name a history_folder, or set "
                "blank_history: true."
            )
        return self.with_history(index, self._kept(index, place))

    def place_of(self, index: int) -> ClipPlace:
        """The clip of a row, and the clips whose memories it needs."""
        return self._places[index]

    def with_history(self, index: int, memories: Mapping[int, str]) -> Task:
        """The task with these memories, faces numbered as in its own clip."""
        row, at = self._lines.row(index), self._lines.place(index)
        place = self._places[index]
        rewritten = rewrite_faces(memories, self._face_maps(row, at, place.video), place.clip)
        history = " ".join(rewritten[clip] for clip in sorted(rewritten))
        metadata = {
            "video_id": place.video,
            "video_idx": place.clip,
            "step": row["step"],
            "type": row["type"],
            "category": row["type"],
            "history": history,
        }
        fillings = [history]
        if row["type"] == "semantic":
            fillings.append(self._episodic(row, at, place.video))
            metadata["episodic"] = fillings[1]
        messages = messages_of([{"role": "user", "content": row["input"]}], at)
        return Task(row["id"], _filled(messages, fillings, at), metadata=metadata)

    def _placed(self, index: int) -> ClipPlace:
        row, at = self._lines.row(index), self._lines.place(index)
        for key, kind in (("id", str), ("type", str), ("step", int), ("video_idx", int), ("input", list)):
            if not isinstance(row.get(key), kind) or isinstance(row.get(key), bool):
                raise at.error(f"'{key}' must be {_KINDS[kind]}, not {row.get(key)!r:.40}.")
        if row["type"] not in TYPES:
            raise at.error(f"'type' is {row['type']!r:.40}; it is one of {', '.join(TYPES)}.")
        video, star, _ = row["id"].partition("*")
        if not star or not video or "/" in video or video in (".", ".."):
            raise at.error(f"'id' must be VIDEO*KEY, not {row['id']!r:.60}.")
        before = min(row["step"], MOST_BEFORE)
        if before < 0 or row["video_idx"] < before:
            raise at.error(f"step {row['step']} of clip {row['video_idx']} would need clips before the first.")
        return ClipPlace(video, row["video_idx"], tuple(range(row["video_idx"] - before, row["video_idx"])))

    def _face_maps(self, row: Mapping[str, Any], at: Place, video: str) -> FaceMaps:
        folder = row.get("episodic_folder")
        if not folder:
            return {}
        path = at.folder / str(folder) / video / f"{video}_map.json"
        if path not in self._maps:
            if not (at.folder / str(folder)).is_dir():
                raise at.error(
                    f"'episodic_folder' is '{folder!s:.80}', and there is no such folder in '{at.folder}'. Rows whose "
                    "faces need no new numbers leave it out; a video without faces needs no file in it."
                )
            self._maps[path] = read_face_maps(path)
        return self._maps[path]

    def _episodic(self, row: Mapping[str, Any], at: Place, video: str) -> str:
        """The episodic memories that a semantic row reads, in the order of their clips."""
        path = at.folder / str(row.get("episodic_folder", "")) / video / f"episodic_{row.get('memory_tag', '')}.json"
        found = _read(path, at)
        if isinstance(found, dict):
            found = [
                found[key]
                for key in sorted(found, key=lambda key: (not key.isdecimal(), int(key) if key.isdecimal() else 0, key))
            ]
        if not isinstance(found, list) or not all(isinstance(memory, str) for memory in found):
            raise at.error(f"'{path}' must hold memories, texts by clip.")
        return " ".join(found)

    def _kept(self, index: int, place: ClipPlace) -> dict[int, str]:
        at = self._lines.place(index)
        found = _read(Path(self.history_folder) / f"{place.video}.json", at)
        lost = [clip for clip in place.needs if not isinstance(found, dict) or not isinstance(found.get(str(clip)), str)]
        if lost:
            raise at.error(f"'{self.history_folder}' has no memory of clip {lost[0]} of video '{place.video}'.")
        return {clip: found[str(clip)] for clip in place.needs}


class _RawRows(JsonlRows):
    """The rows of a JSONL file as plain objects."""

    def row(self, index: int) -> dict[str, Any]:
        """One row."""
        return self._read(index)

    def place(self, index: int) -> Place:
        """Where a row stands."""
        return self._place(index)


_KINDS = {str: "a text", int: "a whole number", list: "a list of content blocks"}


def _filled(messages: tuple[Message, ...], fillings: list[str], at: Place) -> tuple[Message, ...]:
    """The messages with each ``{}`` after the mark exchanged for what belongs there; nothing in it is formatted again."""
    (message,) = messages
    texts = [i for i, block in enumerate(message.content) if isinstance(block, Text)]
    if not texts:
        raise at.error("the input has no text block, so there is no place for the description of the preceding part.")
    last = message.content[texts[-1]]
    assert isinstance(last, Text)
    head, mark, rest = last.text.partition(MARK)
    if not mark or "{}" not in rest:
        raise at.error(f"the last text block must hold '{MARK}' and after it a {{}} to be filled.")
    parts = rest.split("{}")
    filled = parts[0]
    for i, part in enumerate(parts[1:]):
        filled += (fillings[i] if i < len(fillings) else "{}") + part
    blocks: list[Block] = list(message.content)
    blocks[texts[-1]] = Text(head + mark + filled)
    return (Message(message.role, tuple(blocks)),)


def _read(path: Path, at: Place) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise at.error(f"cannot read '{path}': {error}.") from error

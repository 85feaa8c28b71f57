"""TaskMem's rows: clips of videos in the order of their curriculum, each with what was written of the clips before it."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from string import Formatter
from typing import Any, Unpack

from sensorium.media.store import MediaStore
from sensorium.tasks.causal import ClipPlace, Memory
from sensorium.tasks.face_ids import FaceMaps, read_face_maps, rewrite_texts
from sensorium.tasks.message_parsing import Place, messages_of
from sensorium.tasks.row_options import FileRowOptions
from sensorium.tasks.rows import JsonlRows
from sensorium.vocabulary.content import Block, Message, Text
from sensorium.vocabulary.errors import TaskError
from sensorium.vocabulary.plain import strict_json
from sensorium.vocabulary.task import Task

MARK = "[Description of the preceding part]:"
LONGEST_NAME = 200
"""Bytes of a video's name; file systems take 255, and VIDEO_map.json and temporary names are longer."""
MOST_BEFORE = 4
TYPES = ("episodic_on_policy", "semantic")


class TaskMemRows:
    """Rows ``{id: VIDEO*KEY, type, step, video_idx, episodic_folder, input, memory_tag?}`` of a JSONL file.

    A row of step > 0 needs the memories of the min(step, 4) clips before it: ``tasks.planner: causal_history`` gives it
    those that the policy wrote. Asked by itself (evaluation), it takes them from ``history_folder`` (``VIDEO.json``), or
    none with ``blank_history``. A ``semantic`` row writes facts; it is shown the facts known so far, and what
    ``episodic_MEMORY_TAG.json`` says of the same clips before and of its own clip.
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
        writes = {place.video: place.facts for place in self._places}
        for index, place in enumerate(self._places):
            if place.facts != writes[place.video]:
                raise self._lines.place(index).error(
                    f"video '{place.video}' has episodic and semantic rows, and a video has one history. Put the semantic "
                    "rows into a file and a run of their own."
                )

    @property
    def row_digests(self) -> dict[str, str]:
        """The digest of the file."""
        return self._lines.row_digests

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

    def with_history(self, index: int, memories: Mapping[int, Memory]) -> Task:
        """The task with these memories, faces numbered as in its own clip."""
        row, at = self._lines.row(index), self._lines.place(index)
        place = self._places[index]
        maps = self._face_maps(row, at, place.video)
        known = [(clip, fact) for clip in sorted(memories) for fact in _facts(memories[clip])]
        (message,) = messages_of([{"role": "user", "content": row["input"]}], at)
        metadata = {
            "video_id": place.video,
            "video_idx": place.clip,
            "step": row["step"],
            "type": row["type"],
            "category": row["type"],
        }
        if place.facts:
            events = self._episodic(row, at, place)
            earlier = [(clip, events[clip]) for clip in place.needs]
            texts = rewrite_texts([*earlier, *known], maps, place.clip, events[place.clip])
            facts = texts[len(earlier) :]
            listed = json.dumps(facts, indent=4, ensure_ascii=False)
            metadata |= {
                "history": listed if facts else "",
                "episodic": " ".join([*texts[: len(earlier)], events[place.clip]]),
            }
            fill = partial(_formatted, fillings=(metadata["episodic"], listed), step=row["step"], at=at)
        else:
            metadata["history"] = " ".join(rewrite_texts(known, maps, place.clip))
            fill = partial(_filled, history=metadata["history"], step=row["step"], at=at)
        return Task(row["id"], (_with_last_text(message, fill, at),), metadata=metadata)

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
        if not video.isprintable() or len(video.encode()) > LONGEST_NAME:
            name = f"{row['id']!r:.60}"
            raise at.error(
                f"'id' is {name}: files are named after VIDEO, so it has {LONGEST_NAME} printable bytes at most."
            )
        before = min(row["step"], MOST_BEFORE)
        if before < 0 or row["video_idx"] < before:
            raise at.error(f"step {row['step']} of clip {row['video_idx']} would need clips before the first.")
        facts = row["type"] == "semantic"
        for key in ("episodic_folder", "memory_tag") if facts else ():
            if not isinstance(row.get(key), str) or not row[key]:
                raise at.error(f"a semantic row needs '{key}', to find EPISODIC_FOLDER/VIDEO/episodic_MEMORY_TAG.json.")
        return ClipPlace(video, row["video_idx"], tuple(range(row["video_idx"] - before, row["video_idx"])), facts)

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

    def _episodic(self, row: Mapping[str, Any], at: Place, place: ClipPlace) -> dict[int, str]:
        """The episodic memories that a semantic row reads: those of the clips before that it needs, and its own clip's."""
        path = at.folder / row["episodic_folder"] / place.video / f"episodic_{row['memory_tag']}.json"
        found = _by_clip(_read(path, at), (*place.needs, place.clip), path, at)
        return {clip: " ".join(_facts(memory)) for clip, memory in found.items()}

    def _kept(self, index: int, place: ClipPlace) -> dict[int, Memory]:
        at, path = self._lines.place(index), Path(self.history_folder) / f"{place.video}.json"
        return _by_clip(_read(path, at), place.needs, path, at)


class _RawRows(JsonlRows):
    """The rows of a JSONL file as plain objects."""

    def row(self, index: int) -> dict[str, Any]:
        """One row."""
        return self._read(index)

    def place(self, index: int) -> Place:
        """Where a row stands."""
        return self._place(index)


_KINDS = {str: "a text", int: "a whole number", list: "a list of content blocks"}


def _facts(memory: Memory) -> list[str]:
    """The single texts of a memory."""
    return [memory] if isinstance(memory, str) else memory


def _by_clip(found: Any, clips: tuple[int, ...], path: Path, at: Place) -> dict[int, Memory]:
    """The memories of these clips in what a file ``{"CLIP": text or list of texts}`` holds."""
    if not isinstance(found, dict):
        raise at.error(f"'{path}' must hold memories by clip: {{\"0\": text or list of texts, …}}.")
    for clip in clips:
        memory = found.get(str(clip))
        if not isinstance(memory, str | list) or not all(isinstance(fact, str) for fact in memory):
            raise at.error(f"'{path}' has no memory of clip {clip}, a text or a list of texts.")
    return {clip: found[str(clip)] for clip in clips}


def _with_last_text(message: Message, fill: Callable[[str], str], at: Place) -> Message:
    """The message with its last text filled in."""
    texts = [i for i, block in enumerate(message.content) if isinstance(block, Text)]
    if not texts:
        raise at.error("the input has no text block, so there is no place for the description of the preceding part.")
    last = message.content[texts[-1]]
    assert isinstance(last, Text)
    if MARK not in last.text:
        raise at.error(f"the last text block must hold '{MARK}'.")
    blocks: list[Block] = list(message.content)
    blocks[texts[-1]] = Text(fill(last.text))
    return Message(message.role, tuple(blocks))


def _filled(text: str, history: str, step: int, at: Place) -> str:
    """An episodic row's text: the first ``{}`` after the mark is the history; nothing else in it is formatted.

    A row of step 0 has no history, so it may lack the ``{}``.
    """
    head, mark, rest = text.partition(MARK)
    before, place, after = rest.partition("{}")
    if step and not place:
        raise at.error(f"the last text block must hold '{MARK}' and after it a {{}} to be filled.")
    return head + mark + before + history + after


def _formatted(text: str, fillings: tuple[str, str], step: int, at: Place) -> str:
    """A semantic row's text, read as ``str.format`` reads it: episodic memories, then facts; ``{{`` is a brace."""
    filled, used = "", list[int]()
    try:
        for literal, name, spec, conversion in Formatter().parse(text):
            filled += literal
            if name is not None:
                used.append(["0", "1"].index(name or str(len(used))))
                filled += fillings[used[-1]]
                if spec or conversion:
                    raise ValueError(f"'{{{name}:{spec}}}' asks for a format")
    except ValueError as error:
        raise at.error(
            f"the last text block of a semantic row has a {{}} for the episodic memories, a second one for the facts known "
            f'so far, and any other brace twice, as in {{{{"description": […]}}}}: {error}.'
        ) from error
    if step and (missing := {0, 1} - set(used)):
        what = "episodic memories (the first)" if 0 in missing else "facts known so far (the second)"
        raise at.error(f"the last text block of a semantic row has no {{}} for the {what}.")
    return filled


def _read(path: Path, at: Place) -> Any:
    try:
        return strict_json(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise at.error(f"cannot read '{path}': {error}.") from error

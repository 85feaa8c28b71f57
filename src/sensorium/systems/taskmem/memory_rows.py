"""TaskMem's rows, and face ids from clip to clip: earlier memories name people by the current clip's ids.

Every clip numbers its faces from 1 (local ids); a map has the person of the whole video for each (global ids).

    memories  {3: "<face_1> waves to face 2", 4: "<face_1> leaves"}
    maps      {3: {7: 1, 8: 2}, 4: {8: 1}, 5: {8: 4}}           global to local, by clip
    current   5
    result    {3: "<face_5> waves to <face_4>", 4: "<face_4> leaves"}: person 8 is <face_4> now; 7, who is not in clip 5,
              gets the first free number after all that clip 5 knows

Each text is rewritten in one pass, so no id is exchanged twice. New ids are given in the order of their first occurrence.
An id that a clip's map does not have is a person of its own. A number of more than nine digits is no id.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from string import Formatter
from typing import Any, Unpack

from sensorium.data.causal_history import ClipPlace, Memory
from sensorium.data.media_store import MediaStore
from sensorium.data.row_format import FileRowOptions, Place, messages_of
from sensorium.data.rows import JsonlRows
from sensorium.vocabulary.content import Block, Message, Text
from sensorium.vocabulary.errors import TaskError
from sensorium.vocabulary.plain import strict_json
from sensorium.vocabulary.task import Task

# A face in any spelling: in angles, brackets or parentheses, bare, or in an angle that is not closed. Not "surface 3".
TAG = re.compile(
    r"<\s*face[\s_-]*(\d+)\s*>|\[\s*face[\s_-]*(\d+)\s*\]|\(\s*face[\s_-]*(\d+)\s*\)"
    r"|(?:<\s*|(?<![A-Za-z]))face[\s_-]*(\d+)>?",
    re.IGNORECASE | re.ASCII,
)
MOST_DIGITS = 9  # of a face's number
FaceMaps = Mapping[int, Mapping[int, int]]  # global to local ids, by clip


def rewrite_faces(memories: Mapping[int, str], maps: FaceMaps, current: int) -> dict[int, str]:
    """The memories with the current clip's ids, by clip."""
    clips = sorted(memories)
    return dict(zip(clips, rewrite_texts([(clip, memories[clip]) for clip in clips], maps, current), strict=True))


def rewrite_texts(texts: Sequence[tuple[int, str]], maps: FaceMaps, current: int, beside: str = "") -> list[str]:
    """The texts, each with its clip, with the current clip's ids; a person has one number in all of them.

    ``beside`` is a text of the current clip that stays unchanged: nobody else gets a number that is in it.
    """
    local_now = dict(maps.get(current, {}))
    highest = max([*local_now.values(), *filter(None, map(_local, TAG.finditer(beside)))], default=0)
    fresh: dict[tuple[str, int, int], int] = {}
    rewritten = []
    for clip, text in texts:
        # Local to global; of two people with one local id the one with the lower number.
        people = {local: person for person, local in sorted(maps.get(clip, {}).items(), reverse=True)}

        def renamed(found: re.Match[str], clip: int = clip, people: Mapping[int, int] = people) -> str:
            nonlocal highest
            local = _local(found)
            if local is None:
                return found.group()
            person = people.get(local)
            if person is not None and person in local_now:
                return f"<face_{local_now[person]}>"
            key = ("known", 0, person) if person is not None else ("strange", clip, local)
            if key not in fresh:
                highest += 1
                fresh[key] = highest
            return f"<face_{fresh[key]}>"

        rewritten.append(TAG.sub(renamed, text))
    return rewritten


def _local(found: re.Match[str]) -> int | None:
    """The number of a tag; None where it has too many digits to be a face."""
    digits = next(group for group in found.groups() if group is not None).lstrip("0") or "0"
    return int(digits) if len(digits) <= MOST_DIGITS else None


def read_face_maps(path: Path) -> dict[int, dict[int, int]]:
    """The maps of a video, ``{clip: {"[face_G]": "<face_L>"}}``; none where there is no file."""
    try:
        raw = strict_json(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TaskError(f"{path}: the face maps cannot be read: {error}.") from error
    try:
        return {
            int(clip): {_number(person): _number(local) for person, local in faces.items()} for clip, faces in raw.items()
        }
    except (AttributeError, ValueError, TypeError) as error:
        raise TaskError(f'{path}: face maps are {{clip: {{"[face_G]": "<face_L>"}}}}: {error}.') from error


def _number(tag: Any) -> int:
    found = re.fullmatch(r"[\[<]?\s*(?:face)?[\s_-]*(\d+)\s*[\]>]?", str(tag), re.IGNORECASE | re.ASCII)
    if found is None or len(found.group(1)) > MOST_DIGITS:
        raise ValueError(f"'{str(tag)[:40]}' is no face")
    return int(found.group(1))


MARK = "[Description of the preceding part]:"
LONGEST_NAME = 200  # bytes of a video's name: file systems take 255, and VIDEO_map.json and temporary names are longer
MOST_BEFORE = 4
TYPES = ("episodic_on_policy", "semantic")
KINDS = {str: "a text", int: "a whole number", list: "a list of content blocks"}


class TaskMemRows:
    """Rows ``{id: VIDEO*KEY, type, step, video_idx, episodic_folder, input, memory_tag?}`` of a JSONL file.

    A row of step > 0 needs the memories of the min(step, 4) clips before it: ``tasks.planner: causal_history`` gives it
    those that the policy wrote. Without a planner (evaluation) it takes them from ``history_folder`` (``VIDEO.json``), or
    none with ``blank_history``. A ``semantic`` row writes facts; its prompt has the facts known so far, and the memories of
    the same clips and of its own clip in ``episodic_MEMORY_TAG.json``.
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
        path = Path(self.history_folder) / f"{place.video}.json"
        return self.with_history(index, _memories(path, place.needs, self._lines.place(index)))

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
        metadata = {"video_id": place.video, "video_idx": place.clip, "step": row["step"]}
        metadata |= {"type": row["type"], "category": row["type"]}
        if place.facts:
            path = at.folder / row["episodic_folder"] / place.video / f"episodic_{row['memory_tag']}.json"
            found = _memories(path, (*place.needs, place.clip), at)
            events = {clip: " ".join(_facts(memory)) for clip, memory in found.items()}
            earlier = [(clip, events[clip]) for clip in place.needs]
            texts = rewrite_texts([*earlier, *known], maps, place.clip, events[place.clip])
            facts = texts[len(earlier) :]
            listed = json.dumps(facts, indent=4, ensure_ascii=False)
            episodic = " ".join([*texts[: len(earlier)], events[place.clip]])
            metadata |= {"history": listed if facts else "", "episodic": episodic}
            fill = partial(_formatted, fillings=(episodic, listed), step=row["step"], at=at)
        else:
            metadata["history"] = " ".join(rewrite_texts(known, maps, place.clip))
            fill = partial(_filled, history=metadata["history"], step=row["step"], at=at)
        return Task(row["id"], (_with_last_text(message, fill, at),), metadata=metadata)

    def _placed(self, index: int) -> ClipPlace:
        row, at = self._lines.row(index), self._lines.place(index)
        for key, kind in (("id", str), ("type", str), ("step", int), ("video_idx", int), ("input", list)):
            if not isinstance(row.get(key), kind) or isinstance(row.get(key), bool):
                raise at.error(f"'{key}' must be {KINDS[kind]}, not {row.get(key)!r:.40}.")
        if row["type"] not in TYPES:
            raise at.error(f"'type' is {row['type']!r:.40}; it is one of {', '.join(TYPES)}.")
        video, star, _ = row["id"].partition("*")
        if not star or not video or "/" in video or video in (".", ".."):
            raise at.error(f"'id' must be VIDEO*KEY, not {row['id']!r:.60}.")
        if not video.isprintable() or len(video.encode()) > LONGEST_NAME:
            why = f"files are named after VIDEO, so it has {LONGEST_NAME} printable bytes at most"
            raise at.error(f"'id' is {row['id']!r:.60}: {why}.")
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


class _RawRows(JsonlRows):
    """The rows of a JSONL file as plain objects."""

    def row(self, index: int) -> dict[str, Any]:
        return self._read(index)

    def place(self, index: int) -> Place:
        return self._place(index)


def _facts(memory: Memory) -> list[str]:
    return [memory] if isinstance(memory, str) else memory


def _memories(path: Path, clips: tuple[int, ...], at: Place) -> dict[int, Memory]:
    """The memories of these clips in a file ``{"CLIP": text or list of texts}``."""
    try:
        found = strict_json(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise at.error(f"cannot read '{path}': {error}.") from error
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

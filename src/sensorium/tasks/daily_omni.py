"""Daily-Omni: 1,197 questions about everyday videos that need both the picture and the sound. For evaluation.

A folder holds ``qa.json`` (rows of Question, Choice, Answer, video_id, Type) and, for each video,
``Videos/{id}/{id}_video.mp4`` and ``Videos/{id}/{id}_audio.wav``; or ``Videos.tar`` with them, which is unpacked once.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sensorium.media.files import roots_of
from sensorium.media.store import MediaStore
from sensorium.tasks.choices import LETTER, options_of, question
from sensorium.tasks.clip_options import ClipOptions
from sensorium.tasks.manifest import read_manifest, text_of, unpack_once
from sensorium.tasks.message_parsing import Place
from sensorium.tasks.rows import content_digest
from sensorium.vocabulary.content import user
from sensorium.vocabulary.errors import TaskError
from sensorium.vocabulary.task import Task

COLUMNS = {
    "AV Event Alignment": "AV alignment",
    "Comparative": "comparative",
    "Context understanding": "context",
    "Event Sequence": "sequence",
    "Inference": "inference",
    "Reasoning": "reasoning",
}
"""The Types of questions, in the order and with the names of the published table. A task's category is its Type."""


class DailyOmni:
    """The questions of ``qa.json`` in the folder ``path``. ``video`` and ``sound`` say how clips are decoded.

    Video and sound are two blocks, or, with ``video: {use_audio_in_video: true}``, one in which they are interleaved.
    ``instruction`` replaces the request to think and answer in tags. Videos that are links lead into the folder, or into
    one of ``media_roots``.
    """

    table_columns = COLUMNS

    def __init__(
        self,
        path: str,
        store: MediaStore,
        video: Mapping[str, Any] | None = None,
        sound: Mapping[str, Any] | None = None,
        instruction: str | None = None,
        limit: int = 0,
        media_roots: Sequence[str] = (),
    ) -> None:
        self.folder, self.store, self.instruction = Path(path), store, instruction
        self._clips = ClipOptions(video, sound, "daily_omni")
        self._clips.refuse_other_sound("daily_omni")
        self._roots = roots_of(self.folder / "Videos", media_roots)
        manifest = self.folder / "qa.json"
        self._rows = read_manifest(manifest)[: limit or None]
        self.row_digests = {str(manifest): content_digest(manifest)}
        unpack_once(self.folder / "Videos.tar", self.folder)
        if not (self.folder / "Videos").is_dir():
            raise TaskError(
                f"{self.folder}: there is neither a folder 'Videos' nor an archive 'Videos.tar' with it. Download the data "
                "set's archive there; it is unpacked once."
            )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Task:
        row = self._rows[index]
        place = Place(
            f"{self.folder / 'qa.json'}, row {index}", self.folder / "Videos", self.store, self._clips, self._roots
        )
        if not isinstance(row, Mapping):
            raise place.error(f"a row is an object, not {row!r:.60}.")
        for field in ("Question", "Answer", "video_id", "Type"):
            if not text_of(row, field):
                raise place.error(f"'{field}' is missing or no text.")
        options = options_of(row.get("Choice"), place, "Choice")
        if len(options) < 2:
            raise place.error("'Choice' must list the options; without them the model would answer blind.")
        name = text_of(row, "video_id")
        video = place.clip("video", f"{name}/{name}_video.mp4", f"video '{name}'")
        sound = place.clip("sound", f"{name}/{name}_audio.wav", f"sound '{name}'")
        media = (video.heard_with(sound),) if self._clips.hears_in_video else (video, sound)
        return Task(
            id=f"daily_omni/{index}",
            messages=(user(*media, question(text_of(row, "Question"), options, LETTER, self.instruction)),),
            answer=text_of(row, "Answer"),
            metadata={"category": text_of(row, "Type"), "type": "multiple choice", "video": name},
        )

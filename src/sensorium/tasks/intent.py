"""IntentTrain and IntentBench: what do the people in a video mean? Video and sound as two blocks, then the question.

A folder holds ``emer_rewrite.json`` and ``social_iq_v2_rewrite.json`` (training) or ``qa.json`` (benchmark), and
``videos.zip``, which is unpacked once. A row: problem, problem_type, answer, options, video or path, data_type.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sensorium.media.files import roots_of
from sensorium.media.store import MediaStore
from sensorium.tasks.choices import LETTER, LETTERS, NUMBER, WORDS, YES_OR_NO, options_of, question
from sensorium.tasks.clip_options import ClipOptions
from sensorium.tasks.manifest import read_manifest, text_of, unpack_once
from sensorium.tasks.message_parsing import Place
from sensorium.tasks.rows import content_digest
from sensorium.vocabulary.content import Media, user
from sensorium.vocabulary.errors import RecipeError, TaskError, nearest
from sensorium.vocabulary.task import Task

TRAIN = ("emer_rewrite.json", "social_iq_v2_rewrite.json")
BENCH = ("qa.json",)
INSTRUCTIONS = {
    "multiple choice": LETTER,
    "emer_ov_mc": LETTERS,
    "numerical": NUMBER,
    "judge": YES_OR_NO,
    "free-form": WORDS,
}
WITH_OPTIONS = ("multiple choice", "emer_ov_mc")


class Intent:
    """Questions of the types in ``problem_types``, from ``manifests`` in the folder ``path`` (those it has if not said).

    ``video`` and ``sound`` say how clips are decoded; ``with_sound: false`` leaves the sound out. ``instruction`` replaces
    the request to think and answer in tags. Videos that are links lead into the folder, or into one of ``media_roots``.
    ``unpack_ratio`` bounds what the archive unpacks to, in times its size: videos hardly shrink.
    """

    def __init__(
        self,
        path: str,
        store: MediaStore,
        manifests: Sequence[str] = (),
        problem_types: Sequence[str] = ("multiple choice",),
        video: Mapping[str, Any] | None = None,
        sound: Mapping[str, Any] | None = None,
        with_sound: bool = True,
        instruction: str | None = None,
        limit: int = 0,
        media_roots: Sequence[str] = (),
        unpack_ratio: float = 20.0,
    ) -> None:
        for name in problem_types:
            if name not in INSTRUCTIONS:
                raise RecipeError(f"intent: there is no problem type '{name}'{nearest(name, list(INSTRUCTIONS))}")
        self.folder, self.store = Path(path), store
        self.with_sound, self.instruction = with_sound, instruction
        self._clips = ClipOptions(video, sound, "intent")
        self._clips.refuse_other_sound("intent")
        if self._clips.hears_in_video and not with_sound:
            raise RecipeError("intent: with_sound: false and video: {use_audio_in_video: true} contradict each other.")
        self._roots = roots_of(self.folder, media_roots)
        self._rows: list[tuple[str, int, Any]] = []
        self.row_digests: dict[str, str] = {}
        for manifest in manifests or self._present():
            rows = read_manifest(self.folder / manifest)
            self.row_digests[str(self.folder / manifest)] = content_digest(self.folder / manifest)
            for number, row in enumerate(rows):
                # A row that cannot be read is kept, to be refused or skipped by the recipe's policy when it comes up.
                if not isinstance(row, Mapping) or row.get("problem_type", "multiple choice") in problem_types:
                    self._rows.append((manifest, number, row))
        self._rows = self._rows[: limit or None]
        if not self._rows:
            raise TaskError(f"{path}: no row has a problem_type among {', '.join(problem_types)}.")
        unpack_once(self.folder / "videos.zip", self.folder, unpack_ratio)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Task:
        manifest, number, row = self._rows[index]
        place = Place(f"{self.folder / manifest}, row {number}", self.folder, self.store, self._clips, self._roots)
        if not isinstance(row, Mapping):
            raise place.error(f"a row is an object, not {row!r:.60}.")
        kind = str(row.get("problem_type", "multiple choice"))
        problem, answer, options = (
            text_of(row, "problem"),
            text_of(row, "answer"),
            options_of(row.get("options"), place, "options"),
        )
        if not problem or not answer:
            raise place.error(f"'{'answer' if problem else 'problem'}' is missing or no text.")
        if kind in WITH_OPTIONS and len(options) < 2:
            raise place.error(f"a question of type '{kind}' needs 'options'; without them the model would answer blind.")
        shown = f"{problem} Options:" if options else problem
        return Task(
            id=f"{Path(manifest).stem}/{number}",
            messages=(user(*self._media(row, place), question(shown, options, INSTRUCTIONS[kind], self.instruction)),),
            answer=answer,
            metadata={"category": kind, "type": kind, "manifest": manifest},
        )

    def _media(self, row: Mapping[str, Any], place: Place) -> list[Media]:
        if row.get("data_type", "video") != "video":
            raise place.error(f"the data_type {row['data_type']!r:.40} is not 'video', the only one that is read here.")
        told = text_of(row, "video") or text_of(row, "path")
        if not told:
            raise place.error("neither 'video' nor 'path' says which video it is about.")
        file = told.lstrip("/").removeprefix("./")
        found = next((path for path in (Path(file), Path("videos", file)) if (self.folder / path).is_file()), None)
        if found is None:
            raise place.error(f"there is no video '{file}' in '{self.folder}' nor in its folder 'videos'.")
        video = place.clip("video", found, f"video '{file}'")
        if self._clips.hears_in_video or not self.with_sound:
            return [video]
        return [video, place.clip("sound", found, f"sound of '{file}'")]

    def _present(self) -> list[str]:
        """The manifests of the folder: the training ones, or else the benchmark's."""
        present = [name for name in TRAIN if (self.folder / name).is_file()]
        present = present or [name for name in BENCH if (self.folder / name).is_file()]
        if not present:
            raise TaskError(f"{self.folder}: holds none of {', '.join((*TRAIN, *BENCH))}. Download the data set there.")
        return present

"""NeMo-RL's audio-visual data sets, ``daily_omni`` and ``intent``: JSON manifests with media beside them or in an archive.

The request to think and answer is the one that NeMo-RL's recipe publishes its numbers for, at its place: behind the last
option, on the same line.
"""

import ast
import re
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import inf
from pathlib import Path, PurePosixPath
from typing import IO, Any

from sensorium.data.media_files import roots_of
from sensorium.data.media_store import MediaStore
from sensorium.data.row_format import ClipOptions, Place
from sensorium.data.rows import content_digest
from sensorium.runs.durable import drafted
from sensorium.vocabulary.content import Media, user
from sensorium.vocabulary.errors import RecipeError, TaskError, nearest
from sensorium.vocabulary.plain import strict_json
from sensorium.vocabulary.task import Task

MIB = 1024 * 1024
SMALL = 64 * MIB  # may be unpacked whatever the ratio: texts shrink a lot
MEMBERS = 1_000_000  # files that are unpacked at most: empty ones fill a disk, too


def read_manifest(path: Path) -> list[Any]:
    """The rows of a manifest; a file that is missing or no JSON list is an error that names it."""
    try:
        rows = strict_json(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise TaskError(f"{path}: cannot read the manifest: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{path}: the manifest is no JSON: {error}.") from error
    if not isinstance(rows, list) or not rows:
        raise TaskError(f"{path}: a manifest is a list of rows, not {rows!r:.60}.")
    return rows


def text_of(row: Mapping[str, Any], field: str) -> str:
    """A field with text or a finite number, as text; else an empty text."""
    value = row.get(field)
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < inf
    return str(value).strip() if number or isinstance(value, str) else ""


@dataclass(frozen=True)
class _Member:
    """A file of an archive, its place in the folder, and the function that opens it."""

    place: Path
    size: int
    open: Callable[[], IO[bytes] | None]

    @property
    def present(self) -> bool:
        return self.place.is_file() and self.place.stat().st_size == self.size


def unpack_once(archive: Path, folder: Path, ratio: float = 20.0) -> None:
    """Unpack a zip or plain tar archive, if it exists, into a folder, unless a marker file says that it was done.

    An archive that would take more than ``ratio`` times its size or more than the free space is refused before anything is
    written (no member can exceed its stated size), and so are links and members outside of the folder. Files are written
    under temporary names and renamed, and the marker comes last: a kill or a second process never leaves a partial file.
    """
    if not archive.is_file():
        return
    seen = archive.stat()
    state = f"{seen.st_size} {seen.st_mtime_ns}"
    marker = folder / f".{archive.name}.unpacked"
    if marker.is_file() and marker.read_text() == state:
        return
    try:
        with ExitStack() as opened:
            members = list(islice(_members(archive, folder, opened), MEMBERS + 1))
            _refuse_bomb(members, archive, folder, seen.st_size, ratio)
            absent = [member for member in members if not member.present]
            for member in absent:
                member.place.parent.mkdir(parents=True, exist_ok=True)
                with drafted(member.place, flushed=False, shared=True) as draft, draft.open("wb") as target:
                    source = member.open()
                    assert source is not None, "a regular file"
                    with source:
                        shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, NotImplementedError, RuntimeError, OSError) as error:
        raise TaskError(f"{archive}: cannot unpack the archive: {error}. Download it again, or free some space.") from error
    # If nothing was written, the folder may be read-only.
    with nullcontext() if absent else suppress(OSError), drafted(marker, flushed=False, shared=True) as draft:
        draft.write_text(state)


def _members(archive: Path, folder: Path, opened: ExitStack) -> Iterator[_Member]:
    def member(name: str, size: int, opens: Callable[[], IO[bytes] | None]) -> _Member:
        inside = PurePosixPath(name)
        if inside.is_absolute() or ".." in inside.parts:
            raise TaskError(f"{archive}: its member '{name}' would be written outside of '{folder}'.")
        return _Member(folder / inside, size, opens)

    if archive.suffix == ".tar":
        tar = opened.enter_context(tarfile.TarFile(archive))  # a compressed one would have to be read whole to be listed
        for info in tar:
            if not info.isreg() and not info.isdir():
                raise TaskError(f"{archive}: its member '{info.name}' is a link or a device, which video archives lack.")
            if info.isreg():
                yield member(info.name, info.size, partial(tar.extractfile, info))
    else:
        packed = opened.enter_context(zipfile.ZipFile(archive))
        for entry in packed.infolist():
            if not entry.is_dir():
                yield member(entry.filename, entry.file_size, partial(packed.open, entry))


def _refuse_bomb(members: Sequence[_Member], archive: Path, folder: Path, packed: int, ratio: float) -> None:
    if len(members) > MEMBERS:
        raise TaskError(f"{archive}: it has more than {MEMBERS:,} members, which no archive of a data set has.")
    stated = sum(member.size for member in members)
    if stated > max(ratio * packed, SMALL):
        raise TaskError(
            f"{archive}: {packed / MIB:,.1f} MiB would unpack to {stated / MIB:,.0f} MiB, more than {ratio:g} times as "
            "much, which no archive of videos does. Raise the source's option unpack_ratio if it is sound."
        )
    needed = sum(member.size for member in members if not member.present)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise TaskError(
            f"{archive}: it unpacks to {needed / MIB:,.0f} MiB, and '{folder}' has {free / MIB:,.0f} MiB of free space."
        )


LETTERED = re.compile(r"\s*\(?[A-Za-z]\s*[.):、]")

THINK = (
    "First reason briefly between <think> </think> tags, then output {what} between <answer> </answer> tags. "
    "Format example: <think>your reasoning</think><answer>{example}</answer>"
)
LETTER = THINK.format(what="only the single option letter (e.g., A, B, C, D, ...)", example="A")
LETTERS = THINK.format(what="only the letters of all options that fit (e.g., A or A,E)", example="A,E")
NUMBER = THINK.format(what="only the number (e.g., 42 or 3.14)", example="42")
YES_OR_NO = THINK.format(what="only Yes or No", example="Yes")
WORDS = THINK.format(what="your answer in a few words", example="your answer")
MOST_CHARACTERS = 100_000  # of a list of options that is written as text


def question(problem: str, options: Sequence[str], asked: str, instruction: str | None = None) -> str:
    """The problem, its options one a line with letters, and the request ``asked``.

    A recipe's own ``instruction`` replaces ``asked``, on a line of its own.
    """
    shown = "\n".join((problem.strip(), *lettered(options)))
    if instruction is None:
        return f"{shown} {asked}"
    return f"{shown}\n{instruction}" if instruction else shown


def lettered(options: Sequence[str]) -> list[str]:
    """Options that begin with their letters."""
    if all(LETTERED.match(option) for option in options):
        return [option.strip() for option in options]
    return [f"{chr(ord('A') + i)}. {option.strip()}" for i, option in enumerate(options)]


def options_of(raw: Any, place: Place, field: str) -> list[str]:
    """The options of a row: a list of texts, or the text of such a list, or none."""
    if raw is None or raw == "":
        return []
    if isinstance(raw, str) and len(raw) <= MOST_CHARACTERS:
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            raw = ast.literal_eval(raw.strip())
    if not isinstance(raw, list) or not all(isinstance(option, str) and option.strip() for option in raw) or len(raw) > 26:
        raise place.error(f"'{field}' must be a list of at most 26 texts, not {raw!r:.80}.")
    return raw


# The Types of questions, in the order and with the names of the published table. A task's category is its Type.
COLUMNS = {
    "AV Event Alignment": "AV alignment",
    "Comparative": "comparative",
    "Context understanding": "context",
    "Event Sequence": "sequence",
    "Inference": "inference",
    "Reasoning": "reasoning",
}


class DailyOmni:
    """Rows of ``path/qa.json`` with Question, Choice, Answer, video_id and Type.

    Each video has ``Videos/{id}/{id}_video.mp4`` and ``…_audio.wav``; ``Videos.tar`` with them is unpacked once. Video and
    sound are two blocks, or one interleaved with ``video: {use_audio_in_video: true}``. ``instruction`` replaces the
    request to think and answer in tags. Links lead into the folder, or into one of ``media_roots``.
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
        where = f"{self.folder / 'qa.json'}, row {index}"
        place = Place(where, self.folder / "Videos", self.store, self._clips, self._roots)
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
    """Rows of ``manifests`` in the folder ``path`` (by default those of training, else the benchmark's), by problem type.

    A row has problem, problem_type, answer, options, video or path, and data_type; ``videos.zip`` is unpacked once, to at
    most ``unpack_ratio`` times its size, since videos hardly shrink. ``with_sound: false`` leaves the sound out.
    ``instruction`` replaces the request to think and answer in tags. Links lead into the folder or ``media_roots``.
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
        present = [[name for name in names if (self.folder / name).is_file()] for names in (TRAIN, BENCH)]
        chosen = list(manifests) or present[0] or present[1]
        if not chosen:
            raise TaskError(f"{self.folder}: holds none of {', '.join((*TRAIN, *BENCH))}. Download the data set there.")
        for manifest in chosen:
            rows = read_manifest(self.folder / manifest)
            self.row_digests[str(self.folder / manifest)] = content_digest(self.folder / manifest)
            for number, row in enumerate(rows):
                # A row that is no object stays, to be refused or skipped by the recipe's policy when it is drawn.
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
        problem, answer = text_of(row, "problem"), text_of(row, "answer")
        options = options_of(row.get("options"), place, "options")
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
        file = (text_of(row, "video") or text_of(row, "path")).lstrip("/").removeprefix("./")
        if not file:
            raise place.error("neither 'video' nor 'path' names the video.")
        found = next((path for path in (Path(file), Path("videos", file)) if (self.folder / path).is_file()), None)
        if found is None:
            raise place.error(f"there is no video '{file}' in '{self.folder}' nor in its folder 'videos'.")
        video = place.clip("video", found, f"video '{file}'")
        if self._clips.hears_in_video or not self.with_sound:
            return [video]
        return [video, place.clip("sound", found, f"sound of '{file}'")]

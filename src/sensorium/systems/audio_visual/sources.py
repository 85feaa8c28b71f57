"""Manifests: a JSON file that lists the rows of a data set whose media lie beside it, perhaps still in an archive."""

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
from sensorium.data.message_parsing import ClipOptions, Place
from sensorium.data.rows import content_digest
from sensorium.runs.durable import drafted
from sensorium.vocabulary.content import Media, user
from sensorium.vocabulary.errors import RecipeError, TaskError, nearest
from sensorium.vocabulary.plain import strict_json
from sensorium.vocabulary.task import Task

MIB = 1024 * 1024
SMALL = 64 * MIB
"""What may be unpacked whatever the ratio: texts shrink a lot."""

MEMBERS = 1_000_000
"""Files that are unpacked at most: empty ones take no bytes, and fill a disk all the same."""


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
    """A field that must hold text (or a finite number), or an empty text if it does not."""
    value = row.get(field)
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < inf
    return str(value).strip() if number or isinstance(value, str) else ""


@dataclass(frozen=True)
class _Member:
    """A file of an archive, and how it is opened."""

    name: str
    size: int
    open: Callable[[], IO[bytes]]


def unpack_once(archive: Path, folder: Path, ratio: float = 20.0) -> None:
    """Unpack a zip or plain tar archive into a folder, unless a marker says that it was done.

    One that would take more than ``ratio`` times its size, or more than there is room for, is refused before anything is
    written: no member can grow beyond the size it states. So are links and members outside of the folder. Each file is
    written beside its place and renamed, and the marker comes last: a kill or a second process at the same time costs work,
    never a half file. Nothing is done where there is no archive.
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
            listed = _tar_members if archive.suffix == ".tar" else _zip_members
            members = list(islice(listed(archive, opened), MEMBERS + 1))
            _refuse_bomb(members, archive, folder, seen.st_size, ratio)
            written = [_unpack(member, archive, folder) for member in members]
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, NotImplementedError, RuntimeError, OSError) as error:
        raise TaskError(f"{archive}: cannot unpack the archive: {error}. Download it again, or free some space.") from error
    # Where all was there, a folder that is read-only will do.
    unneeded = nullcontext() if any(written) else suppress(OSError)
    with unneeded, drafted(marker, flushed=False, shared=True) as draft:
        draft.write_text(state)


def _zip_members(archive: Path, opened: ExitStack) -> Iterator[_Member]:
    inside = opened.enter_context(zipfile.ZipFile(archive))
    for info in inside.infolist():
        if not info.is_dir():
            yield _Member(info.filename, info.file_size, partial(inside.open, info))


def _tar_members(archive: Path, opened: ExitStack) -> Iterator[_Member]:
    # A compressed one would have to be read whole to be listed.
    inside = opened.enter_context(tarfile.TarFile(archive))
    for info in inside:
        if info.isdir():
            continue
        if not info.isreg():
            raise TaskError(f"{archive}: its member '{info.name}' is a link or a device; an archive of videos has none.")
        yield _Member(info.name, info.size, partial(_opened, inside, info))


def _opened(inside: tarfile.TarFile, info: tarfile.TarInfo) -> IO[bytes]:
    found = inside.extractfile(info)
    assert found is not None, "it is a regular file"
    return found


def _refuse_bomb(members: Sequence[_Member], archive: Path, folder: Path, packed: int, ratio: float) -> None:
    if len(members) > MEMBERS:
        raise TaskError(f"{archive}: it has more than {MEMBERS:,} members, which no archive of a data set has.")
    stated = sum(member.size for member in members)
    if stated > max(ratio * packed, SMALL):
        raise TaskError(
            f"{archive}: {packed / MIB:,.1f} MiB would unpack to {stated / MIB:,.0f} MiB, more than {ratio:g} times as "
            "much, which no archive of videos does. Raise the source's option unpack_ratio if it is sound."
        )
    places = [(member, _place(member, archive, folder)) for member in members]
    needed = sum(member.size for member, place in places if not _is_there(member, place))
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise TaskError(
            f"{archive}: it unpacks to {needed / MIB:,.0f} MiB and '{folder}' has room for {free / MIB:,.0f} MiB."
        )


def _place(member: _Member, archive: Path, folder: Path) -> Path:
    inside = PurePosixPath(member.name)
    if inside.is_absolute() or ".." in inside.parts:
        raise TaskError(f"{archive}: its member '{member.name}' would be written outside of '{folder}'.")
    return folder / inside


def _is_there(member: _Member, place: Path) -> bool:
    return place.is_file() and place.stat().st_size == member.size


def _unpack(member: _Member, archive: Path, folder: Path) -> bool:
    """Write a member's file, unless it is there; returns whether it was written."""
    place = _place(member, archive, folder)
    if _is_there(member, place):
        return False
    place.parent.mkdir(parents=True, exist_ok=True)
    with drafted(place, flushed=False, shared=True) as draft, member.open() as source, draft.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    return True


# The request to think and answer is the one that NeMo-RL's recipe publishes its numbers for, at its place: behind the
# last option, on the same line.


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
MOST_CHARACTERS = 100_000
"""Of a list of options that is written as text."""


def question(problem: str, options: Sequence[str], asked: str, instruction: str | None = None) -> str:
    """The text of a question: problem, options one a line (lettered if they are not), and what is ``asked`` of the answer.

    A recipe's own ``instruction`` takes the place of ``asked``, on a line of its own.
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


# A folder holds ``qa.json`` (rows of Question, Choice, Answer, video_id, Type) and, for each video,
# ``Videos/{id}/{id}_video.mp4`` and ``Videos/{id}/{id}_audio.wav``; or ``Videos.tar`` with them, which is unpacked
# once.


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


# A folder holds ``emer_rewrite.json`` and ``social_iq_v2_rewrite.json`` (training) or ``qa.json`` (benchmark), and
# ``videos.zip``, which is unpacked once. A row: problem, problem_type, answer, options, video or path, data_type.


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

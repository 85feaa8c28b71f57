"""How rows are laid out: as tasks with content blocks, or flat, with a mapping from a task's parts to columns;
and plain data as messages: roles and content blocks as data sets write them. Every error names the row.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from sensorium.data.media_files import base64_bytes, inside, located
from sensorium.data.media_store import MediaStore
from sensorium.recipe.registry import check, resolve, table, wrong_options
from sensorium.vocabulary.content import USUAL, Block, Media, MediaKind, Message, Role, Text, system
from sensorium.vocabulary.decoding import Parameters, parameters_from
from sensorium.vocabulary.errors import MediaError, RecipeError, TaskError, nearest
from sensorium.vocabulary.plain import strict_json, text_of, words
from sensorium.vocabulary.task import EnvironmentSpec, Task

ClipKind = Literal["video", "sound"]
INSTEAD = {"frames": "fps", "fps": "frames"}  # either replaces the other


class ClipOptions:
    """A source's options ``video`` (frames or fps, pixel budgets, trim) and ``sound`` (sample rate, trim), checked.

    Both have the fields of VideoParameters and AudioParameters: ``video: {frames: 8, max_pixels_per_frame: 100352}``.
    """

    def __init__(
        self, video: Mapping[str, Any] | None = None, sound: Mapping[str, Any] | None = None, where: str = "source"
    ) -> None:
        self._given: dict[ClipKind, dict[str, Any]] = {"video": dict(video or {}), "sound": dict(sound or {})}
        for kind in self._given:
            try:
                self.parameters(kind, {})
            except ValueError as error:
                raise RecipeError(f"{where}: option '{kind}': {error}") from error

    @property
    def hears_in_video(self) -> bool:
        """Whether videos are shown with their own sound."""
        return bool(self._given["video"].get("use_audio_in_video"))

    def refuse_other_sound(self, where: str) -> None:
        """Refuse options of sounds where videos have their own."""
        if self.hears_in_video and self._given["sound"]:
            raise RecipeError(
                f"{where}: option 'sound' has no effect with video: {{use_audio_in_video: true}}, where the sound is cut "
                "as the video is. Leave one of the two out."
            )

    def parameters(self, kind: ClipKind, asked: Mapping[str, Any]) -> Parameters:
        """The parameters of one clip with a row's own ones, ``asked``; ValueError if they do not fit."""
        given = {key: value for key, value in self._given[kind].items() if INSTEAD.get(key) not in asked}
        return parameters_from(USUAL[kind], {**given, **asked})


ROLES: tuple[str, ...] = get_args(Role)
TYPES: dict[str, MediaKind] = {
    "image": "picture",
    "picture": "picture",
    "image_url": "picture",
    "video": "video",
    "video_url": "video",
    "audio": "sound",
    "sound": "sound",
    "audio_url": "sound",
}
# Keys of a block that may hold the medium itself. The other keys of a video or sound block are its parameters.
CARRIERS = ("path", "data", "bytes", "url", *TYPES)
PLACEHOLDERS: dict[MediaKind, str] = {"picture": "<image>", "video": "<video>", "sound": "<audio>"}


@dataclass(frozen=True)
class Place:
    """The context of a row: its name in errors, the folder of its relative paths, the store of its media.

    ``roots`` are the folders that may hold its media, links resolved; None: any, for rows that the user's own code made.
    ``service``: the row came in a request, so that folders are opened by an option of the service, not by a recipe.
    """

    where: str
    folder: Path
    store: MediaStore
    clips: ClipOptions = field(default_factory=ClipOptions)
    roots: tuple[Path, ...] | None = None
    service: bool = False

    def error(self, what: str) -> TaskError:
        """An error that names the row."""
        return TaskError(f"{self.where}: {what}")

    def picture(self, source: Any, item: str) -> Media:
        """A picture of this row, read and decoded; a missing or corrupt one is an error that names row and item."""
        found, origin = self._located(source, "picture", item)
        if isinstance(found, Path):
            return self.store.put_picture_file(found, origin)
        return self.store.put_picture(found, origin)

    def clip(self, kind: ClipKind, source: Any, item: str, asked: Mapping[str, Any] | None = None) -> Media:
        """A video or sound of this row, decoded later as the source and ``asked`` define; a missing one is refused."""
        try:
            parameters = self.clips.parameters(kind, asked or {})
        except ValueError as error:
            raise self.error(f"{item}: {error}") from error
        found, origin = self._located(source, kind, item)
        if isinstance(found, Path):
            return self.store.put_file(found, kind, origin, parameters)
        return self.store.put(found, kind, origin, parameters)

    def _located(self, source: Any, kind: MediaKind, item: str) -> tuple[bytes | Path, str]:
        """The bytes or the file of a medium, and its name in errors; a file outside of the roots is refused."""
        origin = f"{self.where}, {item}"
        found = located(source, kind, origin, self.folder)
        if not isinstance(found, Path):
            return found, origin
        if "'" not in item:  # else it names its file already
            origin += f" '{source if isinstance(source, str | Path) else found}'"
        try:
            if self.roots is not None:
                found = found.resolve()  # once: a link may be switched between the check and the reading
            allowed = self.roots is None or inside(found, self.roots)
        except (OSError, ValueError, RuntimeError) as error:  # a circle of links, or a name that no file can have
            raise MediaError(f"{origin}: cannot read the {kind} '{found}': {error}.") from error
        if not allowed and self.service:
            opened = ", ".join(f"'{root}'" for root in self.roots or ()) or "none"
            raise MediaError(
                f"{origin}: '{found}' lies in none of the folders that the service may read ({opened}). Start the service "
                "with --media-root FOLDER, or send the medium itself, as a data URL."
            )
        if not allowed:
            raise MediaError(
                f"{origin}: '{found}' lies outside of the data's folder '{self.folder}', and a row may not point "
                "anywhere. Move it there, or open its folder in the recipe: the source's option media_roots: [FOLDER]."
            )
        return found, origin


def messages_of(raw: Any, place: Place) -> tuple[Message, ...]:
    """Messages from ``[{"role": …, "content": text or blocks}, …]``."""
    if not isinstance(raw, Sequence) or isinstance(raw, str | bytes) or not raw:
        raise place.error(f"'messages' must be a list of messages, not {raw!r:.60}.")
    return tuple(_message(message, f"message {i}", place) for i, message in enumerate(raw))


def fill_placeholders(
    messages: Sequence[Message], media: Mapping[MediaKind, Sequence[Media]], place: Place
) -> tuple[Message, ...]:
    """Put media in the places of ``<image>``, ``<video>`` and ``<audio>``, in order; their numbers must agree."""
    texts = [block.text for m in messages for block in m.content if isinstance(block, Text)]
    for kind, items in media.items():
        count = sum(text.count(PLACEHOLDERS[kind]) for text in texts)
        if count != len(items):
            raise place.error(
                f"the text has {count} {PLACEHOLDERS[kind]} placeholders and the row has {len(items)} {kind}s. Give each "
                f"{kind} its placeholder, or set media_first: true for texts without any."
            )
    left = {PLACEHOLDERS[kind]: iter(items) for kind, items in media.items()}
    pattern = f"({'|'.join(map(re.escape, left))})"
    filled = []
    for message in messages:
        blocks: list[Block] = []
        for block in message.content:
            if not isinstance(block, Text) or not left:
                blocks.append(block)
                continue
            for text in filter(None, re.split(pattern, block.text)):
                blocks.append(next(left[text]) if text in left else Text(text))
        filled.append(Message(message.role, tuple(blocks)))
    return tuple(filled)


def put_first(messages: Sequence[Message], media: Mapping[MediaKind, Sequence[Media]], place: Place) -> tuple[Message, ...]:
    """Put pictures, videos and sounds before the last message's text, which must not have placeholders."""
    for kind in media:
        if any(PLACEHOLDERS[kind] in message.text for message in messages):
            raise place.error(f"the text has {PLACEHOLDERS[kind]} placeholders and media_first is on; turn it off.")
    first = [item for items in media.values() for item in items]
    return (*messages[:-1], Message(messages[-1].role, (*first, *messages[-1].content)))


def literal_placeholders(messages: Sequence[Message]) -> tuple[str, ...]:
    """Placeholders that go to the model as text, because the messages have no medium of their kind.

    "<image>What is it?", without a picture                      → ("<image>",)
    "<video>\\nWhat is it?", with a picture                      → ("<video>",)
    "<video>a.mp4</video>": markup, which has an end tag         → ()
    "What does the tag <video> do?", with a picture              → (): beside other media only at a line's start or end
    """
    held = {item.kind for message in messages for item in message.media}
    texts = [message.text for message in messages]
    found = []
    for kind, tag in PLACEHOLDERS.items():
        pattern = rf"^\s*{tag}|{tag}\s*$" if held else tag
        marked = (text for text in texts if f"</{tag[1:]}" not in text)
        if kind not in held and any(re.search(pattern, text, re.MULTILINE) for text in marked):
            found.append(tag)
    return tuple(found)


def _message(raw: Any, item: str, place: Place) -> Message:
    if not isinstance(raw, Mapping):
        raise place.error(f"{item} must be an object with role and content, not {raw!r:.60}.")
    raw = _present(raw)
    for key in raw:
        if key not in ("role", "content"):
            raise place.error(f"{item} has an unknown key '{key}'{nearest(str(key), ['role', 'content'])}")
    role, content = raw.get("role"), raw.get("content")
    if role not in ROLES:
        raise place.error(f"{item} has the role {role!r:.40}{nearest(str(role), list(ROLES))}")
    if isinstance(content, str):
        return Message(role, (Text(_text(content, item, place)),))
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise place.error(f"{item}: content must be text or a list of blocks, not {content!r:.60}.")
    return Message(role, tuple(_block(block, f"{item}, block {i}", place) for i, block in enumerate(content)))


def _block(raw: Any, item: str, place: Place) -> Block:
    if isinstance(raw, str):
        return Text(_text(raw, item, place))
    if not isinstance(raw, Mapping):
        raise place.error(f"{item} must be an object with a type, not {raw!r:.60}.")
    raw = _present(raw)
    kind = raw.get("type")
    if kind == "text":
        if set(raw) != {"type", "text"} or not isinstance(raw["text"], str):
            raise place.error(f"{item}: a text block is {{type: text, text: …}}; this one has keys {sorted(raw)}.")
        return Text(_text(raw["text"], item, place))
    if kind in TYPES:
        return _medium(TYPES[kind], raw, item, place)
    raise place.error(f"{item} has the type {kind!r:.40}{nearest(str(kind), ['text', *TYPES])}")


def _text(text: str, item: str, place: Place) -> str:
    """A text that can be written as UTF-8, which half of a surrogate pair (``"\\ud800"`` in JSON) cannot."""
    try:
        return text_of(text)
    except ValueError as error:
        raise place.error(f"{item}: {error}.") from error


def _medium(kind: MediaKind, raw: Mapping[str, Any], item: str, place: Place) -> Media:
    asked = {key: value for key, value in raw.items() if key != "type" and key not in CARRIERS}
    held = [key for key in raw if key in CARRIERS]
    if len(held) != 1 or (kind == "picture" and asked):
        given = sorted(str(key) for key in raw if key != "type")
        raise place.error(f"{item}: a {kind} is given by exactly one of {', '.join(CARRIERS)}; got {given}.")
    source = raw[held[0]]
    if held[0].endswith("_url") and isinstance(source, Mapping):
        source = source.get("url")
    if held[0] in ("data", "bytes") and isinstance(source, str) and not source.startswith("data:"):
        source = base64_bytes(source, kind, f"{place.where}, {item}")
    return place.picture(source, item) if kind == "picture" else place.clip(kind, source, item, asked)


def _present(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are not None: Parquet gives every block the keys of all others."""
    return {key: value for key, value in raw.items() if value is not None}


FIELDS = ["id", "messages", "answer", "environment", "demonstration", "metadata"]
MEDIA: dict[str, MediaKind] = {"pictures": "picture", "videos": "video", "sounds": "sound"}
TRIM = ["start", "end"]
PARTS = ["id", "prompt", *MEDIA, *TRIM, "answer", "demonstration", "category", "type"]


@dataclass(frozen=True)
class TaskRows:
    """Rows that are tasks: ``{id, messages, answer, environment, demonstration, metadata}``; unknown fields are refused.

    A row may name a registered environment, or one of the recipe's ``environments`` {name: module:Class}. Rows that name
    none are played in ``environment``, where the recipe names one.
    """

    environments: Mapping[str, str]
    environment: EnvironmentSpec | None

    def unread(self, row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Nothing: what is no field of a task is refused."""
        return iter(())

    def fields(self, known: Sequence[str], where: str) -> list[str]:
        """The columns to read of those a file has."""
        for column in known:
            if column not in FIELDS:
                raise TaskError(f"{where}: {_unknown(column)}")
        return list(known)

    def task(self, row: Mapping[str, Any], name: str, place: Place) -> Task:
        row = {key: value for key, value in row.items() if value is not None}
        for key in row:
            if key not in FIELDS:
                raise place.error(_unknown(key))
        environment = self._environment(row, place) if "environment" in row else self.environment
        messages = messages_of(_decoded(row, "messages", place), place) if "messages" in row else ()
        if environment is None and not messages:
            raise place.error("a row needs 'messages', or an 'environment' to be played in; it has neither.")
        _check_last(messages, place)
        _check_texts([value for key, value in row.items() if key != "messages"], place)
        return Task(
            id=self.id_in(row, name, place),
            messages=messages,
            answer=row.get("answer"),
            environment=environment,
            demonstration=_demonstration(row.get("demonstration"), place),
            metadata=_object(row, "metadata", place) if "metadata" in row else {},
        )

    def id_in(self, row: Mapping[str, Any], name: str, place: Place) -> str:
        """The id of a row's task."""
        return name if row.get("id") is None else str(row["id"])

    def _environment(self, row: Mapping[str, Any], place: Place) -> EnvironmentSpec:
        given = {key: value for key, value in _object(row, "environment", place).items() if value is not None}
        for key in given:
            if key not in ("name", "options", "seed"):
                raise place.error(f"'environment' has an unknown key '{key}'{nearest(key, ['name', 'options', 'seed'])}")
        name, options, seed = given.get("name"), given.get("options", {}), given.get("seed", 0)
        whole = isinstance(seed, int) and not isinstance(seed, bool)
        if not isinstance(name, str) or not isinstance(options, Mapping) or not whole:
            raise place.error(f"'environment' is {{name: text, options: object, seed: number}}, not {given!r:.80}.")
        options = {key: value for key, value in options.items() if value is not None}
        # Rows are data: only the recipe decides which code runs.
        known = self.environments.get(name, name)
        if name not in self.environments and name not in table("environment"):
            if ":" in name:
                raise place.error(
                    f"the environment '{name:.80}' names code, and a row may not. Name it in the recipe, with the source's "
                    "option environments: {maze: my_package.my_module:Maze}, and name maze in rows."
                )
            names = [*table("environment"), *self.environments]
            raise place.error(f"unknown environment '{name:.80}'{nearest(name, names)}")
        try:
            _, problem = wrong_options("environment", known, options)
        except RecipeError as error:
            raise place.error(str(error)) from error
        closed = [key for key in options if key in getattr(resolve("environment", known), "recipe_only", ())]
        if closed:
            problem = f"the option '{closed[0]}' of environment '{name}' decides which code runs: only a recipe may set it."
        if problem:
            raise place.error(problem)
        return EnvironmentSpec(known, options, seed)


@dataclass(frozen=True)
class FlatRows:
    """Flat rows: ``columns`` maps parts of a task to columns; ``a.b`` is the key b of an object in column a.

    The prompt is text or a list of messages; ``<image>``, ``<video>`` and ``<audio>`` in it stand for the next medium of
    the columns ``pictures``, ``videos`` and ``sounds``. ``media_first`` puts them, in this order, before a prompt without
    placeholders. ``start`` and ``end`` (seconds) trim the row's videos and sounds. ``instruction`` ends the last message;
    ``system`` goes before the first. ``type``: how the answer is compared (see the reward ``accuracy_by_type``).
    Rows that an environment plays may have no prompt.
    """

    columns: Mapping[str, str]
    instruction: str
    system: str
    media_first: bool
    environment: EnvironmentSpec | None

    def __post_init__(self) -> None:
        for part in self.columns:
            if part not in PARTS:
                raise RecipeError(f"columns: a task has no part '{part}'{nearest(str(part), PARTS)}")
        if "prompt" not in self.columns and self.environment is None:
            raise RecipeError("columns: name the column of the prompt, as in {prompt: problem}.")

    def fields(self, known: Sequence[str], where: str) -> list[str]:
        """The columns to read of those a file has."""
        wanted = {path.partition(".")[0] for path in self.columns.values()}
        for column in sorted(wanted - set(known)):
            raise TaskError(f"{where}: there is no column '{column}'{nearest(column, list(known), cutoff=0.7)}")
        return sorted(wanted)

    def task(self, row: Mapping[str, Any], name: str, place: Place) -> Task:
        parts = {part: _reach(row, path, place) for part, path in self.columns.items()}
        _check_texts([parts.get(part) for part in ("id", "answer", "demonstration", "category", "type")], place)
        media = {kind: self._media(part, kind, parts, place) for part, kind in MEDIA.items() if part in self.columns}
        if "prompt" in parts:
            prompt = parts["prompt"]
            messages = messages_of([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, place)
            messages = (put_first if self.media_first else fill_placeholders)(messages, media, place)
            _check_last(messages, place)
        else:  # the environment that plays the row has its own text
            shown = tuple(medium for several in media.values() for medium in several)
            messages = (Message("user", shown),) if shown else ()
        if self.instruction and messages:
            messages = (*messages[:-1], Message(messages[-1].role, (*messages[-1].content, Text(self.instruction))))
        if self.system:
            messages = (system(self.system), *messages)
        return Task(
            id=self.id_in(row, name, place),
            messages=messages,
            answer=parts.get("answer"),
            environment=self.environment,
            demonstration=_demonstration(parts.get("demonstration"), place),
            metadata={key: str(parts[key]) for key in ("category", "type") if parts.get(key) is not None},
        )

    def id_in(self, row: Mapping[str, Any], name: str, place: Place) -> str:
        """The id of a row's task."""
        given = _reach(row, self.columns["id"], place) if "id" in self.columns else None
        return name if given is None else str(given)

    def unread(self, row: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
        """The columns that no part of a task reads, with what a row has in them; inside of objects too."""
        for column, value in row.items():
            path = f"{within}{column}"
            if path in self.columns.values():
                continue
            inside = any(wanted.startswith(f"{path}.") for wanted in self.columns.values())
            if isinstance(value, Mapping) and (inside or not value.keys() & {"bytes", "path"}):
                yield from self.unread(value, f"{path}.")
            else:
                yield path, value

    @staticmethod
    def _media(part: str, kind: MediaKind, parts: Mapping[str, Any], place: Place) -> list[Media]:
        held = parts[part]
        sources = [] if held is None else held if isinstance(held, list | tuple) else [held]
        if kind == "picture":
            return [place.picture(source, f"picture {i}") for i, source in enumerate(sources)]
        trim = {key: parts[key] for key in TRIM if parts.get(key) is not None}
        return [place.clip(kind, source, f"{kind} {i}", trim) for i, source in enumerate(sources)]


def layout_of(
    columns: Mapping[str, str] | None = None,
    instruction: str = "",
    system: str = "",
    media_first: bool = False,
    environments: Mapping[str, str] | None = None,
    environment: Mapping[str, Any] | None = None,
) -> "TaskRows | FlatRows":
    """The layout that a source's options ask for."""
    played_in = None
    if environment is not None:
        if not isinstance(environment, Mapping) or "name" not in environment:
            raise RecipeError(
                f"environment: name the one that rows are played in, as in {{name: tools}}, not {environment!r:.60}."
            )
        for key in environment:
            if key not in ("name", "options"):
                raise RecipeError(f"environment: unknown key '{key}'{nearest(str(key), ['name', 'options'])}")
        played_in = EnvironmentSpec(str(environment["name"]), dict(environment.get("options") or {}))
        check("environment", played_in.name, "environment")
        _, problem = wrong_options("environment", played_in.name, played_in.options)
        if problem:
            raise RecipeError(f"environment: {problem}")
    if columns is not None:
        if environments:
            raise RecipeError("environments is for rows that are tasks; flat rows (columns) name no environment.")
        return FlatRows(columns, instruction, system, media_first, played_in)
    if instruction or system or media_first:
        raise RecipeError("instruction, system and media_first are for flat rows; map their columns with 'columns'.")
    for name, place in (environments or {}).items():
        check("environment", str(place), f"environments.{name}")
    return TaskRows(environments or {}, played_in)


def placeholder_notes(tasks: Sequence[Task]) -> Iterator[tuple[str, list[str], str]]:
    """Each placeholder that stays literal text, the ids of the tasks that have it, and what to change."""
    found: dict[str, list[str]] = {}
    for task in tasks:
        for tag in literal_placeholders(task.messages):
            found.setdefault(tag, []).append(task.id)
    for part, kind in MEDIA.items():
        tag = PLACEHOLDERS[kind]
        if tag in found:
            advice = (
                f"the model sees {tag} as literal text, because no {kind} comes with these tasks. Name the column that "
                f"holds them in the source's options, columns: {{{part}: COLUMN}}; a row that is a task has a block "
                f"{{type: {tag[1:-1]}, path: FILE}} instead. If the text is meant as it is, nothing needs to change"
            )
            yield tag, found[tag], advice


def unread_notes(source: Any) -> Iterator[str]:
    """A sentence for each column of a source that holds media which no task shows, or that cannot be searched for them."""
    unread: Mapping[str, MediaKind] = getattr(source, "unread_media", dict)()
    for column, kind in unread.items():
        part, tag = next(part for part, known in MEDIA.items() if known == kind), PLACEHOLDERS[kind]
        yield (
            f"the column '{column}' holds {part} and is not read, so the model does not see them. Read it by the source's "
            f"options, columns: {{{part}: {column}}}, with {tag} in prompts where each stands, or media_first: true for "
            "prompts without. If it is left out on purpose, nothing needs to change."
        )
    for column, why in getattr(source, "unsearched", {}).items():
        yield f"the column '{column}' cannot be read ({why}), so whether it holds media that no task shows is unknown."


def _unknown(field: str) -> str:
    return (
        f"unknown field '{field}'{nearest(field, FIELDS, cutoff=0.7)} Fields of your own go under 'metadata'; flat rows "
        "are mapped with 'columns', as in columns: {prompt: question, answer: label, pictures: image}."
    )


def _check_last(messages: tuple[Message, ...], place: Place) -> None:
    if messages and messages[-1].role not in ("user", "tool"):
        raise place.error(
            f"the last message is by '{messages[-1].role}', so nothing is asked. "
            "A worked answer goes under 'demonstration'."
        )


def _check_texts(values: Sequence[Any], place: Place) -> None:
    """Refuse lone surrogates, NaN and infinity in values that are logged later and compared with answers."""
    try:
        json.dumps(values, ensure_ascii=False, default=str, allow_nan=False).encode()
    except (UnicodeEncodeError, ValueError, RecursionError) as error:
        raise place.error(f"it holds a text or a number that cannot be stored: {words(error)}.") from error


def _demonstration(raw: Any, place: Place) -> tuple[str, ...]:
    given = [] if raw is None else [raw] if isinstance(raw, str) else raw
    if not isinstance(given, list | tuple) or not all(isinstance(text, str) for text in given):
        raise place.error(f"'demonstration' must be a text or a list of texts, one a turn, not {raw!r:.60}.")
    return tuple(given)


def _decoded(row: Mapping[str, Any], field: str, place: Place) -> Any:
    """A field that may be JSON text, as in Parquet, where a column has one type."""
    if not isinstance(row[field], str):
        return row[field]
    try:
        return strict_json(row[field])
    except ValueError as error:
        raise place.error(f"'{field}' is text but not JSON: {error}.") from error


def _object(row: Mapping[str, Any], field: str, place: Place) -> Mapping[str, Any]:
    value = _decoded(row, field, place)
    if not isinstance(value, Mapping):
        raise place.error(f"'{field}' must be an object, not {value!r:.60}.")
    return value


def _reach(row: Mapping[str, Any], path: str, place: Place) -> Any:
    value: Any = row
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            known = list(value) if isinstance(value, Mapping) else []
            there = nearest(key, [str(k) for k in known], cutoff=0.7) if known else "."
            raise place.error(f"there is no '{path}' in this row{there}")
        value = value[key]
    return value


class RowOptions(TypedDict, total=False):
    """The options of all sources of rows.

    ``columns``, ``instruction``, ``system`` and ``media_first`` are for flat rows (see ``FlatRows``). Without ``columns`` a
    row is a task with content blocks. ``limit`` takes the first rows only (0: all). ``video`` and ``sound``: how clips
    are decoded (``ClipOptions``). ``environments`` {name: module:Class}: those that rows may name beside the registered
    ones; ``environment`` {name, options}: for rows that name none.
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
    """Also ``media_roots``: folders that may hold media, beside the data's own."""

    media_roots: Sequence[str]

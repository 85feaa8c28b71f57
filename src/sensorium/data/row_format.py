"""How rows are laid out: as tasks with content blocks, or flat, with a mapping from a task's parts to columns."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from sensorium.data.message_parsing import ClipOptions, Place, fill_placeholders, messages_of, put_first
from sensorium.recipe.names import check, resolve, table, wrong_options
from sensorium.vocabulary.content import Media, MediaKind, Message, Text, system
from sensorium.vocabulary.errors import RecipeError, TaskError, nearest
from sensorium.vocabulary.plain import strict_json, words
from sensorium.vocabulary.task import EnvironmentSpec, Task

FIELDS = ["id", "messages", "answer", "environment", "demonstration", "metadata"]
MEDIA: dict[str, MediaKind] = {"pictures": "picture", "videos": "video", "sounds": "sound"}
TRIM = ["start", "end"]
PARTS = ["id", "prompt", *MEDIA, *TRIM, "answer", "demonstration", "category", "type"]


class TaskRows:
    """Rows that are tasks: ``{id, messages, answer, environment, demonstration, metadata}``; unknown fields are refused.

    A row may name a registered environment, or one of ``environments`` {name: module:Class}, which the recipe opens to
    rows. Rows that name none are played in ``environment``, where the recipe names one.
    """

    def __init__(self, environments: Mapping[str, str] | None = None, environment: EnvironmentSpec | None = None) -> None:
        self.environments, self.environment = dict(environments or {}), environment

    def fields(self, known: Sequence[str], where: str) -> list[str]:
        """The columns to read of those a file has."""
        for column in known:
            if column not in FIELDS:
                raise TaskError(f"{where}: {_unknown(column)}")
        return list(known)

    def task(self, row: Mapping[str, Any], name: str, place: Place) -> Task:
        """The task of one row."""
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
            id=str(row.get("id", name)),
            messages=messages,
            answer=row.get("answer"),
            environment=environment,
            demonstration=_demonstration(row.get("demonstration"), place),
            metadata=_object(row, "metadata", place) if "metadata" in row else {},
        )

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
        known = self._known(name, place)
        try:
            _, problem = wrong_options("environment", known, options)
        except RecipeError as error:
            raise place.error(str(error)) from error
        closed = [key for key in options if key in getattr(resolve("environment", known), "recipe_only", ())]
        if closed:
            problem = f"the option '{closed[0]}' of environment '{name}' says what code runs, so only a recipe may set it."
        if problem:
            raise place.error(problem)
        return EnvironmentSpec(known, options, seed)

    def _known(self, name: str, place: Place) -> str:
        """The environment that a row's name stands for. Rows are data: what code is run is said by the recipe alone."""
        if name in self.environments:
            return self.environments[name]
        if name in table("environment"):
            return name
        if ":" in name:
            raise place.error(
                f"the environment '{name:.80}' names code, and a row may not. Name it in the recipe, with the source's "
                "option environments: {maze: my_package.my_module:Maze}, and let rows say maze."
            )
        names = [*table("environment"), *self.environments]
        raise place.error(f"unknown environment '{name:.80}'{nearest(name, names)}")


class FlatRows:
    """Flat rows: ``columns`` says which column holds which part of a task; ``a.b`` reaches into an object.

    The prompt is text or a list of messages; ``<image>``, ``<video>`` and ``<audio>`` in it stand for the next medium of
    the columns ``pictures``, ``videos`` and ``sounds``. ``media_first`` puts them, in this order, before a prompt without
    placeholders. ``start`` and ``end`` (seconds) trim the row's videos and sounds. ``instruction`` ends the last message;
    ``system`` goes before the first. ``type`` says how the answer is compared (see the reward ``accuracy_by_type``).
    Rows that an environment plays may have no prompt.
    """

    def __init__(
        self,
        columns: Mapping[str, str],
        instruction: str,
        system: str,
        media_first: bool,
        environment: EnvironmentSpec | None = None,
    ) -> None:
        for part in columns:
            if part not in PARTS:
                raise RecipeError(f"columns: a task has no part '{part}'{nearest(str(part), PARTS)}")
        if "prompt" not in columns and environment is None:
            raise RecipeError("columns: say which column holds the prompt, as in {prompt: problem}.")
        self.columns = dict(columns)
        self.instruction, self.system, self.media_first = instruction, system, media_first
        self.environment = environment

    def fields(self, known: Sequence[str], where: str) -> list[str]:
        """The columns to read of those a file has."""
        wanted = {path.partition(".")[0] for path in self.columns.values()}
        for column in sorted(wanted - set(known)):
            raise TaskError(f"{where}: there is no column '{column}'{nearest(column, list(known))}")
        return sorted(wanted)

    def task(self, row: Mapping[str, Any], name: str, place: Place) -> Task:
        """The task of one row."""
        parts = {part: _reach(row, path, place) for part, path in self.columns.items()}
        _check_texts([parts.get(part) for part in ("id", "answer", "demonstration", "category", "type")], place)
        media = {kind: self._media(part, kind, parts, place) for part, kind in MEDIA.items() if part in self.columns}
        messages = self._messages(parts["prompt"], media, place) if "prompt" in parts else _only_media(media)
        if self.instruction and messages:
            messages = (*messages[:-1], Message(messages[-1].role, (*messages[-1].content, Text(self.instruction))))
        if self.system:
            messages = (system(self.system), *messages)
        return Task(
            id=str(parts.get("id") if parts.get("id") is not None else name),
            messages=messages,
            answer=parts.get("answer"),
            environment=self.environment,
            demonstration=_demonstration(parts.get("demonstration"), place),
            metadata={key: str(parts[key]) for key in ("category", "type") if parts.get(key) is not None},
        )

    def _messages(self, prompt: Any, media: Mapping[MediaKind, list[Media]], place: Place) -> tuple[Message, ...]:
        messages = messages_of([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, place)
        messages = put_first(messages, media, place) if self.media_first else fill_placeholders(messages, media, place)
        _check_last(messages, place)
        return messages

    @staticmethod
    def _media(part: str, kind: MediaKind, parts: Mapping[str, Any], place: Place) -> list[Media]:
        held = parts[part]
        sources = [] if held is None else held if isinstance(held, list | tuple) else [held]
        if kind == "picture":
            return [place.picture(source, f"picture {i}") for i, source in enumerate(sources)]
        trim = {key: parts[key] for key in TRIM if parts.get(key) is not None}
        return [place.clip(kind, source, f"{kind} {i}", trim) for i, source in enumerate(sources)]


def _only_media(media: Mapping[MediaKind, list[Media]]) -> tuple[Message, ...]:
    """The messages of a row without a prompt: the environment that plays it has its own words."""
    shown = tuple(medium for several in media.values() for medium in several)
    return (Message("user", shown),) if shown else ()


def layout_of(
    columns: Mapping[str, str] | None,
    instruction: str = "",
    system: str = "",
    media_first: bool = False,
    environments: Mapping[str, str] | None = None,
    environment: Mapping[str, Any] | None = None,
) -> "TaskRows | FlatRows":
    """The layout that a source's options ask for."""
    played_in = _spec(environment) if environment is not None else None
    if columns is not None:
        if environments:
            raise RecipeError("environments is for rows that are tasks; flat rows (columns) name no environment.")
        return FlatRows(columns, instruction, system, media_first, played_in)
    if instruction or system or media_first:
        raise RecipeError(
            "instruction, system and media_first are for flat rows; say which column is which with 'columns'."
        )
    for name, place in (environments or {}).items():
        check("environment", str(place), f"environments.{name}")
    return TaskRows(environments, played_in)


def _spec(environment: Mapping[str, Any]) -> EnvironmentSpec:
    """The environment that a recipe names for all rows: {name, options}."""
    if not isinstance(environment, Mapping) or "name" not in environment:
        raise RecipeError(
            f"environment: name the one that rows are played in, as in {{name: tools}}, not {environment!r:.60}."
        )
    for key in environment:
        if key not in ("name", "options"):
            raise RecipeError(f"environment: unknown key '{key}'{nearest(str(key), ['name', 'options'])}")
    name, options = str(environment["name"]), environment.get("options") or {}
    check("environment", name, "environment")
    _, problem = wrong_options("environment", name, options)
    if problem:
        raise RecipeError(f"environment: {problem}")
    return EnvironmentSpec(name, dict(options))


def _unknown(field: str) -> str:
    return (
        f"unknown field '{field}'{nearest(field, FIELDS, cutoff=0.7)} What is your own goes under 'metadata'; for flat "
        "rows say which column is which with 'columns', as in columns: {prompt: question, answer: label, pictures: image}."
    )


def _check_last(messages: tuple[Message, ...], place: Place) -> None:
    if messages and messages[-1].role not in ("user", "tool"):
        raise place.error(
            f"the last message is by '{messages[-1].role}', so nothing is asked. "
            "A worked answer goes under 'demonstration'."
        )


def _check_texts(values: Sequence[Any], place: Place) -> None:
    """Refuse half a surrogate pair, NaN and infinity in what is logged later and compared with answers."""
    try:
        json.dumps(values, ensure_ascii=False, default=str, allow_nan=False).encode()
    except (UnicodeEncodeError, ValueError, RecursionError) as error:
        raise place.error(f"it holds a text or a number that cannot be written down: {words(error)}.") from error


def _demonstration(raw: Any, place: Place) -> tuple[str, ...]:
    given = [] if raw is None else [raw] if isinstance(raw, str) else raw
    if not isinstance(given, list | tuple) or not all(isinstance(text, str) for text in given):
        raise place.error(f"'demonstration' must be a text or a list of texts, one a turn, not {raw!r:.60}.")
    return tuple(given)


def _decoded(row: Mapping[str, Any], field: str, place: Place) -> Any:
    """A field that may be kept as JSON text, which is how Parquet holds values of mixed types."""
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
            raise place.error(f"there is no '{path}' in this row{nearest(key, [str(k) for k in known])}")
        value = value[key]
    return value


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

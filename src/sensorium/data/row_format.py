"""How rows are laid out: as tasks with content blocks, or flat, with a mapping from a task's parts to columns."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from sensorium.data.message_parsing import (
    PLACEHOLDERS,
    Place,
    fill_placeholders,
    literal_placeholders,
    messages_of,
    put_first,
)
from sensorium.recipe.registry import check, resolve, table, wrong_options
from sensorium.vocabulary.content import Media, MediaKind, Message, Text, system
from sensorium.vocabulary.errors import RecipeError, TaskError, nearest
from sensorium.vocabulary.plain import strict_json, words
from sensorium.vocabulary.task import EnvironmentSpec, Task

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
        """The task of one row."""
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

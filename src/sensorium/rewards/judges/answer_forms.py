"""The form of a judge's answer: how its text is read, strictly, after a repair that cannot change what it means."""

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from typing import Any, Protocol

from sensorium.vocabulary.plain import number_of, shown, whole_of

# only_json("Sure! ```json\n{'score': 0.5,}\n```") → {"score": 0.5} Repaired are fences, trailing commas and single
# quotes, which cannot change what was meant. Nothing is guessed: two values that differ, a key that is given twice, NaN
# and infinity are no answer (ValueError).


FENCE = re.compile(r"```[a-zA-Z]*\s*\n?(.*?)```", re.DOTALL)
THOUGHT = re.compile(r"^.*</think>", re.DOTALL)
TRAILING_COMMA = re.compile(r",(\s*[}\]])")


class AmbiguousJson(ValueError):
    """JSON that can be read in two ways; repair must not choose one."""


def only_object(text: str) -> dict[str, Any]:
    """The one JSON value of a text, which must be an object."""
    found = only_json(text)
    if not isinstance(found, dict):
        raise ValueError("the answer is no JSON object")
    return found


def only_json(text: str) -> Any:
    """The one JSON value of a text, an object or a list."""
    said = THOUGHT.sub("", text).strip()
    fenced = [block.strip() for block in FENCE.findall(said)]
    for candidate in (said, *(fenced[:1] if len(fenced) == 1 else [])):
        found = _loaded(candidate)
        if found is not None:
            return found
    spans = _balanced(said)
    values = [value for value in map(_loaded, spans) if value is not None]
    if len(values) == 1 or (values and all(value == values[0] for value in values)):
        return values[0]
    raise ValueError(
        "the answer holds several JSON values" if values else "the answer holds no JSON value that can be read"
    )


def _loaded(text: str) -> Any:
    if not text or text[0] not in "{[":
        return None
    for attempt in (text, TRAILING_COMMA.sub(r"\1", text)):
        try:
            return json.loads(attempt, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_keys_once)
        except AmbiguousJson:
            raise
        except (ValueError, RecursionError):
            pass
    if len(text) > 100_000:
        return None
    try:
        tree = ast.parse(text, mode="eval")
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                _keys_once([(getattr(key, "value", None), None) for key in node.keys])
        found = ast.literal_eval(tree)  # single quotes, True, None
        json.dumps(found, allow_nan=False)  # of Python's values only those that JSON has too
    except AmbiguousJson:
        raise
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None
    return found if isinstance(found, dict | list) else None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _finite(digits: str) -> float:
    if not isfinite(number := float(digits)):
        raise AmbiguousJson(f"{digits[:40]} is too large for a number")
    return number


def _keys_once(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise AmbiguousJson(f"the key '{twice}' is given twice")
    return found


def _balanced(text: str) -> list[str]:
    """The outermost {...} and [...] of a text, quotes respected."""
    spans: list[str] = []
    stack: list[str] = []
    start, quoted, escaped = 0, False, False
    for i, char in enumerate(text):
        if quoted:
            escaped, quoted = (char == "\\" and not escaped), not (char == '"' and not escaped)
        elif char == '"' and stack:
            quoted = True
        elif char in "{[":
            if not stack:
                start = i
            stack.append("}" if char == "{" else "]")
        elif stack and char == stack[-1]:
            stack.pop()
            if not stack:
                spans.append(text[start : i + 1])
    return spans


# JsonAnswer({"score": Number(0, 1)}).parse('Sure! ```json\n{"score": 0.5,}\n```') → {"score": 0.5}
# LetterAnswer("ABCD").parse("The answer is **B**.") → "B" RankingAnswer(3).parse("[2, 3, 1]") → (2, 0, 1): the place of
# each candidate, counted from 0 Whatever is not in its form raises ValueError with what is wrong, in words that can be
# sent back to the judge. An answer is never guessed: a ranking with an unknown or repeated candidate, or two different
# letters, is no answer.


class AnswerForm(Protocol):
    """How an answer is read. ``identity`` is part of what a judgement is known by."""

    @property
    def identity(self) -> str: ...

    def parse(self, text: str) -> Any:
        """The answer; ValueError says what is wrong with it."""
        ...

    def schema(self) -> dict[str, Any] | None:
        """The JSON schema of the answer, for endpoints that hold a model to one; None for plain text."""
        ...


@dataclass(frozen=True)
class FreeText:
    """Any text that is not empty."""

    @property
    def identity(self) -> str:
        """As it is."""
        return "text"

    def parse(self, text: str) -> str:
        """The text."""
        if not text.strip():
            raise ValueError("the answer is empty")
        return text

    def schema(self) -> None:
        """None: it is plain text."""


@dataclass(frozen=True)
class Number:
    """A number between two bounds; whole ones only with ``whole``."""

    low: float = float("-inf")
    high: float = float("inf")
    whole: bool = False

    def read(self, value: Any) -> float | int:
        """The number."""
        if isinstance(value, bool | str) or value is None:
            raise ValueError(f"{shown(value)} is no number")
        number = whole_of(value) if self.whole else number_of(value)
        if not self.low <= number <= self.high:
            raise ValueError(f"{number:g} is not between {self.low:g} and {self.high:g}")
        return number

    def schema(self) -> dict[str, Any]:
        """As JSON schema has it."""
        bounds = {"minimum": self.low, "maximum": self.high}
        kept = {key: bound for key, bound in bounds.items() if abs(bound) != float("inf")}
        return {"type": "integer" if self.whole else "number", **kept}


@dataclass(frozen=True)
class OneOf:
    """One of several texts or numbers."""

    choices: tuple[Any, ...]

    def read(self, value: Any) -> Any:
        """The choice."""
        for choice in self.choices:
            if type(value) is type(choice) and value == choice:
                return choice
        raise ValueError(f"{shown(value)} is none of {', '.join(map(str, self.choices))}")

    def schema(self) -> dict[str, Any]:
        """As JSON schema has it."""
        return {"enum": list(self.choices)}


@dataclass(frozen=True)
class Words:
    """A text, such as a reason."""

    def read(self, value: Any) -> str:
        """The text."""
        if not isinstance(value, str):
            raise ValueError(f"{shown(value)} is no text")
        return value

    def schema(self) -> dict[str, Any]:
        """As JSON schema has it."""
        return {"type": "string"}


Field = Number | OneOf | Words


@dataclass(frozen=True)
class JsonAnswer:
    """One JSON object with these fields, all of them; further keys only with ``extra``."""

    fields: Mapping[str, Field]
    extra: bool = True

    @property
    def identity(self) -> str:
        """The schema as text."""
        return json.dumps(self.schema(), sort_keys=True)

    def parse(self, text: str) -> dict[str, Any]:
        """The fields by name."""
        found = only_object(text)
        if missing := [name for name in self.fields if name not in found]:
            raise ValueError(f"the object lacks '{missing[0]}'")
        if not self.extra and (more := [name for name in found if name not in self.fields]):
            raise ValueError(f"the object has the key '{more[0]}', which was not asked for")
        answer = {}
        for name, field_ in self.fields.items():
            try:
                answer[name] = field_.read(found[name])
            except ValueError as error:
                raise ValueError(f"'{name}': {error}") from error
        return answer

    def schema(self) -> dict[str, Any]:
        """As JSON schema has it."""
        properties = {name: field_.schema() for name, field_ in self.fields.items()}
        return {
            "type": "object",
            "properties": properties,
            "required": list(self.fields),
            "additionalProperties": self.extra,
        }


@dataclass(frozen=True)
class LetterAnswer:
    """One letter of ``letters``: alone, in ``<answer>``, after "answer", or the only one that stands by itself.

    ``first``: the first character that is a letter of them counts, as CapRL reads answers.
    """

    letters: str = "ABCD"
    first: bool = False

    @property
    def identity(self) -> str:
        """Which letters."""
        return f"letter {self.letters}{' first' if self.first else ''}"

    def parse(self, text: str) -> str:
        """The letter, in upper case."""
        said = THOUGHT.sub("", text).strip()
        if self.first:
            found = next((c for c in said.upper() if c.isalpha()), "")
            if found and found in self.letters:
                return found
            raise ValueError(f"the answer does not begin with one of the letters {self.letters}")
        one = f"([{re.escape(self.letters)}])"
        for pattern in (rf"<answer>\s*{one}\b.*?</answer>", rf"answer(?:\s+is)?\s*:?\s*[*(\s]*{one}\b", rf"\b{one}\b"):
            letters = {letter.upper() for letter in re.findall(pattern, said, re.IGNORECASE | re.DOTALL)}
            if pattern == rf"\b{one}\b":  # of single letters only capitals: "a cat" names no option
                alone = {said.upper()} if len(said) == 1 and said.upper() in self.letters else set()
                letters = set(re.findall(pattern, said)) or alone
            if len(letters) == 1:
                return letters.pop()
            if letters:
                raise ValueError(f"the answer names several letters: {', '.join(sorted(letters))}")
        raise ValueError(f"the answer is none of the letters {self.letters}")

    def schema(self) -> None:
        """None: it is plain text."""


@dataclass(frozen=True)
class RankingAnswer:
    """A ranking of ``count`` candidates, the best first: a JSON list of their numbers from 1, or ``{"ranking": […]}``.

    Candidates that were left out are None in the answer with ``partial``; else every one must be there.
    """

    count: int
    partial: bool = False
    key: str = field(default="ranking")

    @property
    def identity(self) -> str:
        """How many, and whether all."""
        return f"ranking {self.count}{' partial' if self.partial else ''}"

    def parse(self, text: str) -> tuple[int | None, ...]:
        """The place of each candidate among those that were ranked, counted from 0."""
        found = only_json(text)
        listed = found.get(self.key) if isinstance(found, dict) else found
        if not isinstance(listed, list):
            raise ValueError(f'the answer is no list of candidates; write {{"{self.key}": [best, …, worst]}}')
        ranked = [_candidate(entry) for entry in listed]
        if strange := [number for number in ranked if not 1 <= number <= self.count]:
            raise ValueError(f"there is no candidate {strange[0]}; they are numbered from 1 to {self.count}")
        if len(set(ranked)) != len(ranked):
            raise ValueError("a candidate is ranked twice")
        if not ranked or (len(ranked) < self.count and not self.partial):
            missing = sorted(set(range(1, self.count + 1)) - set(ranked))
            raise ValueError(f"candidate {missing[0]} is not ranked")
        places: list[int | None] = [None] * self.count
        for place, number in enumerate(ranked):
            places[number - 1] = place
        return tuple(places)

    def schema(self) -> dict[str, Any]:
        """As JSON schema has it."""
        numbers = {"type": "integer", "minimum": 1, "maximum": self.count}
        listed = {"type": "array", "items": numbers, "minItems": 1 if self.partial else self.count, "maxItems": self.count}
        return {"type": "object", "properties": {self.key: listed}, "required": [self.key]}


def _candidate(entry: Any) -> int:
    if isinstance(entry, str) and (digits := re.fullmatch(r"\D*?(\d{1,4})\D*", entry.strip())):
        return int(digits.group(1))
    try:
        return whole_of(entry)
    except ValueError:
        raise ValueError(f"{shown(entry)} is no candidate's number") from None


# rubric = SchemaAnswer({"type": "object", "properties": {"truth": {"type": "number", "minimum": 0, "maximum": 1}},
# "required": ["truth"]}) rubric.parse('{"truth": 0.5}') → {"truth": 0.5} rubric.parse('{"truth": "0.5"}') ValueError:
# 'truth': '0.5' is not a number The keywords in ``CHECKED`` mean what JSON Schema (2020-12) says. Those in ``NOTES``
# say nothing about an answer. Any other keyword is refused when the schema is read, because an answer would not be held
# to it.


NOTES = ("title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions")
TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: TYPES["number"](value) and isfinite(value) and value == int(value),
}
WORDS = {
    "object": "an object", "array": "a list", "string": "a text", "boolean": "true or false", "null": "null",
    "number": "a number", "integer": "a whole number",
}  # fmt: skip
DEEPEST = 64


@dataclass(frozen=True)
class SchemaAnswer:
    """One JSON object that holds to ``given``, a JSON schema; ValueError where the schema itself cannot be held to."""

    given: Mapping[str, Any]

    def __post_init__(self) -> None:
        refuse_schema(self.given)
        if self.given.get("type") != "object":
            raise ValueError('a judge answers with one object: the schema\'s "type" must be "object"')

    @cached_property
    def identity(self) -> str:
        """The schema as text."""
        return json.dumps(self.given, sort_keys=True)

    def parse(self, text: str) -> dict[str, Any]:
        """The object."""
        found = only_object(text)
        _check(found, self.given, self.given, "", 0)
        return found

    def schema(self) -> dict[str, Any]:
        """As it was given."""
        return dict(self.given)

    def bounds(self, name: str) -> tuple[float, float]:
        """Between which numbers a field of the object lies, always; ValueError says why it might not be there or not so."""
        field = self.given.get("properties", {}).get(name)
        if field is None or name not in self.given.get("required", ()):
            raise ValueError(f"the schema has no field '{name}' among its properties that is also among required")
        field = _resolved(field, self.given)
        if field.get("type") == "boolean":
            return 0.0, 1.0
        listed = field.get("enum", [field["const"]] if "const" in field else None)
        if listed is not None and all(TYPES["number"](each) for each in listed):
            return float(min(listed)), float(max(listed))
        low = field.get("minimum", field.get("exclusiveMinimum"))
        high = field.get("maximum", field.get("exclusiveMaximum"))
        if field.get("type") not in ("number", "integer") or low is None or high is None:
            raise ValueError(
                f"the field '{name}' must be a number or integer with minimum and maximum, a boolean, or one of several "
                "numbers (enum): a judge's number without bounds could outweigh all others"
            )
        return float(low), float(high)


def strict(schema: Mapping[str, Any]) -> bool:
    """True if every object of a schema requires all of its fields and takes no others, as ``strict`` asks for."""
    nodes = [*_nodes(schema)]
    objects = [node for node in nodes if "properties" in node or node.get("type") == "object"]
    return all(
        node.get("additionalProperties") is False and set(node.get("required", ())) == set(node.get("properties", {}))
        for node in objects
    )


def refuse_schema(schema: Any) -> None:
    """ValueError for a schema that has a keyword or a value that is not held to here."""
    for node in _nodes(schema):
        for keyword, value in node.items():
            if keyword in NOTES:
                continue
            if keyword not in CHECKED:
                raise ValueError(
                    f"the keyword '{keyword}' of JSON schemas is not checked here, so answers would not be held to it; "
                    f"remove it. Checked are {', '.join(CHECKED)}"
                )
            wanted, takes = CHECKED[keyword]
            if not takes(value):
                raise ValueError(f"the keyword '{keyword}' of a JSON schema is {wanted}, not {shown(value)}")
        if "$ref" in node:
            _resolved(node, schema)


def _check(value: Any, schema: Any, root: Mapping[str, Any], place: str, depth: int) -> None:
    """ValueError where a value does not hold to a schema; ``place`` is where in the answer it stands."""
    if depth > DEEPEST:
        raise ValueError(_at(place, f"the answer, or the schema, is nested more than {DEEPEST} deep"))
    if schema is True:
        return
    if schema is False:
        raise ValueError(_at(place, "was not asked for"))
    if "$ref" in schema:
        _check(value, _resolved(schema, root), root, place, depth + 1)
    if "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if not any(TYPES[kind](value) for kind in kinds):
            raise ValueError(_at(place, f"{shown(value)} is not {' or '.join(WORDS[kind] for kind in kinds)}"))
    if "enum" in schema and not any(_same(value, each) for each in schema["enum"]):
        raise ValueError(_at(place, f"{shown(value)} is none of {', '.join(json.dumps(e) for e in schema['enum'])}"))
    if "const" in schema and not _same(value, schema["const"]):
        raise ValueError(_at(place, f"{shown(value)} is not {json.dumps(schema['const'])}"))
    _check_size(value, schema, place)
    if isinstance(value, dict):
        _check_object(value, schema, root, place, depth)
    if isinstance(value, list):
        for i, item in enumerate(value):
            _check(item, schema.get("items", True), root, f"{place}[{i}]", depth + 1)
        if schema.get("uniqueItems") and any(_same(a, b) for i, a in enumerate(value) for b in value[:i]):
            raise ValueError(_at(place, "an item is there twice"))
    for each in schema.get("allOf", ()):
        _check(value, each, root, place, depth + 1)
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            problems = [_problem(value, each, root, place, depth + 1) for each in schema[keyword]]
            fitting = problems.count("")
            if not fitting:
                raise ValueError(problems[-1])
            if keyword == "oneOf" and fitting > 1:
                raise ValueError(_at(place, f"{shown(value)} fits {fitting} of the forms that exclude each other"))


def _check_object(value: dict[str, Any], schema: Mapping[str, Any], root: Any, place: str, depth: int) -> None:
    for name in schema.get("required", ()):
        if name not in value:
            raise ValueError(_at(place, f"the object lacks '{name}'"))
    properties, more = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name, item in value.items():
        inside = f"{place}.{name}" if place else str(name)
        _check(item, properties.get(name, more), root, inside, depth + 1)


def _check_size(value: Any, schema: Mapping[str, Any], place: str) -> None:
    """Bounds of numbers, and lengths of texts and lists."""
    if TYPES["number"](value):
        for keyword, fits, words in (
            ("minimum", lambda bound: value >= bound, "below"),
            ("maximum", lambda bound: value <= bound, "above"),
            ("exclusiveMinimum", lambda bound: value > bound, "not above"),
            ("exclusiveMaximum", lambda bound: value < bound, "not below"),
        ):
            if keyword in schema and not fits(schema[keyword]):
                raise ValueError(_at(place, f"{value:g} is {words} {schema[keyword]:g}"))
    for kind, least, most, what in ((str, "minLength", "maxLength", "characters"), (list, "minItems", "maxItems", "items")):
        if isinstance(value, kind) and not schema.get(least, 0) <= len(value) <= schema.get(most, float("inf")):
            raise ValueError(
                _at(
                    place,
                    f"it has {len(value)} {what}, and {schema.get(least, 0)} to {schema.get(most, 'any number')} may be",
                )
            )


def _problem(value: Any, schema: Any, root: Mapping[str, Any], place: str, depth: int) -> str:
    try:
        _check(value, schema, root, place, depth)
    except ValueError as error:
        return str(error)
    return ""


def _at(place: str, problem: str) -> str:
    return f"'{place}': {problem}" if place else problem


def _same(value: Any, other: Any) -> bool:
    """Equal as JSON has it: 1 and 1.0 are one number, 1 and true are not the same."""
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_same, value, other))
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_same(value[key], other[key]) for key in value)
    return bool(value == other)


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """What a schema's ``$ref`` names inside the same schema; a schema without one is itself."""
    seen: list[str] = []
    current: Any = schema
    while isinstance(current, Mapping) and "$ref" in current:
        name = current["$ref"]
        if name in seen:
            raise ValueError(f"the schema's $ref '{name}' leads back to itself")
        seen.append(name)
        found: Any = root
        for part in name.removeprefix("#").strip("/").split("/") if name != "#" else ():
            found = found.get(part) if isinstance(found, Mapping) and name.startswith("#/") else None
        if not isinstance(found, Mapping | bool):
            raise ValueError(f"the schema's $ref is '{name}'; it must name a place in the schema, such as #/$defs/Part")
        current = found
    return current


def _nodes(schema: Any) -> list[Mapping[str, Any]]:
    """Every schema inside a schema, itself first; ValueError for what is none."""
    if isinstance(schema, bool):
        return []
    if not isinstance(schema, Mapping):
        raise ValueError(f"a JSON schema is an object, not {shown(schema)}")
    found = [schema]
    for keyword in ("properties", "$defs", "definitions"):
        inside = schema.get(keyword, {})
        if not isinstance(inside, Mapping):
            raise ValueError(f"the keyword '{keyword}' of a JSON schema is an object of schemas, not {shown(inside)}")
        found += [node for each in inside.values() for node in _nodes(each)]
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            found += _nodes(schema[keyword])
    for keyword in ("anyOf", "oneOf", "allOf"):
        inside = schema.get(keyword, [])
        if not isinstance(inside, list):
            raise ValueError(f"the keyword '{keyword}' of a JSON schema is a list of schemas, not {shown(inside)}")
        found += [node for each in inside for node in _nodes(each)]
    return found


def _is_kind(value: Any) -> bool:
    kinds = value if isinstance(value, list) else [value]
    return bool(kinds) and all(isinstance(kind, str) and kind in TYPES for kind in kinds)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


_NUMBER = ("a number", TYPES["number"])
_COUNT = ("a whole number from 0", _is_count)
_ANY = ("anything", lambda _: True)
CHECKED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "type": (f"one or several of {', '.join(TYPES)}", _is_kind),
    "enum": ("a list that is not empty", lambda value: isinstance(value, list) and bool(value)),
    "const": _ANY,
    "properties": _ANY,
    "required": ("a list of names", _are_names),
    "additionalProperties": _ANY,
    "items": _ANY,
    "minItems": _COUNT,
    "maxItems": _COUNT,
    "uniqueItems": ("true or false", TYPES["boolean"]),
    "minLength": _COUNT,
    "maxLength": _COUNT,
    "minimum": _NUMBER,
    "maximum": _NUMBER,
    "exclusiveMinimum": _NUMBER,
    "exclusiveMaximum": _NUMBER,
    "anyOf": ("a list that is not empty", bool),
    "oneOf": ("a list that is not empty", bool),
    "allOf": ("a list that is not empty", bool),
    "$ref": ("a text", TYPES["string"]),
}
"""Keywords that answers are held to, with what each takes."""

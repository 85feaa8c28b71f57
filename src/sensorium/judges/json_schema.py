"""Answers held to a JSON schema that the user gives: one JSON object, checked here whatever the endpoint promised.

    rubric = SchemaAnswer({"type": "object", "properties": {"truth": {"type": "number", "minimum": 0, "maximum": 1}},
                           "required": ["truth"]})
    rubric.parse('{"truth": 0.5}')     → {"truth": 0.5}
    rubric.parse('{"truth": "0.5"}')   ValueError: 'truth': '0.5' is not a number

The keywords in ``CHECKED`` mean what JSON Schema (2020-12) says. Those in ``NOTES`` say nothing about an answer. Any other
keyword is refused when the schema is read, because an answer would not be held to it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Any

from sensorium.judges.json_text import only_object
from sensorium.vocabulary.plain import shown

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

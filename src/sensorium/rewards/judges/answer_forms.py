"""The form of a judge's answer: how its text is read, strictly, after a repair that cannot change what it means.

    JsonAnswer({"score": Number(0, 1)}).parse('Sure! ```json\n{"score": 0.5,}\n```')     → {"score": 0.5}
    RankingAnswer(3).parse("[2, 3, 1]")     → (2, 0, 1): the rank of each candidate, counted from 0
    SchemaAnswer({"type": "object", "properties": {"truth": {"type": "number"}}, "required": ["truth"]})
        .parse('{"truth": "0.5"}')          → ValueError: 'truth': '0.5' is not of type 'number'

Fences, trailing commas and single quotes are repaired. Nothing is guessed: two values that differ, a key that is given
twice, NaN, infinity, an unknown or repeated candidate are a ValueError, whose text can be sent back to the judge.
"""

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Any, Protocol

from sensorium.vocabulary.json_schema import KEYWORDS, misfit, subschemas, validator_of
from sensorium.vocabulary.plain import number_of, shown, whole_of

FENCE = re.compile(r"```[a-zA-Z]*\s*\n?(.*?)```", re.DOTALL)
THOUGHT = re.compile(r"^.*</think>", re.DOTALL)
TRAILING_COMMA = re.compile(r",(\s*[}\]])")


class AmbiguousJson(ValueError):
    """JSON that can be read in two ways; repair must not choose one."""


def _only_object(text: str) -> dict[str, Any]:
    found = only_json(text)
    if not isinstance(found, dict):
        raise ValueError("the answer is no JSON object")
    return found


def only_json(text: str) -> Any:
    """The one JSON value of a text, an object or a list."""
    answer = THOUGHT.sub("", text).strip()
    fenced = [block.strip() for block in FENCE.findall(answer)]
    for candidate in (answer, *(fenced if len(fenced) == 1 else [])):
        found = _loaded(candidate)
        if found is not None:
            return found
    values = [value for value in map(_loaded, _balanced(answer)) if value is not None]
    if values and all(value == values[0] for value in values):
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


class AnswerForm(Protocol):
    """How an answer is read. ``identity`` is part of the key of a judgement."""

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

    identity = "text"

    def parse(self, text: str) -> str:
        if not text.strip():
            raise ValueError("the answer is empty")
        return text

    def schema(self) -> None:
        return None


@dataclass(frozen=True)
class Number:
    """A number between two bounds."""

    low: float = float("-inf")
    high: float = float("inf")

    def read(self, value: Any) -> float:
        """The number in a JSON value; ValueError otherwise."""
        if isinstance(value, bool | str) or value is None:
            raise ValueError(f"{shown(value)} is no number")
        number = number_of(value)
        if not self.low <= number <= self.high:
            raise ValueError(f"{number:g} is not between {self.low:g} and {self.high:g}")
        return number

    def schema(self) -> dict[str, Any]:
        bounds = {"minimum": self.low, "maximum": self.high}
        kept = {key: bound for key, bound in bounds.items() if abs(bound) != float("inf")}
        return {"type": "number", **kept}


@dataclass(frozen=True)
class OneOf:
    """One of several texts or numbers."""

    choices: tuple[Any, ...]

    def read(self, value: Any) -> Any:
        """The choice that a JSON value is; ValueError otherwise."""
        for choice in self.choices:
            if type(value) is type(choice) and value == choice:
                return choice
        raise ValueError(f"{shown(value)} is none of {', '.join(map(str, self.choices))}")

    def schema(self) -> dict[str, Any]:
        return {"enum": list(self.choices)}


@dataclass(frozen=True)
class JsonAnswer:
    """One JSON object with these fields, all of them; further keys are ignored."""

    fields: Mapping[str, Number | OneOf]

    @property
    def identity(self) -> str:
        return json.dumps(self.schema(), sort_keys=True)

    def parse(self, text: str) -> dict[str, Any]:
        found = _only_object(text)
        if missing := [name for name in self.fields if name not in found]:
            raise ValueError(f"the object lacks '{missing[0]}'")
        answer = {}
        for name, field in self.fields.items():
            try:
                answer[name] = field.read(found[name])
            except ValueError as error:
                raise ValueError(f"'{name}': {error}") from error
        return answer

    def schema(self) -> dict[str, Any]:
        properties = {name: field.schema() for name, field in self.fields.items()}
        required = list(self.fields)
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": True}


@dataclass(frozen=True)
class RankingAnswer:
    """A ranking of ``count`` candidates, the best first: a JSON list of their numbers from 1, or ``{"ranking": […]}``.

    Candidates that were left out are None in the answer with ``partial``; else every one must be there.
    """

    count: int
    partial: bool = False

    @property
    def identity(self) -> str:
        return f"ranking {self.count}{' partial' if self.partial else ''}"

    def parse(self, text: str) -> tuple[int | None, ...]:
        """The rank of each candidate among those that were ranked, counted from 0."""
        found = only_json(text)
        listed = found.get("ranking") if isinstance(found, dict) else found
        if not isinstance(listed, list):
            raise ValueError('the answer is no list of candidates; write {"ranking": [best, …, worst]}')
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
        numbers = {"type": "integer", "minimum": 1, "maximum": self.count}
        listed = {"type": "array", "items": numbers, "minItems": 1 if self.partial else self.count, "maxItems": self.count}
        return {"type": "object", "properties": {"ranking": listed}, "required": ["ranking"]}


def _candidate(entry: Any) -> int:
    if isinstance(entry, str) and (digits := re.fullmatch(r"\D*?(\d{1,4})\D*", entry.strip())):
        return int(digits.group(1))
    try:
        return whole_of(entry)
    except ValueError:
        raise ValueError(f"{shown(entry)} is no candidate's number") from None


# Keywords that answers are held to, as JSON Schema 2020-12 has them, and those without effect on an answer.
# A schema with any other is refused.
NOTES = frozenset({"title", "description", "default", "examples", "$schema", "$id", "$comment"})
CHECKED = KEYWORDS | {
    "const", "uniqueItems", "exclusiveMinimum", "exclusiveMaximum", "anyOf", "oneOf", "allOf", "$ref", "$defs",
    "definitions",
}  # fmt: skip
DRAFT = "https://json-schema.org/draft/2020-12/schema"


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
        return json.dumps(self.given, sort_keys=True)

    def parse(self, text: str) -> dict[str, Any]:
        found = _only_object(text)
        if problem := misfit(found, validator_of(_text(self.given), CHECKED)):
            raise ValueError(problem)
        return found

    def schema(self) -> dict[str, Any]:
        return dict(self.given)

    def bounds(self, name: str) -> tuple[float, float]:
        """The least and largest number that a field can be; ValueError if it may be missing or unbounded."""
        field = self.given.get("properties", {}).get(name)
        if field is None or name not in self.given.get("required", ()):
            raise ValueError(f"the schema has no field '{name}' among its properties that is also among required")
        field = _resolved(field, self.given)
        if field.get("type") == "boolean":
            return 0.0, 1.0
        listed = field.get("enum", [field["const"]] if "const" in field else None)
        if listed is not None and all(isinstance(each, int | float) and not isinstance(each, bool) for each in listed):
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
    objects = [node for node in subschemas(schema) if "properties" in node or node.get("type") == "object"]
    return all(
        node.get("additionalProperties") is False and set(node.get("required", ())) == set(node.get("properties", {}))
        for node in objects
    )


def refuse_schema(schema: Any) -> None:
    """ValueError for a schema with a keyword or a value that answers cannot be held to."""
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON schema is an object, not {shown(schema)}")
    for node in subschemas(schema):
        if strange := sorted(map(str, node.keys() - CHECKED - NOTES)):
            raise ValueError(
                f"the keyword '{strange[0]}' of JSON schemas is not checked here, so answers would not be held to it; "
                f"remove it. Checked are {', '.join(sorted(CHECKED))}"
            )
        if node.get("enum") == []:
            raise ValueError("the keyword 'enum' of a JSON schema lists no value, so no answer could fit")
    validator_of(_text(schema), CHECKED)
    for node in subschemas(schema):
        _resolved(node, schema)


def _text(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps({**schema, "$schema": DRAFT})
    except TypeError as error:
        raise ValueError(f"the schema holds what is no JSON: {error}") from error


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """The schema that a ``$ref`` names inside ``root``; a schema without one is itself."""
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

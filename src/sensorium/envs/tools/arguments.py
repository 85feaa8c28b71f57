"""Arguments held against a tool's JSON schema, as far as schemas of tools go: what does not fit, in a sentence.

Types, ``required``, ``enum``, bounds of numbers, texts and lists, ``items`` and ``additionalProperties: false`` are
checked. What else a schema says is left to the tool.
"""

from collections.abc import Mapping
from typing import Any

TYPES: dict[str, tuple[str, Any]] = {
    "object": ("an object", Mapping),
    "array": ("a list", list),
    "string": ("a text", str),
    "number": ("a number", int | float),
    "integer": ("a whole number", int),
    "boolean": ("true or false", bool),
    "null": ("null", type(None)),
}
DEEPEST = 32


def misfit(value: Any, schema: Mapping[str, Any], name: str = "the arguments", depth: int = 0) -> str:
    """What is wrong with a value, in a sentence; empty if it fits."""
    kinds = schema.get("type")
    wanted = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    known = [kind for kind in wanted if kind in TYPES]
    if known and not any(_is(value, kind) for kind in known):
        return f"{name} must be {' or '.join(TYPES[kind][0] for kind in known)}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{name} must be one of {', '.join(map(str, schema['enum']))}"
    if depth > DEEPEST:
        return f"{name} is nested too deeply"
    if isinstance(value, Mapping):
        return _object(value, schema, name, depth)
    if isinstance(value, list):
        return _list(value, schema, name, depth)
    return _bounds(value, schema, name)


def _object(value: Mapping[str, Any], schema: Mapping[str, Any], name: str, depth: int) -> str:
    properties = schema.get("properties") or {}
    for key in schema.get("required", ()):
        if key not in value:
            return f"'{key}' is missing from {name}"
    for key, held in value.items():
        if key in properties:
            if problem := misfit(held, properties[key], f"'{key}'", depth + 1):
                return problem
        elif schema.get("additionalProperties") is False:
            return f"there is no '{key:.40}' in {name}; there is {', '.join(properties) or 'nothing'}"
    return ""


def _list(value: list[Any], schema: Mapping[str, Any], name: str, depth: int) -> str:
    least, most = schema.get("minItems", 0), schema.get("maxItems", len(value))
    if not least <= len(value) <= most:
        return f"{name} must have {least if least == most else f'{least} to {most}'} items"
    items = schema.get("items")
    problems = (misfit(item, items, f"item {i} of {name}", depth + 1) for i, item in enumerate(value)) if items else ()
    return next(filter(None, problems), "")


def _bounds(value: Any, schema: Mapping[str, Any], name: str) -> str:
    size = len(value) if isinstance(value, str) else value if isinstance(value, int | float) else None
    if size is None or isinstance(value, bool):
        return ""
    low, high = ("minLength", "maxLength") if isinstance(value, str) else ("minimum", "maximum")
    unit = " characters" if isinstance(value, str) else ""
    if low in schema and size < schema[low]:
        return f"{name} must be at least {schema[low]}{unit}"
    if high in schema and size > schema[high]:
        return f"{name} must be at most {schema[high]}{unit}"
    return ""


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return isinstance(value, TYPES[kind][1])

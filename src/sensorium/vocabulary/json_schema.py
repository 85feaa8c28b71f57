"""Validation by JSON schemas from other sources, with jsonschema.

Hostile schemas are harmless: only named keywords are used (a ``pattern`` may take hours for one text), no address is
fetched, and endless nesting is an error.

    misfit({"box": [1, "2"]}, validator_of('{"properties": {"box": {"items": {"type": "number"}}}}', KEYWORDS))
    → "'box[1]': '2' is not of type 'number'"
"""

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from sensorium.vocabulary.plain import printable, shown

SIZES = frozenset({"minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems"})
KEYWORDS = frozenset({"type", "enum", "properties", "required", "additionalProperties", "items"}) | SIZES
# Keywords with schemas inside: under names, in a list, alone.
NAMED = ("properties", "$defs", "definitions")
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
SINGLE = ("items", "additionalProperties")
LONGEST_PLACE = 100


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Every schema inside a schema, itself first, without true, false and what is no schema."""
    if not isinstance(schema, dict):
        return
    yield schema
    for keyword, inside in schema.items():
        each: Any = ()
        if keyword in NAMED and isinstance(inside, dict):
            each = inside.values()
        elif keyword in LISTED and isinstance(inside, list):
            each = inside
        elif keyword in SINGLE:
            each = (inside,)
        for one in each:
            yield from subschemas(one)


@lru_cache(maxsize=256)
def validator_of(schema: str, keywords: frozenset[str]) -> Any:
    """A validator for these keywords of a schema (JSON text), by the draft of its ``$schema``, else 2020-12."""
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    try:
        found = json.loads(schema)
        draft = validator_for(found, default=Draft202012Validator)
        for node in list(subschemas(found)):
            unused = node.keys() - keywords
            if "patternProperties" in unused:
                unused |= {"additionalProperties"}  # it applies to names that match no pattern
            for keyword in unused & node.keys():
                del node[keyword]  # also "$schema", which inside a schema would switch to another draft
        draft.check_schema(found)
    except SchemaError as error:
        raise ValueError(f"it is no JSON schema: {_sentence(error)}") from error
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    except (TypeError, AttributeError) as error:  # of a "$schema" that is no text
        raise ValueError(f"it is no JSON schema: {error}") from error
    return draft(found, registry=Registry())  # an empty registry, so that "$ref" fetches nothing


def misfit(value: Any, validator: Any) -> str:
    """Where and why a value does not fit; empty if it fits."""
    from jsonschema.exceptions import best_match

    try:
        first = next(validator.iter_errors(value), None)
    except RecursionError:
        return "the value, or its schema, is nested too deeply"
    return "" if first is None else _sentence(best_match([first]))


def _sentence(error: Any) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
    place = "".join(parts).removeprefix(".")[:LONGEST_PLACE]
    problem = error.message.replace(repr(error.instance), shown(error.instance))
    return printable(f"'{place}': {problem}" if place else problem)

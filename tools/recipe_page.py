"""Prints docs/reference/recipe.md: every key of the schema with its type, default and description. `make docs` runs it."""

from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from sensorium.recipe.schema import NO_LIMIT, Recipe, Section

HEAD = """# Every key of a recipe

Made from the schema by `make docs`; a test holds it up to date. A recipe is a YAML file. Every key can be set on the
command line as `key=value` with the dots you see here (`batch.group_size=16`; `tasks.train.0.weight=2` for an item of a
list), and in Python as `sn.train(recipe, batch={"group_size": 16})`. Unknown keys are refused with the nearest right one.
`sensorium train RECIPE --dry-run` prints a recipe with every default written out. Keys without a default must be given.
"""
WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false", Path: "path", Any: "anything"}
MACHINE_WORD = 2**63 - 1
LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def page() -> str:
    """The page."""
    return HEAD + "\n" + "\n".join(_sections(Recipe, "", _places()))


def _places() -> dict[type[Section], str]:
    """Where each section has its table: at the place with the fewest dots."""
    found: dict[type[Section], str] = {Recipe: ""}
    layer = dict(found)
    while layer:
        below = {inner: place for section, prefix in layer.items() for inner, place, _ in _inside(section, prefix)}
        layer = {section: place for section, place in below.items() if section not in found}
        found |= layer
    return found


def _inside(section: type[Section], prefix: str) -> Iterator[tuple[type[Section], str, FieldInfo]]:
    """The sections inside one, with their places; for a list of sections the first that has the kind."""
    seen: set[type[Section]] = set()
    for name, field in section.model_fields.items():
        inner = _inner(field.annotation)
        if inner is not None and inner not in seen:
            seen.add(inner)
            yield inner, f"{prefix}{name}." + ("N." if get_origin(field.annotation) is tuple else ""), field


def _sections(section: type[Section], prefix: str, places: dict[type[Section], str]) -> Iterator[str]:
    """A section's table, then those of the sections inside it; one that has its table elsewhere is referred to."""
    yield f"## {prefix.rstrip('.') or 'The recipe'}\n"
    yield " ".join((section.__doc__ or "").split()).replace("``", "`") + "\n"
    yield "| key | type | default | |\n|---|---|---|---|"
    for name, field in section.model_fields.items():
        yield f"| `{prefix}{name}` | {_type(field)} | {_default(field)} | {field.description} |"
    yield ""
    for inner, place, field in _inside(section, prefix):
        if places[inner] == place:
            yield from _sections(inner, place, places)
        else:
            yield from _again(inner, place, places[inner], field)


def _again(section: type[Section], place: str, first: str, field: FieldInfo) -> Iterator[str]:
    """A section that has its table elsewhere: only what differs."""
    made = field.default if isinstance(field.default, Section) else None
    plain = section() if made is not None else None
    changed = [] if made is None else [n for n in section.model_fields if getattr(made, n) != getattr(plain, n)]
    differs = "".join(f"; the default of `{place}{name}` is `{_show(getattr(made, name))}`" for name in changed)
    yield f"## {place.rstrip('.')}\n"
    yield f"The same keys as `{first.rstrip('.')}`{differs}.\n"


def _type(field: FieldInfo) -> str:
    found = [(sign, getattr(one, key)) for one in field.metadata for key, sign in LIMITS.items() if hasattr(one, key)]
    limits = [f"{sign} {_show(limit)}" for sign, limit in found if abs(limit) < MACHINE_WORD]
    return ", ".join([_words(field.annotation), *limits])


def _words(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation in WORDS:
        return WORDS[annotation]
    if origin is Literal:
        return " or ".join(f"`{_show(part)}`" for part in parts)
    if origin in (Union, UnionType):
        return f"{_words(next(part for part in parts if part is not type(None)))}, or empty"
    if origin is tuple and Ellipsis not in parts:
        return f"{len(parts)} {_words(parts[0])}s"
    if origin is tuple:
        return "list of sections" if _inner(annotation) else f"list of {_words(parts[0])}s"
    return "mapping" if origin is dict else "section"


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined or field.default == NO_LIMIT:
        return "—"
    return "" if isinstance(field.default, Section) else f"`{_show(field.default)}`"


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(_show(item) for item in value)}]"
    if isinstance(value, float):
        return f"{value:g}"
    return "empty" if value in (None, "") else str(value)


def _inner(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for part in get_args(annotation) if (found := _inner(part))), None)


if __name__ == "__main__":
    print(page(), end="")

"""From a YAML file and ``key=value`` overrides to a checked recipe, and back. Imports no torch and builds nothing.

All problems are reported in one paragraph, each with its place (file and line, or the override) and what to do.
"""

import json
import sys
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from sensorium.recipe.checks import problems
from sensorium.recipe.registry import look_where_found
from sensorium.recipe.schema import Recipe
from sensorium.recipe.yaml import Path as Place
from sensorium.recipe.yaml import dotted, read_yaml, write_yaml
from sensorium.vocabulary.errors import RecipeError, nearest, similar_file

# Sampling keys of other trainers that are not supported, with the reason and the way out.
NOT_SAMPLED = {
    "min_p": "the engine truncates by rollout.top_p and rollout.top_k only. Use one of those, or sample the whole "
    "policy, which training is made for.",
    "repetition_penalty": "it makes each token's distribution depend on all tokens before it, in a way that the "
    "learner's log-probs do not have, so that training would be off-policy at every token. Use a reward term against "
    "repetition.",
}

WANTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text (in quotes, if it looks like a number)",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys to values",
    "model_type": "a section of keys and values",
    "model_attributes_type": "a section of keys and values",
    "path_type": "a path",
}
SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens", "max_context_tokens")


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, apply overrides, check everything that can be checked without building anything."""
    data, origins = read_recipe(path)
    named = {override.partition("=")[0].strip() for override in overrides}
    if _run_of(path) and "name" in named and "run_dir" not in named:
        del data["run_dir"]  # a run's recipe under a new name
    if _run_of(path):
        drop_other_end(data, named)
    for override in overrides:
        apply_override(override, data, origins)
    return check_recipe(data, str(path), origins)


def drop_other_end(data: dict[str, Any], named: Collection[str]) -> None:
    """Drop a run's former end in epochs if it is given one in steps, and vice versa."""
    for key, other in (("steps", "epochs"), ("epochs", "steps")):
        if key in named and other not in named:
            data.pop(other, None)


def read_recipe(path: str | Path) -> tuple[dict[str, Any], dict[Place, str]]:
    """The data of a recipe as written, unchecked, and the line of each part. A run's ``run_dir`` is its directory."""
    source = find_recipe(path)
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read recipe '{source}': {getattr(error, 'strerror', None) or error}.") from error
    data, origins = _read(text, str(path))
    if Path(path).is_file() and (beside := str(source.absolute().parent)) not in sys.path:
        sys.path.append(beside)  # for the user's own rewards and environments: my_rewards:Brevity
    if run := _run_of(path):
        data["run_dir"] = str(run)
        look_where_found(run, data)
    return data, origins


def parse_recipe(text: str, name: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a YAML text, which errors call ``name``."""
    data, origins = _read(text, name)
    for override in overrides:
        apply_override(override, data, origins)
    return check_recipe(data, name, origins)


def _read(text: str, name: str) -> tuple[dict[str, Any], dict[Place, str]]:
    data, lines = read_yaml(text, name)
    if not isinstance(data, dict):
        raise RecipeError(f"{name}: a recipe is a mapping of keys to values, and this is {_kind(data)}.")
    return data, {place: f"{name}, line {line}" for place, line in lines.items()}


def check_recipe(
    data: dict[str, Any], name: str, origins: dict[Place, str] | None = None, sections: Collection[str] = ()
) -> Recipe:
    """The recipe of plain data. Errors name the ``origins`` of its parts, or ``name``.

    ``sections``: only these are used, so what names in others stand for is not looked up.
    """
    origins = origins or {}
    try:
        # Strict, as JSON: lists become tuples and whole numbers floats, and nothing else is converted.
        recipe = Recipe.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        raise RecipeError(_paragraph([_explain(detail, origins, name) for detail in _details(error)])) from None
    found = []
    for at, text in problems(recipe):
        place = tuple(int(part) if part.isdigit() else part for part in at.split("."))
        if sections and place[0] not in sections:
            continue
        found.append(f"{_where(place, origins, name)}: {text}")
    if found:
        raise RecipeError(_paragraph(found))
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML, every default written out; it loads back as the same recipe."""
    return write_yaml(recipe.model_dump(mode="json"))


def find_recipe(path: str | Path) -> Path:
    """A recipe file: the path itself, or a shipped recipe by its bare name (``shapes``)."""
    given = Path(path)
    if given.is_file():
        return given
    shipped = shipped_recipes()
    if str(path) in shipped:
        return shipped[str(path)]
    if given.is_dir() and (given / "recipe.yaml").is_file():
        return given / "recipe.yaml"
    names = nearest(given.stem, list(shipped)) if shipped else "."
    runs = sorted(place.parent.name for place in given.parent.glob("*/recipe.yaml"))
    others = f"; runs in '{given.parent}'{nearest(given.name, runs)}".removesuffix(".") if runs else ""
    beside = similar_file(given) or others
    end = "" if beside.endswith("?") else "."
    raise RecipeError(f"there is no recipe file '{path}'{beside}{end} Give a path, or a shipped recipe by name{names}")


def _run_of(path: str | Path) -> Path | None:
    given = Path(path)
    folder = given.parent if given.name == "recipe.yaml" and given.is_file() else given
    if str(path) in shipped_recipes() and given == folder:
        return None
    return folder if (folder / "recipe.yaml").is_file() and (folder / "checkpoints").is_dir() else None


def shipped_recipes() -> dict[str, Path]:
    """Recipes that come with the package, by name: ``shapes``, ``tiny/vagen_sokoban``."""
    folder = Path(__file__).resolve().parents[1] / "assets" / "recipes"
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}


def apply_override(override: str, data: dict[str, Any], origins: dict[Place, str]) -> None:
    """Apply ``key=value`` to a recipe's data; its value is YAML."""
    where = f"override '{override}'"
    key, equals, raw = override.partition("=")
    if not equals or not all(key.strip().split(".")):
        raise RecipeError(f"{where}: write it as key=value with a dotted key, like batch.group_size=8.")
    set_value(data, key.strip(), read_yaml(raw, where)[0], where, origins)


def set_value(data: dict[str, Any], key: str, value: Any, where: str, origins: dict[Place, str]) -> None:
    """Set a dotted key of a recipe's data; errors about it name ``where``."""
    parts = key.split(".")
    target: Any = data
    place: Place = ()
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(target, str) and "name" in _keys_at(place):  # a section that was given by its name alone
            holder: Any = data
            for outer in place[:-1]:
                holder = holder[outer]
            holder[place[-1]] = target = {"name": target}
        step = _step(target, part, place, where)
        place = (*place, step)
        if last:
            target[step] = value
        elif isinstance(target, dict) and target.get(part) is None:
            target[step] = {}
            origins[place] = where  # a section that only the override names
        target = target[step]
    for old in [known for known in origins if known[: len(place)] == place]:
        del origins[old]
    origins[place] = where


def _step(target: Any, part: str, place: Place, where: str) -> str | int:
    if isinstance(target, dict):
        return part
    if not isinstance(target, list):
        raise RecipeError(f"{where}: '{dotted(place)}' is {_kind(target)}, so it has no '{part}' inside.")
    if not part.isdigit() or int(part) >= len(target):
        size = f"it has {len(target)} items, counted from 0" if target else "it is empty"
        raise RecipeError(f"{where}: '{dotted(place)}' is a list and '{part}' is none of its items; {size}.")
    return int(part)


def _details(error: ValidationError) -> Iterator[ErrorDetails]:
    """Its problems; a value that is of none of several types is one."""
    plain = {"bool", "int", "float", "str"}
    for place, found in groupby(
        error.errors(), lambda one: one["loc"][:-1] if plain.intersection(one["loc"][-1:]) else one["loc"]
    ):
        first, *others = found
        if not others:
            yield first
            continue
        wanted = " or ".join(WANTED[one["type"]] for one in (first, *others))
        yield {**first, "type": "union", "loc": place, "msg": wanted}


def _explain(detail: ErrorDetails, origins: dict[Place, str], name: str) -> str:
    place: Place = tuple(detail["loc"])
    where = _where(place, origins, name)
    key = dotted(place)
    given = _show(detail["input"])
    context = detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            last, known = str(place[-1]), _keys_at(place[:-1])
            if last in NOT_SAMPLED and place[0] in (last, "rollout", "evaluation"):
                belongs = "" if len(place) > 1 else " Sampling options belong in the section rollout."
                return f"{where}: '{key}' is not supported: {NOT_SAMPLED[last]}{belongs}"
            if len(place) == 1 and last in SAMPLING:
                return f"{where}: unknown key '{key}': sampling options belong in rollout; write rollout.{key}."
            return f"{where}: unknown key '{key}'{nearest(last, known)}"
        case "missing":
            return f"{where}: the key '{key}' is missing and has no default."
        case "literal_error":
            expected = str(context["expected"]).replace("False", "false").replace("True", "true")
            return f"{where}: '{key}' is {given}; it must be {expected}."
        case "too_short":
            return f"{where}: '{key}' needs at least {context['min_length']} items and has {context['actual_length']}."
        case "string_pattern_mismatch":
            return f"{where}: '{key}' is {given}; use letters, digits, '.', '_' and '-' only."
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal" | "finite_number":
            limit = detail["msg"].removeprefix("Input should be ")
            return f"{where}: '{key}' is {given}; it must be {limit}."
        case _:
            message = detail["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
            return f"{where}: '{key}' is {given}; it must be {WANTED.get(detail['type'], message)}."


def _where(place: Place, origins: dict[Place, str], name: str) -> str:
    for length in range(len(place), 0, -1):
        if place[:length] in origins:
            return origins[place[:length]]
    return name


def _keys_at(place: Place) -> list[str]:
    model: Any = Recipe
    for part in place:
        annotation = model.model_fields[part].annotation if isinstance(part, str) else model
        found = _section(annotation)
        if found is None:
            return []
        model = found
    return list(model.model_fields)


def _section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (tuple, list, Union, UnionType):
        return next((found for inner in get_args(annotation) if (found := _section(inner))), None)
    return None


def _paragraph(found: list[str]) -> str:
    if len(found) == 1:
        return found[0]
    more = f" And {len(found) - 5} more." if len(found) > 5 else ""
    return f"{len(found)} problems. " + " ".join(f"({n}) {text}" for n, text in enumerate(found[:5], start=1)) + more


def _kind(value: Any) -> str:
    kinds: dict[type, str] = {dict: "a section", list: "a list", str: "a text", bool: "true or false", type(None): "empty"}
    return kinds.get(type(value), "a number")


def _show(value: Any) -> str:
    text = repr(value) if not isinstance(value, dict | list) else _kind(value)
    return {"None": "empty", "True": "true", "False": "false"}.get(text, text if len(text) <= 60 else text[:57] + "…'")

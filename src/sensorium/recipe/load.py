"""From a YAML file and ``key=value`` overrides to a checked recipe, and back. Imports no torch and builds nothing.

Whatever is wrong is said at once in one paragraph, each problem with its place (file and line, or the override), the
nearest right name and what to do.
"""

import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from sensorium.recipe.checks import problems
from sensorium.recipe.names import look_where_found
from sensorium.recipe.schema import Recipe
from sensorium.recipe.yaml import Path as Place
from sensorium.recipe.yaml import dotted, read_yaml, write_yaml
from sensorium.vocabulary.errors import RecipeError, nearest, similar_file

NOT_SAMPLED = {
    "min_p": "the engine truncates by rollout.top_p and rollout.top_k only. Use one of those, or sample the whole "
    "policy, which training is made for.",
    "repetition_penalty": "it makes each token's distribution depend on all tokens before it, in a way that the "
    "learner's log-probs do not have, so that training would be off-policy at every token. Use a reward term against "
    "repetition.",
}
"""Keys that other trainers have for sampling and this one has not, with the reason and the way out."""

SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens", "max_context_tokens")


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, apply overrides, check everything that can be checked without building anything."""
    data, origins = read_recipe(path)
    named = {override.partition("=")[0].strip() for override in overrides}
    if run_of(path) and "name" in named and "run_dir" not in named:
        del data["run_dir"]  # a new run by the recipe of another one
    if run_of(path):
        drop_other_end(data, named)
    for override in overrides:
        _apply(override, data, origins)
    return _validate(data, origins, str(path))


def drop_other_end(data: dict[str, Any], named: Collection[str]) -> None:
    """A run that is given another end in steps or in epochs ends there: its former end in the other is dropped."""
    for key, other in (("steps", "epochs"), ("epochs", "steps")):
        if key in named and other not in named:
            data.pop(other, None)


def read_recipe(path: str | Path) -> tuple[dict[str, Any], dict[Place, str]]:
    """The data of a recipe as they are written, unchecked, and the line of each part. A run is where its directory is."""
    source = find_recipe(path)
    data, origins = _read(_text(source), str(path))
    if Path(path).is_file() and (beside := str(source.absolute().parent)) not in sys.path:
        sys.path.append(beside)  # where its author's own rewards and environments are: my_rewards:Brevity
    if run := run_of(path):
        data["run_dir"] = str(run)
        look_where_found(run, data)
    return data, origins


def _text(source: Path) -> str:
    try:
        return source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read recipe '{source}': {getattr(error, 'strerror', None) or error}.") from error


def parse_recipe(text: str, name: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a YAML text; ``name`` stands for it in errors."""
    data, origins = _read(text, name)
    for override in overrides:
        _apply(override, data, origins)
    return _validate(data, origins, name)


def _read(text: str, name: str) -> tuple[dict[str, Any], dict[Place, str]]:
    data, lines = read_yaml(text, name)
    if not isinstance(data, dict):
        raise RecipeError(f"{name}: a recipe is a mapping of keys to values, and this is {_kind(data)}.")
    origins: dict[Place, str] = {place: f"{name}, line {line}" for place, line in lines.items()}
    return data, origins


def check_recipe(data: dict[str, Any], name: str, origins: dict[Place, str] | None = None) -> Recipe:
    """The recipe of plain data; ``origins`` say where its parts come from, ``name`` stands for the rest in errors."""
    return _validate(data, origins or {}, name)


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
    beside = similar_file(given) or _runs_beside(given)
    end = "" if beside.endswith("?") else "."
    raise RecipeError(f"there is no recipe file '{path}'{beside}{end} Give a path, or a shipped recipe by name{names}")


def _runs_beside(path: Path) -> str:
    runs = sorted(place.parent.name for place in path.parent.glob("*/recipe.yaml"))
    return f"; runs in '{path.parent}'{nearest(path.name, runs)}".removesuffix(".") if runs else ""


def run_of(path: str | Path) -> Path | None:
    """The run directory that a path means, itself or by its recipe.yaml; a run is where its directory is."""
    given = Path(path)
    folder = given.parent if given.name == "recipe.yaml" and given.is_file() else given
    if str(path) in shipped_recipes() and given == folder:
        return None
    return folder if (folder / "recipe.yaml").is_file() and (folder / "checkpoints").is_dir() else None


def shipped_recipes() -> dict[str, Path]:
    """Recipes that come with the package, by name: ``shapes``, ``tiny/vagen_sokoban``."""
    folder = Path(__file__).resolve().parents[1] / "assets" / "recipes"
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}


def _apply(override: str, data: dict[str, Any], origins: dict[Place, str]) -> None:
    """Set one ``dotted.key=value`` in the raw data."""
    where = f"override '{override}'"
    key, equals, raw = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise RecipeError(f"{where}: write it as key=value with a dotted key, like batch.group_size=8.")
    value, _ = read_yaml(raw, where)
    target: Any = data
    place: Place = ()
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(target, str) and "name" in _keys_at(place):  # a section of which the name alone was given
            target = _set(data, place, {"name": target})
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


def _set(data: Any, place: Place, value: dict[str, Any]) -> dict[str, Any]:
    """Put a section at a place that exists, and return it."""
    *outer, last = place
    for part in outer:
        data = data[part]
    data[last] = value
    return value


def _step(target: Any, part: str, place: Place, where: str) -> str | int:
    """The key or index that ``part`` means in ``target``."""
    if isinstance(target, dict):
        return part
    if not isinstance(target, list):
        raise RecipeError(f"{where}: '{dotted(place)}' is {_kind(target)}, so it has no '{part}' inside.")
    if not part.isdigit() or int(part) >= len(target):
        size = f"it has {len(target)} items, counted from 0" if target else "it is empty"
        raise RecipeError(f"{where}: '{dotted(place)}' is a list and '{part}' is none of its items; {size}.")
    return int(part)


def _validate(data: dict[str, Any], origins: dict[Place, str], name: str) -> Recipe:
    try:
        # Strict, as JSON: lists may stand for tuples and whole numbers for floats, and nothing else is converted.
        recipe = Recipe.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        raise RecipeError(_paragraph([_explain(detail, origins, name) for detail in error.errors()])) from None
    found = [f"{_where(_place(at), origins, name)}: {text}" for at, text in problems(recipe)]
    if found:
        raise RecipeError(_paragraph(found))
    return recipe


def _explain(detail: ErrorDetails, origins: dict[Place, str], name: str) -> str:
    """One validation error in our words."""
    place: Place = tuple(detail["loc"])
    where = _where(place, origins, name)
    key = dotted(place)
    given = _show(detail["input"])
    context = detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            last, known = str(place[-1]), _keys_at(place[:-1])
            if last in NOT_SAMPLED and place[0] in (last, "rollout", "evaluation"):
                belongs = "" if len(place) > 1 else " Options of sampling stand in the section rollout."
                return f"{where}: '{key}' is not supported: {NOT_SAMPLED[last]}{belongs}"
            if len(place) == 1 and last in SAMPLING:
                return f"{where}: unknown key '{key}': options of sampling stand in rollout; write rollout.{key}."
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
            return f"{where}: '{key}' is {given}; it must be {_wanted(detail)}."


def _wanted(detail: ErrorDetails) -> str:
    words = {
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
    return words.get(detail["type"], detail["msg"].removeprefix("Input should be ").removeprefix("Value error, "))


def _place(at: str) -> Place:
    return tuple(int(part) if part.isdigit() else part for part in at.split("."))


def _where(place: Place, origins: dict[Place, str], name: str) -> str:
    """The file and line, or the override, that a place comes from: its own, or that of what holds it."""
    for length in range(len(place), 0, -1):
        if place[:length] in origins:
            return origins[place[:length]]
    return name


def _keys_at(place: Place) -> list[str]:
    """The keys that the section at a place may have."""
    model: Any = Recipe
    for part in place:
        annotation = model.model_fields[part].annotation if isinstance(part, str) else model
        found = _section(annotation)
        if found is None:
            return []
        model = found
    return list(model.model_fields)


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section inside an annotation such as ``tuple[SourceSection, …]`` or ``Section | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (tuple, list, Union, UnionType):
        return next((found for inner in get_args(annotation) if (found := _section(inner))), None)
    return None


def _paragraph(found: list[str]) -> str:
    """Up to five problems as one paragraph."""
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

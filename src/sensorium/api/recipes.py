"""Make a checked Recipe from a path, a name, a dict or a Recipe, with Python objects in it.

Objects may replace names: functions and classes under ``rewards``, rows and data sets under ``tasks``, classes as
``environment``. They are written into the recipe as ``module:Name`` where they can be imported, else as ``python:NAME``.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sensorium.api.run import Run
from sensorium.data.rows import PassedRows, digest_of
from sensorium.recipe.load import check_recipe, drop_other_end, read_recipe
from sensorium.recipe.registry import SCHEME, importable_name, own_name, pass_object
from sensorium.recipe.schema import Recipe
from sensorium.recipe.yaml import Path as Place
from sensorium.vocabulary.errors import RecipeError
from sensorium.vocabulary.task import Task


def recipe_of(recipe: Any, changes: Mapping[str, Any]) -> Recipe:
    """The checked recipe with ``changes``: sections are merged key by key, ``a.b`` reaches inside, the rest is replaced."""
    return check_recipe(*data_of(recipe, changes))


def has_passed_objects(recipe: Recipe) -> bool:
    """True if a recipe names objects that only this process has."""
    return next(_passed_names(recipe.model_dump(mode="json")), None) is not None


def data_of(recipe: Any, changes: Mapping[str, Any]) -> tuple[dict[str, Any], str, dict[Place, str]]:
    """The unchecked data of the same recipe, its name in errors, and the origins of its parts."""
    data, name, origins = _data(recipe)
    passed = set(_passed_names(data)) if isinstance(recipe, Run) else set()
    if isinstance(recipe, Run):
        drop_other_end(data, changes)
    for key, value in changes.items():
        _change(data, key.split("."), value, key)
    if "name" in changes and "run_dir" not in changes and isinstance(recipe, Run):
        data["run_dir"] = None  # another name is another run
    names = _Names(passed)
    for key, replaced in (("rewards", names.rewards), ("tasks", names.tasks)):
        if data.get(key) is not None:
            data[key] = replaced(data[key])
    changed = {key.split(".")[0] for key in changes}
    kept = {place: origin for place, origin in origins.items() if place[0] not in changed}
    return _plain(data), name, kept | {(key,): f"argument '{key}'" for key in changed}


def _data(recipe: Any) -> tuple[dict[str, Any], str, dict[Place, str]]:
    """A recipe as plain data that may be changed, its name in errors, and the origins of its parts."""
    if isinstance(recipe, Run):
        data, origins = read_recipe(recipe.directory)
        if Path(data.get("run_dir") or Path("runs") / str(data.get("name"))).resolve() != recipe.directory.resolve():
            data["run_dir"] = str(recipe.directory)  # it may have been moved
        return data, str(recipe.directory), origins
    if isinstance(recipe, str | Path):
        data, origins = read_recipe(recipe)
        return data, str(recipe), origins
    if isinstance(recipe, Recipe):
        return recipe.model_dump(mode="json"), f"recipe '{recipe.name}'", {}
    if isinstance(recipe, Mapping):
        return {str(key): _copied(value) for key, value in recipe.items()}, "the recipe passed", {}
    raise RecipeError(
        f"a recipe is a path, the name of a shipped one, a dict, a Recipe or a Run; not {type(recipe).__name__}."
    )


def _passed_names(value: Any) -> Iterator[str]:
    """The names in a recipe of objects that were passed."""
    if isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _passed_names(item)
    elif isinstance(value, str) and value.startswith(SCHEME):
        yield value


def _copied(value: Any) -> Any:
    """A copy of the sections; their items are shared."""
    return {key: _copied(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _change(data: dict[str, Any], path: list[str], value: Any, key: str) -> None:
    head, *rest = path
    held = data.get(head)
    if rest:
        if held is None:
            held = data[head] = {}
        if isinstance(held, list) and rest[0].isdigit() and int(rest[0]) < len(held):
            items = {str(i): item for i, item in enumerate(held)}
            _change(items, rest, value, key)
            data[head] = list(items.values())
            return
        if not isinstance(held, dict):
            raise RecipeError(f"argument '{key}': '{head}' has no '{rest[0]}' inside.")
        _change(held, rest, value, key)
    elif isinstance(value, Mapping) and isinstance(held, dict) and "source" not in value:
        for inner, item in value.items():
            _change(held, [str(inner)], item, key)
    elif head in ("rewards", "tasks") and isinstance(held, dict):
        held["terms" if head == "rewards" else "train"] = value
    else:
        data[head] = _copied(value)


class _Names:
    """Names for the objects of one recipe, in their order: the same objects get the same names again.

    ``passed`` are the names that its run has for passed objects: they are kept, even if an object can be imported now.
    """

    def __init__(self, passed: Collection[str] = ()) -> None:
        self.passed = passed
        self.taken: list[str] = []

    def rewards(self, given: Any) -> Any:
        """The section ``rewards``: a list is taken as its terms."""
        section = dict(given) if isinstance(given, Mapping) else {"terms": given}
        terms = section.get("terms")
        if callable(terms) or isinstance(terms, str):
            terms = [terms]
        if isinstance(terms, Sequence):
            section["terms"] = [self._term(term) for term in terms]
        return section

    def tasks(self, given: Any) -> Any:
        """The section ``tasks``: anything but a mapping is taken as the training tasks."""
        whole = isinstance(given, Mapping) and "source" not in given
        section = dict(given) if whole else {"train": given}
        for side in ("train", "evaluate"):
            if side in section:
                section[side] = self._sources(section[side], side)
        if "planner" in section:
            planner = section["planner"]
            planner = dict(planner) if isinstance(planner, Mapping) else {"name": planner}
            section["planner"] = planner | ({"name": self._class("planner", planner["name"])} if "name" in planner else {})
        return section

    def _term(self, given: Any) -> Any:
        section = given if isinstance(given, Mapping) else {"name": given}
        return {**section, "name": self._reward(section.get("name"))}

    def _class(self, kind: str, given: Any) -> Any:
        """The name of a class; anything else as it is."""
        if not isinstance(given, type):
            return given
        return self._importable(given) or self._pass(kind, own_name(given), given)

    def _reward(self, thing: Any) -> Any:
        if thing is None or isinstance(thing, str):
            return thing
        from sensorium.recipe.registry import reward_style
        from sensorium.rewards.reward_term import as_term

        importable = self._importable(thing)
        if importable and (isinstance(thing, type) or reward_style(thing)):
            return importable
        if not isinstance(thing, type):
            as_term(thing)  # refuses what cannot be a reward
        return self._pass("reward", own_name(thing), partial(as_term, thing))

    def _sources(self, given: Any, side: str) -> Any:
        if isinstance(given, Mapping) or _is_source(given):
            given = [given]
        if not isinstance(given, list | tuple):
            raise RecipeError(
                f"tasks.{side}: give rows (a list of dicts or Tasks, or a data set), a source, or a list of sources; not "
                f"{type(given).__name__}."
            )
        if given and all(isinstance(item, Task) or (isinstance(item, Mapping) and "source" not in item) for item in given):
            given = [{"source": given}]
        return [self._source(item, side) for item in given]

    def _source(self, given: Any, side: str) -> Any:
        section = dict(given) if isinstance(given, Mapping) else {"source": given}
        thing: Any = section.get("source")
        options = dict(section.get("options") or {})
        if options.get("environment") is not None:
            options["environment"] = self._class("environment", options["environment"])
        if isinstance(kinds := options.get("environments"), Mapping):
            options["environments"] = {name: self._class("environment", kind) for name, kind in kinds.items()}
        if isinstance(thing, type):
            section["source"] = self._class("source", thing)
        elif isinstance(thing, list | tuple) or hasattr(thing, "column_names"):
            section["source"] = self._pass("source", side, partial(PassedRows, thing))
            options["digest"] = digest_of(thing)
        elif _is_source(thing):
            section["source"] = self._pass("source", own_name(thing), lambda *, store: thing)
        return {**section, "options": options} if options else section

    def _importable(self, thing: Any) -> str:
        """``module:Name``, unless the run has it as a passed object, from the script that began it."""
        return "" if f"{SCHEME}{own_name(thing)}" in self.passed else importable_name(thing)

    def _pass(self, kind: str, wanted: str, thing: Any) -> str:
        name = pass_object(kind, wanted, thing, self.taken)
        self.taken.append(name)
        return name


def _is_source(thing: Any) -> bool:
    """True for a source's class, a data set, or an object with a length and items that is no plain list."""
    if isinstance(thing, type):
        return True
    sized = hasattr(thing, "__len__") and hasattr(thing, "__getitem__")
    return sized and not isinstance(thing, list | tuple | str | Mapping)


def _plain(value: Any) -> Any:
    """Plain data: numbers of numpy and torch as numbers, paths as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return value.item()
    if callable(value) or isinstance(value, bytes):
        raise RecipeError(f"{own_name(value)} ({type(value).__name__}) is where a recipe has a plain value.")
    return value

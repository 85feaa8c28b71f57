"""Where the user's own modules lie that a recipe names (``my_rewards:brevity``), so that a run finds them from anywhere.

Example: ``sensorium train exp/lake.yaml`` finds ``my_rewards.py`` in ``exp``, beside the recipe. The run's directory then
has ``modules.json`` with ``{"my_rewards": "/home/me/exp"}``. A run that goes on from another folder looks in
``/home/me/exp`` too, after the working directory and PYTHONPATH.
"""

import json
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sensorium.vocabulary.errors import RecipeError

FILE = "modules.json"
NAME = re.compile(r"(\w+)(?:\.(\w+)[.\w]*)?:\w+")
NO_MODULES = {"tiny", "package", "python"}
"""What stands before the colon of models (``tiny:qwen2``) and of objects that were passed (``python:brevity``)."""


def own_modules(recipe: Mapping[str, Any]) -> dict[str, str]:
    """The folder of each module that a recipe's data name and that is not installed, by its name. Imports nothing."""
    folders = {name: _folder(name, inner) for name, inner in sorted(_named(recipe))}
    return {name: folder for name, folder in folders.items() if folder and not _installed(folder)}


def look_where_found(run: Path, recipe: Mapping[str, Any]) -> None:
    """Have modules that a run's recipe names looked for where they were found when it was last started, too."""
    found = _found_before(run, recipe)
    sys.path += [folder for folder in dict.fromkeys(found.values()) if folder not in sys.path]
    for name, then, now in _elsewhere(found, recipe):
        warnings.warn(
            f"ATTENTION: '{name}' is taken from '{now}', but the run in '{run}' found it in '{then}', where one is too.",
            stacklevel=2,
        )


def refuse_loaded_elsewhere(run: Path, recipe: Mapping[str, Any]) -> None:
    """Refuse to go on with a module that another run of this process has loaded from another folder."""
    for name, then, now in _elsewhere(_found_before(run, recipe), recipe):
        if name in sys.modules:
            raise RecipeError(
                f"'{name}' is loaded in this process from '{now}', but the run in '{run}' found it in '{then}', and a "
                "process has one module of a name. Go on in a process of its own."
            )


def _found_before(run: Path, recipe: Mapping[str, Any]) -> dict[str, str]:
    """The folders that ``modules.json`` has for modules that the recipe names."""
    path = run / FILE
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
        folders = {name: found[name] for name, _ in _named(recipe) if name in found}
        return {
            name: folder for name, folder in folders.items() if os.path.isabs(os.fsencode(folder)) and "\0" not in folder
        }
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise RecipeError(f"'{path}' cannot be read ({error}). Remove it, and name the folders in PYTHONPATH.") from error


def _elsewhere(found: Mapping[str, str], recipe: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Modules now taken from another folder, though the one where they were found still has them: name, then, now."""
    for name, inner in sorted(_named(recipe)):
        then, now = found.get(name, ""), _folder(name, inner)
        there = any(os.path.exists(os.path.join(then, name + end)) for end in ("", ".py"))
        if then and now and there and not os.path.samefile(now, then):
            yield name, then, now


def searched_folders() -> list[str]:
    """The folders in which modules are looked for, without those of Python and of installed packages."""
    folders = (folder or os.getcwd() for folder in sys.path)
    return [folder for folder in dict.fromkeys(folders) if os.path.isabs(folder) and not _installed(folder)]


def _named(recipe: Mapping[str, Any]) -> set[tuple[str, str]]:
    """The modules that a recipe's data name: the outermost package, and what is named in it."""
    found = (NAME.fullmatch(text) for text in _texts(recipe))
    return {(one[1], one[2] or "") for one in found if one and one[1] not in NO_MODULES}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _folder(name: str, inner: str = "") -> str:
    """The folder in which a module or package is found; empty if it is not, or is no file."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):  # ValueError: a module that was made by hand
        return ""
    if spec is None:
        return ""
    places = [*spec.submodule_search_locations] if spec.submodule_search_locations else [spec.origin or ""]
    held = [place for place in places if any(os.path.exists(os.path.join(place, inner + end)) for end in ("", ".py"))]
    place = (held if inner and held else places)[0]  # a package without __init__.py may lie in several folders
    return os.path.dirname(os.path.abspath(place)) if os.path.exists(place) else ""


def _installed(folder: str) -> bool:
    """Whether a folder belongs to Python or to an environment's packages."""
    library = sysconfig.get_path("stdlib")
    place = Path(folder)
    return (
        place.is_relative_to(library)
        or place == Path(sys.executable).parent
        or place.suffix == ".zip"
        or bool({"site-packages", "dist-packages"} & set(place.parts))
    )

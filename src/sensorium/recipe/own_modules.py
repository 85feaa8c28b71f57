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
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sensorium.vocabulary.errors import RecipeError

FILE = "modules.json"
NAME = re.compile(r"(\w+)(\.\w+)*:\w+")
NO_MODULES = {"tiny", "package", "python"}
"""What stands before the colon of models (``tiny:qwen2``) and of objects that were passed (``python:brevity``)."""


def own_modules(recipe: Mapping[str, Any]) -> dict[str, str]:
    """The folder of each module that a recipe's data name and that is not installed, by its name. Imports nothing."""
    names = {found[1] for text in _texts(recipe) if (found := NAME.fullmatch(text))}
    folders = {name: _folder(name) for name in sorted(names - NO_MODULES)}
    return {name: folder for name, folder in folders.items() if folder and not _installed(folder)}


def look_where_found(run: Path) -> None:
    """Have modules looked for where a run found them when it was last started, too."""
    path = run / FILE
    if not path.is_file():
        return
    try:
        found = json.loads(path.read_bytes())
        folders = [folder for folder in found.values() if os.path.isabs(folder)]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise RecipeError(f"'{path}' cannot be read ({error}). Remove it, and name the folders in PYTHONPATH.") from error
    sys.path += [folder for folder in dict.fromkeys(folders) if folder not in sys.path]


def searched_folders() -> list[str]:
    """The folders in which modules are looked for, without those of Python and of installed packages."""
    folders = (folder or os.getcwd() for folder in sys.path)
    return [folder for folder in dict.fromkeys(folders) if os.path.isabs(folder) and not _installed(folder)]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _folder(name: str) -> str:
    """The folder in which a module or package is found; empty if it is not, or is no file."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):  # ValueError: a module that was made by hand
        return ""
    if spec is None:
        return ""
    places = [*spec.submodule_search_locations] if spec.submodule_search_locations else [spec.origin or ""]
    return os.path.dirname(os.path.abspath(places[0])) if os.path.exists(places[0]) else ""


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

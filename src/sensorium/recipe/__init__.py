"""The recipe: one typed file that defines a run. Imports no torch, and builds nothing.

What a name stands for is imported when it is first used: an environment's process needs ``registry`` and no schema, which
takes half a second.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sensorium.recipe.load import dump_recipe, load_recipe, parse_recipe
    from sensorium.recipe.registry import register
    from sensorium.recipe.schema import Recipe

__all__ = ["Recipe", "dump_recipe", "load_recipe", "parse_recipe", "register"]

_PLACES = {"Recipe": "schema", "dump_recipe": "load", "load_recipe": "load", "parse_recipe": "load", "register": "registry"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'sensorium.recipe' has no attribute '{name}'")
    return getattr(import_module(f"sensorium.recipe.{_PLACES[name]}"), name)

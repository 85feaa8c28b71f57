"""The recipe: one typed file that defines a run. Imports no torch, and builds nothing."""

from sensorium.recipe.load import dump_recipe, load_recipe, parse_recipe
from sensorium.recipe.registry import register
from sensorium.recipe.schema import Recipe

__all__ = ["Recipe", "dump_recipe", "load_recipe", "parse_recipe", "register"]

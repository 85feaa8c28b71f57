"""Shapes of published models by name, for plans of a model that is not on this disk."""

import json
from functools import cache
from typing import Any

from sensorium.forecast.machine import FOLDER
from sensorium.recipe.schema import ModelSection
from sensorium.recipe.shape import ModelShape, read_shape, shape_by_config
from sensorium.vocabulary.errors import RecipeError, nearest

VARIANTS = ("-Instruct", "-Thinking")


@cache
def published_configs() -> dict[str, dict[str, Any]]:
    """Configs by the name of the model."""
    found: dict[str, dict[str, Any]] = json.loads((FOLDER / "shapes.json").read_text())["shapes"]
    return found


def planned_shape(section: ModelSection, named: str = "") -> tuple[ModelShape, str]:
    """The shape to plan with and where it comes from: the name given, the checkpoint on this disk, or the hub id's name."""
    if named:
        return shape_by_config(_config(named, f"--shape {named}")), f"the published sizes of {_plain(named)}"
    found = read_shape(section.path, section.revision, unused=section.unused_weights)
    if found is not None:
        return found, "the checkpoint on this disk"
    name = section.path.rstrip("/").rpartition("/")[2]
    place = f"model.path '{section.path}' is not on this disk, and its sizes are not known by that name"
    return shape_by_config(_config(name, place)), f"the published sizes of {_plain(name)}"


def _config(name: str, place: str) -> dict[str, Any]:
    by_name = {known.lower(): config for known, config in published_configs().items()}
    if _plain(name).lower() not in by_name:
        raise RecipeError(
            f"{place}{nearest(_plain(name), list(published_configs()))} Name the nearest with --shape: "
            f"{', '.join(published_configs())}."
        )
    return by_name[_plain(name).lower()]


def _plain(name: str) -> str:
    for variant in VARIANTS:
        name = name.removesuffix(variant)
    return name

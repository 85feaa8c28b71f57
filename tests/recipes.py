"""The small recipe that the tests' runs start from: a file says what its own differs in, and no more."""

import json
from pathlib import Path
from typing import Any

from sensorium.recipe.load import parse_recipe
from sensorium.recipe.schema import Recipe

SHAPES: dict[str, Any] = {"source": "shapes", "options": {"size": 16, "picture_size": 64}}
HELD_OUT: dict[str, Any] = {"source": "shapes", "options": SHAPES["options"] | {"split": "test"}}


def quick(name: str, **changes: Any) -> dict[str, Any]:
    """Two steps of the shipped model on generated pictures, well below a second each, with some sections replaced."""
    return {
        "name": name,
        "steps": 2,
        "threads": 1,
        "model": {"path": "package:shapes"},
        "tasks": {"train": [SHAPES]},
        "batch": {"prompts_per_step": 3, "group_size": 3},
        "rollout": {"max_new_tokens": 5},
        "rewards": {"terms": [{"name": "exact"}]},
        "optimizer": {"lr": 1e-4},
        **changes,
    }


def parsed(recipe: dict[str, Any], folder: Path, **changes: Any) -> Recipe:
    """A recipe with some sections replaced, whose run lies in ``folder``."""
    return parse_recipe(json.dumps(recipe | changes | {"run_dir": str(folder)}), "test", [])

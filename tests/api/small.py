"""A small recipe that Python code passes as a dict."""

from typing import Any

from tests.recipes import HELD_OUT, SHAPES, quick

PARITY = "tests.trainer.small:ByParity"  # pays every other attempt, so that there is something to learn


def small_recipe(folder: Any, **changes: Any) -> dict[str, Any]:
    """Two quick steps of the shipped model on generated pictures."""
    sections: dict[str, Any] = {
        "run_dir": folder,
        "tasks": {"train": [SHAPES], "evaluate": [HELD_OUT]},
        "batch": {"prompts_per_step": 2, "group_size": 3},
        "rewards": {"terms": [{"name": "exact"}, {"name": PARITY}]},
        "evaluation": {"limit": 4},
        "checkpoint": {"every": 1},
    }
    return quick("small", **sections | changes)

"""A small recipe that Python code passes as a dict."""

from typing import Any

PARITY = "tests.trainer.small:ByParity"  # pays every other attempt, so that there is something to learn
SHAPES = {"source": "shapes", "options": {"size": 16, "picture_size": 64}}


def small_recipe(folder: Any, **changes: Any) -> dict[str, Any]:
    """Two quick steps of the shipped model on generated pictures."""
    return {
        "name": "small",
        "run_dir": folder,
        "steps": 2,
        "threads": 1,
        "model": {"path": "package:shapes"},
        "tasks": {"train": [SHAPES], "evaluate": [{"source": "shapes", "options": SHAPES["options"] | {"split": "test"}}]},
        "batch": {"prompts_per_step": 2, "group_size": 3},
        "rollout": {"max_new_tokens": 5},
        "rewards": {"terms": [{"name": "exact"}, {"name": PARITY}]},
        "optimizer": {"lr": 1e-4},
        "evaluation": {"limit": 4},
        "checkpoint": {"every": 1},
    } | changes

"""The smallest real run: a tiny text model and a few rows, a fraction of a second a step."""

import json
from pathlib import Path
from typing import Any

from sensorium.recipe.load import parse_recipe
from sensorium.recipe.schema import Recipe
from tests.recipes import quick


def small(folder: Path, *overrides: str, **changes: Any) -> Recipe:
    """A recipe of three steps, saved at each, whose run lies in ``folder``."""
    data = folder.parent / "rows.jsonl"
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not data.exists():
        rows = [
            {"messages": [{"role": "user", "content": f"{n} + {n}?"}], "answer": str(2 * n), "demonstration": str(2 * n)}
            for n in range(8)
        ]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections: dict[str, Any] = {
        "steps": 3,
        "run_dir": str(folder),
        "model": {"path": "tiny:qwen2", "device": "cpu"},
        "tasks": {"train": [{"source": "jsonl", "options": {"path": str(data)}}]},
        "batch": {"prompts_per_step": 2, "group_size": 2},
        "rollout": {"max_new_tokens": 3},
        "rewards": {"terms": [{"name": "tests.trainer.small:ByParity"}]},
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"every": 1, "keep": 2},
    }
    return parse_recipe(json.dumps(quick("small", **sections | changes)), "small", list(overrides))


class ByParity:
    """Pays every other attempt, so that every group has something to learn from."""

    name = "parity"
    instant = True

    def score(self, task: Any, episode: Any) -> tuple[Any, ...]:
        from sensorium.vocabulary import Score

        return (Score("parity", float(episode.index % 2)),)

"""A small Daily-Omni of generated clips and the recipe that evaluates a tiny model on it."""

import json
from pathlib import Path
from typing import Any

from sensorium.systems.audio_visual.generated import make_daily_omni

LOTTERY = {"name": "tests.evaluation.lottery:Lottery", "weight": 0.8}


def write_daily(folder: Path, rows: int, **changes: Any) -> Path:
    """Make the data of some rows about three clips, and write a recipe with some sections replaced; returns its path."""
    make_daily_omni(folder / "data", rows, seconds=1.0, videos=3)
    video = {"frames": 2, "max_pixels_per_frame": 3136}
    options = {"path": str(folder / "data"), "video": video, "instruction": "Answer."}
    recipe = {
        "name": "daily",
        "steps": 0,
        "threads": 1,
        "model": {"path": "tiny:qwen2_5_omni"},
        "tasks": {"train": [{"source": "shapes"}], "evaluate": [{"source": "daily_omni", "options": options}]},
        "rollout": {"max_new_tokens": 4},
        "rewards": {"terms": [LOTTERY, {"name": "format", "weight": 0.2}]},
    }
    path = folder / "daily.yaml"
    path.write_text(json.dumps(recipe | changes))
    return path

"""Which later steps of a run are as good as its best checkpoint: of equal ones the earliest is marked."""

from pathlib import Path

import yaml

from sensorium.record.checkpoint_files import CheckpointFolder
from sensorium.record.metrics import read_metrics
from sensorium.record.run_directory import RunDirectory
from sensorium.vocabulary.errors import RecordError


def tie_note(run: Path) -> str:
    """A sentence that names the steps that tie with the best; empty where there are none, or no run is there.

    It only informs, so a recipe or metrics that cannot be read are passed over here.
    """
    directory = RunDirectory(run)
    try:
        best = CheckpointFolder(directory.checkpoints).best()
        if best is None:
            return ""
        metric = best.metric or yaml.safe_load(directory.recipe.read_text())["checkpoint"]["best"]
        rows = [row for row in read_metrics(directory.metrics) if row["step"] > best.step]
        later = sorted({row["step"] for row in rows if row.get(metric) == best.value})
    except (OSError, UnicodeError, yaml.YAMLError, LookupError, TypeError, RecordError):
        return ""
    told = (
        f"step {best.step} is the first with the best {metric}, {best.value:.4g}; later steps tie with it: {_listed(later)}"
    )
    return told if later else ""


def _listed(steps: list[int], most: int = 8) -> str:
    more = f" and {len(steps) - most} more" if len(steps) > most else ""
    return f"{', '.join(map(str, steps[:most]))}{more}"

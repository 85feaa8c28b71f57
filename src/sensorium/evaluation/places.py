"""Which model an evaluation is of, and the folder it goes to if nothing else is said."""

import re
from pathlib import Path

from sensorium.recipe.schema import Recipe
from sensorium.record.checkpoint_files import checkpoint_of_run
from sensorium.record.run_directory import RunDirectory


def evaluated_model(given: str | None, recipe: Recipe, source: Path | None) -> str:
    """The model that is meant: of a run its best or last checkpoint, else the path as it is."""
    place = Path(given) if given is not None else source
    if place is not None and place.is_dir() and not (place / "config.json").exists():
        return str(checkpoint_of_run(place))
    return given if given is not None else recipe.model.path


def default_folder(recipe: Recipe, model: str) -> Path:
    """Where an evaluation goes if nothing else is said: into the run a checkpoint belongs to, else runs/eval_…"""
    section, path = recipe.evaluation, Path(model)
    drawn = "greedy" if section.temperature == 0 else f"t{section.temperature:g}"
    many = f"_x{section.samples}" if section.samples > 1 else ""
    limit = f"_first{section.limit}" if section.limit else ""
    name = f"{re.sub(r'[^A-Za-z0-9._-]+', '_', path.name)}_{drawn}{many}{limit}"
    run = RunDirectory(path.parent.parent)
    if path.parent.name == run.checkpoints.name and run.exists():
        return run.path / "evaluations" / name
    return Path("runs") / f"eval_{recipe.name}_{name}"

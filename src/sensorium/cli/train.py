"""Train a model by a recipe: a YAML file, a shipped recipe by name, or a run directory to go on with."""

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from sensorium.cli.show import say, show_dry_run, show_plan
from sensorium.recipe.load import load_recipe, shipped_recipes
from sensorium.recipe.schema import Recipe
from sensorium.record.checkpoint_files import why_taken
from sensorium.record.run_directory import RunDirectory
from sensorium.report.terminal import Terminal
from sensorium.tasks.epochs import resolve_epochs
from sensorium.vocabulary.errors import (
    CheckpointError,
    EngineLost,
    MediaError,
    MemoryExhausted,
    NothingTrained,
    RecipeError,
    TaskError,
    nearest,
)

USAGE = "sensorium train RECIPE [key=value …] [--dry-run] [--resume | --restart]"
UNTRAINED = 3
"""Exit code of a short run that came to its end and trained nothing, which the run itself has said."""


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("recipe", help="a YAML file, a shipped recipe (shapes), or a run directory")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change the recipe: batch.group_size=16")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved recipe and its plan, spend nothing")
    parser.add_argument("--resume", action="store_true", help="go on from the run's last good checkpoint")
    parser.add_argument(
        "--caprl-env", action="store_true", help="take CapRL's environment variables: CAPTION_MODEL, DATASET, …"
    )
    parser.add_argument("--restart", action="store_true", help="start over in the directory of a run without a checkpoint")


def run(arguments: Namespace) -> int:
    """Train."""
    console = Terminal()
    if arguments.resume and arguments.restart:
        raise RecipeError("--resume goes on from a checkpoint and --restart starts over; drop one of them.")
    if arguments.resume:
        refuse_no_run(arguments.recipe)
    overrides = list(arguments.overrides)
    if arguments.caprl_env:
        overrides = [*_from_environment(arguments.recipe, overrides), *overrides]
    recipe = resolve_epochs(load_recipe(arguments.recipe, overrides))
    if arguments.dry_run:
        notes = _resumable(recipe) if arguments.resume else []
        if not arguments.resume and not arguments.restart and (problem := why_taken(RunDirectory(recipe.directory))):
            notes.append(f"A run by this recipe would be refused: {problem}")
        show_dry_run(recipe, console, named=arguments.recipe)
        for note in notes:
            say(note, console)
        return 0
    if arguments.resume:
        _resumable(recipe)  # before torch is imported, which takes seconds
    from sensorium.report.console import ConsoleWatcher
    from sensorium.trainer.health.monitor import run_untrained
    from sensorium.trainer.run import train

    watcher = ConsoleWatcher(console, lambda: show_plan(recipe, console))
    try:
        directory = train(recipe, resume=arguments.resume, restart=arguments.restart, watchers=[watcher])
    except NothingTrained as error:
        raise NothingTrained(error.short) from error
    except (KeyboardInterrupt, EngineLost, MemoryExhausted, TaskError, MediaError) as error:
        ended = RunDirectory(recipe.directory)
        if isinstance(error, KeyboardInterrupt) or any(ended.checkpoints.glob("step_*")):
            say(ended.how_to_continue(), console)
        raise
    say(f"report  {directory / 'report.html'}", console)
    return UNTRAINED if run_untrained(RunDirectory(directory), recipe) else 0


def _resumable(recipe: Recipe) -> list[str]:
    """Refuse to go on with a run by another recipe, as the run itself would; returns what it would say."""
    from sensorium.trainer.claim import go_on

    return go_on(recipe, RunDirectory(recipe.directory))


def _from_environment(recipe: str, overrides: Sequence[str] = ()) -> list[str]:
    """What CapRL's environment variables change in a recipe; those without effect are printed."""
    from sensorium.recipe.caprl_settings import caprl_settings

    found = caprl_settings(os.environ, recipe, load_recipe(recipe), overrides)
    for notice in found.notices():
        say(notice, Terminal(stderr=True))
    return [override for taken in found.overrides.values() for override in taken]


def refuse_no_run(source: str) -> None:
    """Refuse to resume what is neither a recipe nor a run, in the words of who looks for a run."""
    place = Path(source)
    if place.exists() or source in shipped_recipes():
        return
    runs = sorted(path.parent.name for path in place.parent.glob("*/recipe.yaml")) if place.parent.is_dir() else []
    others = f"Runs in '{place.parent}'{nearest(place.name, runs)}" if runs else f"There are no runs in '{place.parent}'."
    raise CheckpointError(f"there is no run '{source}' to resume. {others}")

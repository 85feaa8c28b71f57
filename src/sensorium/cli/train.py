"""Train a model by a recipe: a YAML file, a shipped recipe by name, or a run directory to go on with."""

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path

import yaml

from sensorium.cli.dry_run import show_dry_run, show_plan
from sensorium.cli.main import ExitCode
from sensorium.data.mixture import resolve_epochs
from sensorium.recipe.load import load_recipe, shipped_recipes
from sensorium.recipe.registry import import_system
from sensorium.recipe.schema import Recipe
from sensorium.report.terminal import Terminal, say
from sensorium.runs.checkpoint_layout import CheckpointFolder, why_taken
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.vocabulary.errors import (
    CheckpointError,
    EngineLost,
    MediaError,
    MemoryExhausted,
    NothingTrained,
    RecipeError,
    RecordError,
    TaskError,
    nearest,
)

USAGE = "sensorium train RECIPE [key=value …] [--dry-run] [--resume | --restart]"


def configure(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("recipe", help="a YAML file, a shipped recipe (shapes), or a run directory")
    add("overrides", nargs="*", metavar="key=value", help="change the recipe: batch.group_size=16")
    add("--dry-run", action="store_true", help="print the resolved recipe and its plan, spend nothing")
    add("--resume", action="store_true", help="go on from the run's last good checkpoint")
    add("--caprl-env", action="store_true", help="take CapRL's environment variables: CAPTION_MODEL, DATASET, …")
    add("--restart", action="store_true", help="start over in the directory of a run without a checkpoint")


def run(arguments: Namespace) -> int:
    console = Terminal()
    if arguments.resume and arguments.restart:
        raise RecipeError("--resume goes on from a checkpoint and --restart starts over; drop one of them.")
    if arguments.resume:
        _refuse_no_run(arguments.recipe)
    overrides = list(arguments.overrides)
    if arguments.caprl_env:
        caprl = import_system("sensorium.systems.caprl.settings", "--caprl-env")
        found = caprl.caprl_settings(os.environ, arguments.recipe, load_recipe(arguments.recipe), overrides)
        for notice in found.notices():
            say(notice, Terminal(stderr=True))
        overrides = [*(override for taken in found.overrides.values() for override in taken), *overrides]
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
        _resumable(recipe)  # refuse before torch is imported, which takes seconds
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
        if isinstance(error, KeyboardInterrupt) or CheckpointFolder(ended.checkpoints).steps():
            say(ended.how_to_continue(), console)
        raise
    say(f"report  {directory / 'report.html'}", console)
    return ExitCode.UNTRAINED if run_untrained(RunDirectory(directory), recipe) else ExitCode.DONE


def _resumable(recipe: Recipe) -> list[str]:
    from sensorium.trainer.run_claim import go_on

    return go_on(recipe, RunDirectory(recipe.directory))


def _refuse_no_run(source: str) -> None:
    place = Path(source)
    if place.exists() or source in shipped_recipes():
        return
    runs = sorted(path.parent.name for path in place.parent.glob("*/recipe.yaml")) if place.parent.is_dir() else []
    others = f"Runs in '{place.parent}'{nearest(place.name, runs)}" if runs else f"There are no runs in '{place.parent}'."
    raise CheckpointError(f"there is no run '{source}' to resume. {others}")


def tie_note(run: Path) -> str:
    """A sentence that names the steps that tie with the best; empty if there are none, or no readable run."""
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
    if not later:
        return ""
    ties = ", ".join(map(str, later[:8])) + (f" and {len(later) - 8} more" if len(later) > 8 else "")
    return f"step {best.step} is the first with the best {metric}, {best.value:.4g}; later steps tie with it: {ties}"

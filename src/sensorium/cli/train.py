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
from sensorium.trainer.run_claim import Fork, fork_point, go_on
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

USAGE = "sensorium train RECIPE [key=value …] [--dry-run] [--resume | --restart], or RUN@STEP --as NAME [key=value …]"


def configure(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("recipe", help="a YAML file, a shipped recipe (shapes), a run directory, or RUN@STEP to fork a run there")
    add("overrides", nargs="*", metavar="key=value", help="change the recipe: batch.group_size=16")
    add("--dry-run", action="store_true", help="print the resolved recipe and its plan, spend nothing")
    add("--resume", action="store_true", help="go on from the run's last good checkpoint")
    add("--caprl-env", action="store_true", help="take CapRL's environment variables: CAPTION_MODEL, DATASET, …")
    add(
        "--as",
        dest="name",
        metavar="NAME",
        help="of the fork: a new run from the checkpoint RUN@STEP, with any key changed",
    )
    add("--fresh-optimizer", action="store_true", help="of a fork: leave the ancestor's moments behind")
    add("--restart", action="store_true", help="start over in the directory of a run without a checkpoint")


def run(arguments: Namespace) -> int:
    console = Terminal()
    if arguments.resume and arguments.restart:
        raise RecipeError("--resume goes on from a checkpoint and --restart starts over; drop one of them.")
    if arguments.resume:
        _refuse_no_run(arguments.recipe)
    overrides, fork = list(arguments.overrides), _fork(arguments)
    if fork is not None:
        arguments.recipe = str(fork.ancestor)
        overrides = [f"name={arguments.name}", *overrides]
    if arguments.caprl_env:
        caprl = import_system("sensorium.systems.caprl.settings", "--caprl-env")
        found = caprl.caprl_settings(os.environ, arguments.recipe, load_recipe(arguments.recipe), overrides)
        for notice in found.notices():
            say(notice, Terminal(stderr=True))
        overrides = [*(override for taken in found.overrides.values() for override in taken), *overrides]
    recipe = resolve_epochs(load_recipe(arguments.recipe, overrides))
    if arguments.dry_run:
        notes = _resumable(recipe) if arguments.resume else []
        if fork is not None:
            from sensorium.trainer.fork import look_at_fork

            notes += [f"the run goes on from '{fork.ancestor}' after step {fork.step}", *look_at_fork(recipe, fork)]
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
        directory = train(recipe, resume=arguments.resume, restart=arguments.restart, fork=fork, watchers=[watcher])
    except NothingTrained as error:
        raise NothingTrained(error.short) from error
    except (KeyboardInterrupt, EngineLost, MemoryExhausted, TaskError, MediaError) as error:
        ended = RunDirectory(recipe.directory)
        if isinstance(error, KeyboardInterrupt) or CheckpointFolder(ended.checkpoints).steps():
            say(ended.how_to_continue(), console)
        raise
    say(f"report  {directory / 'report.html'}", console)
    return ExitCode.UNTRAINED if run_untrained(RunDirectory(directory), recipe) else ExitCode.DONE


def _fork(arguments: Namespace) -> Fork | None:
    """The fork that the arguments ask for; None where they ask for none."""
    point = fork_point(arguments.recipe)
    if point is None and not arguments.name and not arguments.fresh_optimizer:
        return None
    if point is None:
        run, steps = arguments.recipe, []
        if (Path(run) / "checkpoints").is_dir():
            steps = CheckpointFolder(RunDirectory(Path(run)).checkpoints).complete()
        named = f"{run}@{steps[-1]} (there are {', '.join(map(str, steps))})" if steps else "RUN@STEP"
        raise RecipeError(f"--as forks a run from one of its checkpoints; say which: sensorium train {named} --as NAME")
    if not arguments.name:
        raise RecipeError(f"'{arguments.recipe}' forks a run, and the new run needs a name: --as NAME")
    if arguments.resume or arguments.restart:
        raise RecipeError(
            "a fork begins a new run; drop --resume and --restart. A fork that was begun goes on by its own name."
        )
    return Fork(*point, fresh_optimizer=arguments.fresh_optimizer)


def _resumable(recipe: Recipe) -> list[str]:
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

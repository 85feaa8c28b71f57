"""Training from Python: ``run = sn.train(recipe, steps=100, rewards=[my_function])``."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sensorium.api.outside import outside_loop
from sensorium.api.recipes import recipe_of
from sensorium.api.run import Run
from sensorium.recipe.schema import Recipe
from sensorium.record.lock import lock_run
from sensorium.record.run_directory import RunDirectory, step_of
from sensorium.report.watcher import Watcher
from sensorium.tasks.epochs import resolve_epochs
from sensorium.trainer.claim import go_on
from sensorium.vocabulary.errors import RecipeError


def train(
    recipe: Any,
    *,
    overwrite: bool = False,
    show: bool = True,
    watchers: Iterable[Watcher] = (),
    **changes: Any,
) -> Run:
    """Train by a recipe: a path, a shipped name, a dict, a Recipe or a Run, with ``changes`` to it; returns the run.

    ``rewards`` may hold functions, ``tasks`` rows, Task objects or data sets. ``overwrite`` removes an earlier run in the
    same directory first. ``show``: tell on the console how it goes.
    """
    checked = recipe_of(recipe, changes)
    if overwrite:
        _take_away(checked)
    return _train(checked, resume=False, show=show, watchers=watchers)


def resume(run: str | Path | Run, *, show: bool = True, watchers: Iterable[Watcher] = (), **changes: Any) -> Run:
    """Go on from a run's last checkpoint. Functions and rows that no file holds must be passed again, as to ``train``."""
    directory = run.directory if isinstance(run, Run) else Path(run)
    return _train(recipe_of(Run(directory), changes), resume=True, show=show, watchers=watchers)


def _train(recipe: Recipe, *, resume: bool, show: bool, watchers: Iterable[Watcher]) -> Run:
    recipe = resolve_epochs(recipe)  # the console shows the number of steps
    if resume:
        go_on(recipe, RunDirectory(recipe.directory))  # before torch is imported, which takes seconds
    from sensorium.trainer.run import train as run_recipe

    told = [*_console(recipe), *watchers] if show else list(watchers)
    try:
        return Run(outside_loop(lambda: run_recipe(recipe, resume=resume, watchers=told)))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_after_interrupt(recipe.directory)) from None  # not the event loop's own tracebacks


def _after_interrupt(directory: Path) -> str:
    """How an interrupted run goes on."""
    saved = sorted(RunDirectory(directory).checkpoints.glob("step_*"))
    if saved:
        return f"the run lies in '{directory}'; sn.resume('{directory}') goes on from step {step_of(saved[-1])}"
    return f"the run in '{directory}' has no checkpoint yet (checkpoint.every); sn.train(…, overwrite=True) starts over"


def _console(recipe: Recipe) -> list[Watcher]:

    from sensorium.cli.show import show_plan
    from sensorium.report.console import ConsoleWatcher
    from sensorium.report.terminal import Terminal

    console = Terminal()
    return [ConsoleWatcher(console, lambda: show_plan(recipe, console))]


def _take_away(recipe: Recipe) -> None:
    """Remove an earlier run, and nothing that is not one or that a process still works in."""
    directory = RunDirectory(recipe.directory)
    if not directory.path.exists():
        return
    if not directory.exists():
        raise RecipeError(f"overwrite: '{directory.path}' holds no run, so it is not taken away; remove it yourself.")
    with lock_run(directory.path):
        shutil.rmtree(directory.path)

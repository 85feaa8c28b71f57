"""Training and evaluating from Python: ``run = sn.train(recipe, steps=100)``, ``sn.evaluate(run)["accuracy"]``."""

import asyncio
import contextvars
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from sensorium.api.recipes import recipe_of
from sensorium.api.run import Run, Table
from sensorium.cluster.event_loop import forget, interrupt
from sensorium.data.mixture import resolve_epochs
from sensorium.evaluation.folder import default_folder, evaluated_model
from sensorium.recipe.schema import Recipe
from sensorium.report.console import EvaluationBar
from sensorium.report.tables import markdown, summary_grid
from sensorium.report.terminal import Terminal
from sensorium.report.watcher import Watcher
from sensorium.runs.durable import read_rows
from sensorium.runs.run_directory import RunDirectory, lock_run, step_of
from sensorium.trainer.run_claim import go_on
from sensorium.vocabulary.errors import RecipeError

# Outside a loop the work runs in place. Inside one it runs in a second thread with a loop of its own while this thread
# waits; Ctrl-C (a notebook's stop button) reaches this thread and is handed on. A second Ctrl-C does not wait for the
# work to end.


Result = TypeVar("Result")
LOOK_S = 0.1


def outside_loop(work: Callable[[], Result]) -> Result:
    """What ``work`` returns or raises, wherever this is called."""
    if not _inside_loop():
        return work()
    results: list[Result] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            forget(threading.get_ident())
            done.set()

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name="sensorium", daemon=True)
    thread.start()
    _wait(done, thread)
    if errors:
        raise errors[0]
    return results[0]


def _inside_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _wait(done: threading.Event, thread: threading.Thread) -> None:
    """Wait for the event, not for the thread: an interrupted join takes a running thread for ended (CPython 3.11)."""
    asked = False
    while not done.is_set():
        try:
            done.wait(LOOK_S)
        except KeyboardInterrupt:
            if asked:
                raise
            asked = True
            assert thread.ident is not None
            interrupt(thread.ident)


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

    from sensorium.cli.dry_run import show_plan
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


class Evaluation(Mapping[str, Any]):
    """What an evaluation found, by name (``accuracy``, ``interval``, ``reward``, ``terms``, ``categories``, …)."""

    def __init__(self, summary: Mapping[str, Any], folder: Path) -> None:
        self.summary, self.folder = dict(summary), folder

    @property
    def accuracy(self) -> float | None:
        """The share of right answers; None where no term knows right from wrong."""
        return self.summary["accuracy"]

    @property
    def samples(self) -> Table:
        """One row a sample: what was asked, what was answered, and what it was paid."""
        return Table(list(read_rows(self.folder / "samples.jsonl")))

    def __getitem__(self, key: str) -> Any:
        return self.summary[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.summary)

    def __len__(self) -> int:
        return len(self.summary)

    def __repr__(self) -> str:
        return markdown(summary_grid(self.summary))


def evaluate(
    recipe: Any,
    model: str | Path | Run | None = None,
    *,
    greedy: bool = True,
    samples: int = 1,
    limit: int = 0,
    out: str | Path | None = None,
    fresh: bool = False,
    show: bool = True,
    **changes: Any,
) -> Evaluation:
    """Evaluate on a recipe's or run's held-out tasks: ``model``, else the run's best checkpoint, else the recipe's model.

    Greedy unless told otherwise (then at ``evaluation.temperature``). An evaluation that was interrupted goes on when it is
    asked for again; ``fresh`` forgets it. ``show``: tell on the console how far it is.
    """
    from sensorium.evaluation.held_out import Progress, evaluate_into

    run = recipe if isinstance(recipe, Run) else Run(recipe) if _is_run(recipe) else None
    section: dict[str, Any] = {"samples": samples, "limit": limit} | ({"temperature": 0.0} if greedy else {})
    checked = recipe_of(run or recipe, {**changes, "evaluation": {**section, **changes.get("evaluation", {})}})
    if not checked.tasks.evaluate:
        raise RecipeError("tasks.evaluate names no source, so there is nothing to evaluate on.")
    wanted = model.directory if isinstance(model, Run) else model
    path = evaluated_model(None if wanted is None else str(wanted), checked, None if run is None else run.directory)
    folder = Path(out) if out is not None else default_folder(checked, path)

    def play(progress: Progress | None) -> dict[str, Any]:
        return outside_loop(lambda: evaluate_into(folder, checked, path, fresh=fresh, progress=progress))

    if not show:
        return Evaluation(play(None), folder)
    from sensorium.report.terminal import say

    console = Terminal()
    with suppress(OSError, ValueError):  # as in ``EvaluationBar``
        say(f"evaluating {path} into {folder}", console)
    with EvaluationBar(console) as bar:
        return Evaluation(play(bar.tell), folder)


def _is_run(recipe: Any) -> bool:
    return isinstance(recipe, str | Path) and (Path(recipe) / "recipe.yaml").is_file()

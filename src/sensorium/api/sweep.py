"""Sweeps from Python: ``found = sn.sweep("shapes", {"optimizer.lr": [1e-4, 3e-4], "seed": range(5)})``."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sensorium.api.recipes import data_of, has_passed_objects
from sensorium.api.run import Report, Run, Table
from sensorium.api.train import train_checked
from sensorium.experiments.experiment import (
    Experiment,
    Jobs,
    PlannedRun,
    Room,
    how_to_go_on,
    opening,
    room_for,
    with_threads,
)
from sensorium.experiments.results import Results, results_of, write_results
from sensorium.recipe.load import load_recipe
from sensorium.recipe.registry import look_where_found
from sensorium.report.tables import markdown
from sensorium.report.terminal import Terminal, say
from sensorium.runs.run_directory import lock_run
from sensorium.vocabulary.errors import CheckpointError, RecipeError


class Sweep(Sequence[Run]):
    """The runs of an experiment that have begun, and what they found. Everything is read when it is asked for."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not (self.directory / "experiment.json").is_file():
            raise CheckpointError(f"'{directory}' holds no experiment: it has no experiment.json.")

    @property
    def results(self) -> Results:
        """Settings with their intervals, curves and notes."""
        return results_of(Experiment(self.directory))

    @property
    def table(self) -> Table:
        """One row a setting, the best first: its values, means, and intervals across seeds and across tasks."""
        return Table(self.results.rows())

    @property
    def states(self) -> Table:
        """One row a run: its values, its state, and why it failed, if it did."""
        return Table(self.results.runs)

    @property
    def best(self) -> dict[str, Any]:
        """The row of the best setting by held-out reward."""
        row = next((row for row in self.table if row["best"]), None)
        if row is None:
            raise CheckpointError(f"no finished run in '{self.directory}' was evaluated, so no setting is the best.")
        return row

    def report(self) -> Report:
        """Write report.html again; returns its path, which a notebook shows as the page itself."""
        experiment = Experiment(self.directory)
        write_results(experiment)
        return Report(experiment.report)

    def _runs(self) -> list[Run]:
        experiment = Experiment(self.directory)
        folders = [experiment.directory(run) for run in experiment.runs]
        return [Run(folder.path) for folder in folders if folder.exists()]

    def __len__(self) -> int:
        return len(self._runs())

    def __getitem__(self, place: Any) -> Any:
        return self._runs()[place]

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs())

    def __repr__(self) -> str:
        return markdown(self.results.grid())


def sweep(
    recipe: Any,
    grid: Mapping[str, Sequence[Any]] | None = None,
    *,
    name: str = "",
    jobs: int = 0,
    show: bool = True,
    **changes: Any,
) -> Sweep:
    """Train a recipe with every combination of the values in ``grid``, and compare them; returns the experiment.

    ``changes`` are shared by all runs. Finished runs are left out, others go on. ``jobs`` processes at a time, as many as
    fit by default; with functions or rows that no other process can import the runs go on in this one, one after the other.
    """
    recipe = recipe.directory if isinstance(recipe, Sweep) else recipe
    going_on = isinstance(recipe, str | Path) and (Path(recipe) / "experiment.json").is_file()
    data, origin, origins = data_of(recipe, changes)
    if going_on:
        look_where_found(Path(recipe), data)
    path = Path(recipe) if going_on and not name else Path("sweeps") / (name or str(data.get("name")))
    experiment = Experiment(path)
    values = {key: _plain_values(key, given) for key, given in (grid or {}).items()}
    recipes = experiment.plan(data, origin, values, origins) if values or not experiment.runs else {}
    experiment.look()
    left = {run.name: recipes.get(run.name) or load_recipe(experiment.recipe_file(run)) for run in experiment.left}
    here = any(has_passed_objects(one) for one in left.values())
    if here and jobs > 1:
        raise RecipeError(
            "some of the functions or rows that were passed cannot be imported by another process, so these runs go on in "
            "this one, one after the other: leave out jobs, or put them into a module or a file."
        )
    room = Room(1, "") if here or not left else room_for(list(left.values()), jobs)
    console = Terminal()

    def tell(text: str) -> None:
        if show and text:
            say(text, console)

    for line in [*opening(experiment, left), room.why]:
        tell(line)
    with lock_run(experiment.path):
        experiment.begin(data, with_threads(experiment, recipes, room.jobs))
        if here:
            for run in experiment.left:
                _train_here(experiment, run, show)
        else:
            Jobs(experiment, room, tell, lambda: write_results(experiment)).run()
        write_results(experiment)
    return Sweep(path)


def _train_here(experiment: Experiment, run: PlannedRun, show: bool) -> None:
    """Train a run in this process; if it fails, that is recorded."""
    directory = experiment.directory(run)
    how = how_to_go_on(directory)
    recipe = load_recipe(experiment.recipe_file(run)).model_copy(update={"run_dir": directory.path})
    run.state = "stopped"
    try:
        train_checked(recipe, resume=how == "--resume", restart=how == "--restart", show=show, watchers=())
        run.state, run.why = "finished", ""
    except Exception as error:  # whatever ended it, the others go on
        run.state, run.why = "failed", " ".join(str(error).split()) or type(error).__name__
    finally:
        experiment.save()
        write_results(experiment)


def _plain_values(key: str, given: Any) -> list[Any]:
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence | range):
        raise RecipeError(f"grid: '{key}' needs a list of values, and this is {given!r:.60}.")
    try:
        return [json.loads(json.dumps(value)) for value in given]
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"grid: '{key}' has a value that a recipe cannot hold ({error}). Name a function or class as 'module:name'."
        ) from error

"""Train a recipe with several seeds and settings, one after the other or as many as fit, and compare them.

A key with several values is swept: optimizer.lr=1e-4,3e-4 seed=0..4 (a value with a comma of its own goes in brackets
or quotes). Every run is a run directory in the experiment's folder, sweeps/NAME. The same command, or sensorium sweep
sweeps/NAME, goes on after a kill and leaves out what is finished; with other values it adds runs. Writes report.html,
results.json and table.md into the folder.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from sensorium.cli.dry_run import look_at
from sensorium.cli.main import ExitCode
from sensorium.experiments.experiment import Experiment, Jobs, Room, opening, read_arguments, room_for, with_threads
from sensorium.experiments.results import write_results
from sensorium.recipe.load import apply_override, load_recipe, read_recipe
from sensorium.recipe.registry import look_where_found
from sensorium.report.tables import print_grid
from sensorium.report.terminal import Terminal, say
from sensorium.runs.run_directory import lock_run
from sensorium.vocabulary.errors import RecipeError

USAGE = "sensorium sweep RECIPE key=value,value … [seed=0..4] [--name NAME] [--jobs N] [--dry-run]"
FOLDER = Path("sweeps")


def configure(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "recipe",
        help="a YAML file, a shipped recipe (shapes), a run directory, or an experiment to go on with: sweeps/NAME",
    )
    add("overrides", nargs="*", metavar="key=value,value", help="values to sweep, or one value, which all runs share")
    add("--name", metavar="NAME", help="of the experiment, whose folder is sweeps/NAME; default: the recipe's name")
    add("--jobs", type=int, default=0, metavar="N", help="runs at a time; default: as many as cores, GPUs and memory allow")
    add("--dry-run", action="store_true", help="print the runs and how many go on at a time, spend nothing")


def run(arguments: Namespace) -> int:
    console = Terminal()
    if arguments.jobs < 0:
        raise RecipeError(f"--jobs is {arguments.jobs}; at least one run must go on.")
    going_on = (Path(arguments.recipe) / "experiment.json").is_file()
    data, origins = read_recipe(arguments.recipe)
    if going_on:
        look_where_found(Path(arguments.recipe), data)
    path = Path(arguments.recipe) if going_on and not arguments.name else FOLDER / (arguments.name or str(data.get("name")))
    experiment = Experiment(path)
    shared, grid = read_arguments(arguments.overrides, experiment.keys)
    for override in shared:
        apply_override(override, data, origins)
    recipes = {}
    if grid or not experiment.runs:
        recipes = experiment.plan(data, arguments.recipe, grid, origins)
    experiment.look()
    left = {run.name: recipes.get(run.name) or load_recipe(experiment.recipe_file(run)) for run in experiment.left}
    room = room_for(list(left.values()), arguments.jobs) if left else Room(1, "")
    recipes = with_threads(experiment, recipes, room.jobs)
    for line in [*opening(experiment, left), room.why]:
        if line:
            say(line, console)
    if arguments.dry_run:
        return 0
    if left:
        first = next(iter(left.values()))
        for _ in look_at(first, named=arguments.recipe):  # refuse what every run would refuse, before any begins
            pass
    with lock_run(experiment.path):
        experiment.begin(data, recipes)
        Jobs(experiment, room, lambda text: say(text, console), lambda: write_results(experiment)).run()
        results = write_results(experiment)
    print_grid(results.grid(), console)
    say(f"report  {experiment.report}", console)
    return ExitCode.DONE if all(run.state == "finished" for run in experiment.runs) else ExitCode.PROBLEMS

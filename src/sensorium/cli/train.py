"""Train a model by a recipe: a YAML file, a shipped recipe by name, or a run directory to go on with."""

from argparse import ArgumentParser, Namespace

from rich.console import Console

from sensorium.cli.show import say, show_dry_run, show_plan
from sensorium.recipe.load import load_recipe
from sensorium.vocabulary.errors import RecipeError

UNTRAINED = 3
"""Exit code of a short run that came to its end and trained nothing, which the run itself has said."""


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("recipe", help="a YAML file, a shipped recipe (shapes), or a run directory")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change the recipe: batch.group_size=16")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved recipe and its plan, spend nothing")
    parser.add_argument("--resume", action="store_true", help="go on from the run's last good checkpoint")
    parser.add_argument("--restart", action="store_true", help="start over in the directory of a run without a checkpoint")


def run(arguments: Namespace) -> int:
    """Train."""
    console = Console()
    if arguments.resume and arguments.restart:
        raise RecipeError("--resume goes on from a checkpoint and --restart starts over; drop one of them.")
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if arguments.dry_run:
        show_dry_run(recipe, console)
        return 0
    show_plan(recipe, console)
    from sensorium.record.run_directory import RunDirectory
    from sensorium.report.console import ConsoleWatcher
    from sensorium.trainer.health.monitor import run_untrained
    from sensorium.trainer.run import train

    try:
        directory = train(recipe, resume=arguments.resume, restart=arguments.restart, watchers=[ConsoleWatcher(console)])
    except KeyboardInterrupt:
        say(f"to go on from the last checkpoint: sensorium train {recipe.directory} --resume", console)
        raise
    say(f"report  {directory / 'report.html'}", console)
    return UNTRAINED if run_untrained(RunDirectory(directory), recipe) else 0

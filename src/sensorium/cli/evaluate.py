"""Evaluate a checkpoint on a recipe's held-out tasks, sampled or greedy, with intervals and by category."""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.console import Console

from sensorium.cli.show import say, show_dry_run
from sensorium.recipe.load import load_recipe
from sensorium.recipe.schema import Recipe
from sensorium.report.run_directory import write_whole
from sensorium.report.tables import summary_table
from sensorium.vocabulary.errors import RecipeError


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("recipe", help="a YAML file, a shipped recipe (shapes), or a run directory")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change the recipe: evaluation.limit=100")
    parser.add_argument(
        "--checkpoint", help="a checkpoint folder; default: the run's best or last one, else the recipe's model"
    )
    parser.add_argument("--greedy", action="store_true", help="take the likeliest token instead of sampling")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the summary as JSON")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved recipe, spend nothing")


def run(arguments: Namespace) -> int:
    """Evaluate."""
    console = Console()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if not recipe.tasks.evaluate:
        raise RecipeError(f"{arguments.recipe}: tasks.evaluate names no source, so there is nothing to evaluate on.")
    if arguments.dry_run:
        show_dry_run(recipe, console)
        return 0
    from sensorium.trainer.study import Variant, measure

    checkpoint = arguments.checkpoint or _checkpoint_of(recipe, Path(arguments.recipe))
    variant = Variant("greedy", 0.0) if arguments.greedy else Variant("sampled", recipe.evaluation.temperature)
    say(f"evaluating {checkpoint}", console)
    [summary] = measure(recipe, checkpoint, [variant])
    console.print(summary_table(summary))
    if arguments.save:
        write_whole(arguments.save, json.dumps({"checkpoint": checkpoint, **summary}, indent=1) + "\n")
    return 0


def _checkpoint_of(recipe: Recipe, given: Path) -> str:
    """The best or last checkpoint if a run directory was given, else the recipe's own model."""
    if not given.is_dir():
        return recipe.model.path
    from sensorium.cli.export import find_checkpoint

    return str(find_checkpoint(given))

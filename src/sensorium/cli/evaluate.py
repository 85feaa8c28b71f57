"""Evaluate a model on a recipe's held-out tasks, sampled or greedy, with intervals and by category.

Samples, summary and table go to a folder. A killed evaluation goes on when its command is run again.
"""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import get_args

from sensorium.cli.dry_run import show_dry_run
from sensorium.cli.train import tie_note
from sensorium.evaluation.folder import default_folder, evaluated_model
from sensorium.recipe.load import load_recipe
from sensorium.report.console import EvaluationBar
from sensorium.report.tables import print_grid, summary_grid
from sensorium.report.terminal import Terminal, say
from sensorium.runs.durable import write_whole
from sensorium.vocabulary.content import MediaKind
from sensorium.vocabulary.errors import RecipeError, RecordError


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("recipe", help="a YAML file, a shipped recipe (shapes), or a run directory")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change the recipe: rollout.max_new_tokens=1024")
    parser.add_argument(
        "--model",
        "--checkpoint",
        dest="model",
        metavar="PATH|RUN",
        help="a checkpoint, a hub id, or a run (its best or last checkpoint); default: the run's, else the recipe's model",
    )
    parser.add_argument("--greedy", action="store_true", help="take the likeliest token instead of sampling")
    parser.add_argument("--temperature", type=float, metavar="T", help="sample at T; default: evaluation.temperature")
    parser.add_argument("--samples", type=int, metavar="K", help="samples a task; default: evaluation.samples")
    parser.add_argument("--limit", type=int, metavar="N", help="tasks at most, 0 for all; default: evaluation.limit")
    parser.add_argument(
        "--blank",
        action="append",
        default=[],
        choices=get_args(MediaKind),
        help="show every picture or video grey, or every sound silent: do they matter? May be repeated",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="the folder; default: in the run, else runs/eval_…")
    parser.add_argument("--fresh", action="store_true", help="forget what the folder holds of an earlier evaluation")
    parser.add_argument("--chunk", type=int, default=128, metavar="N", help="tasks played at once, at most (128)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the summary there as well")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved recipe, spend nothing")


def run(arguments: Namespace) -> int:
    console = Terminal()
    if arguments.greedy and arguments.temperature:
        raise RecipeError(f"--greedy and --temperature {arguments.temperature:g} contradict each other; drop one of them.")
    given = {"temperature": arguments.temperature, "samples": arguments.samples, "limit": arguments.limit}
    if arguments.greedy:
        given |= {"temperature": 0.0, "samples": arguments.samples or 1}
    settings = [f"evaluation.{key}={value}" for key, value in given.items() if value is not None]
    recipe = load_recipe(arguments.recipe, [*arguments.overrides, *settings])
    if not recipe.tasks.evaluate:
        raise RecipeError(f"{arguments.recipe}: tasks.evaluate names no source, so there is nothing to evaluate on.")
    if arguments.chunk < 1:
        raise RecipeError(f"--chunk is {arguments.chunk}; at least one task must be played at once.")
    model = evaluated_model(arguments.model, recipe, Path(arguments.recipe))
    if arguments.dry_run:
        show_dry_run(recipe, console, train=False, model=model, named=arguments.recipe)
        return 0
    from sensorium.evaluation.evaluate import evaluate_into
    from sensorium.evaluation.folder import costs_line

    folder = arguments.out or default_folder(recipe, model, arguments.blank)
    say(f"evaluating {model} into {folder}", console)
    if tie := tie_note(Path(arguments.model or arguments.recipe)):
        say(tie, console)
    with EvaluationBar(console) as bar:
        try:
            asked = {"blank": arguments.blank, "chunk": arguments.chunk, "fresh": arguments.fresh}
            summary = evaluate_into(folder, recipe, model, **asked, progress=bar.tell)
        except RecordError as error:  # a run would be gone on with
            raise RecordError(str(error).replace("go on with --resume", "ask again: what was done stays")) from error
    print_grid(summary_grid(summary), console)
    if arguments.save:
        write_whole(arguments.save, json.dumps({"checkpoint": model, **summary}, indent=1) + "\n")
    if costs := costs_line(folder / "judge_costs.json"):
        say(costs, console)
    say(f"written to {folder}: summary.json, table.md, samples.jsonl", console)
    return 0

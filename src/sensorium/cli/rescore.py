"""Score the stored episodes of a run again, by other reward terms, weights or judges; the run is not changed.

Without ``--rewards`` and overrides by the run's own rewards, which shows whether they repeat. docs/guides/rescoring.md
"""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from sensorium.report.console import WorkBar
from sensorium.report.tables import print_grid, rescoring_grids
from sensorium.report.terminal import Terminal, say
from sensorium.runs.run_directory import RunDirectory
from sensorium.vocabulary.errors import RecipeError, RecordError

USAGE = "sensorium rescore RUN [--rewards FILE] [key=value …] [--steps A..B] [--evaluations] [--limit N] [--out DIR]"


def configure(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("directory", type=Path, metavar="RUN", help="a run, finished or not: runs/NAME")
    add("overrides", nargs="*", metavar="key=value", help="change rewards or judges: rewards.terms.0.weight=0.5")
    add("--rewards", metavar="FILE", help="YAML with a section rewards, and judges if it asks others; or a recipe")
    add("--steps", default="", metavar="A..B", help="these steps alone; A.. and ..B are open, A is one step")
    add("--evaluations", action="store_true", help="the held-out episodes of the run's evaluations, not those trained on")
    add("--limit", type=int, default=0, metavar="N", help="groups at most, evenly from all steps; 0: all")
    add("--out", type=Path, metavar="DIR", help="the folder for the result; default: RUN_rescored_FILE, beside the run")
    add("--json", action="store_true", help="print the result as JSON")


def run(arguments: Namespace) -> int:
    directory, file = arguments.directory, arguments.rewards
    if not RunDirectory(directory).exists():
        raise RecordError(RunDirectory(directory).absence())
    if arguments.limit < 0:
        raise RecipeError(f"--limit is {arguments.limit}; give a number of groups, or 0 for all.")
    from sensorium.evaluation.folder import costs_line
    from sensorium.trainer.rescoring import RescoringOrder, rescore, rescoring_folder, rescoring_recipe, steps_of

    first, last = steps_of(arguments.steps) if arguments.steps else (0, 0)
    order = RescoringOrder(first, last, arguments.limit, arguments.evaluations)
    recipe = rescoring_recipe(directory, file, arguments.overrides)
    named = f"by_{Path(file).stem}" if file else ""
    folder = arguments.out or rescoring_folder(directory, "_".join([named, *arguments.overrides]), order)
    with WorkBar() as bar:

        def tell(done: int, of: int) -> None:
            if not done:
                bar.begin(f"scoring the episodes of {of} steps of {directory} again, into {folder}", of)
            bar.tell(done)

        found = rescore(directory, recipe, folder, order, tell)
    if arguments.json:
        print(json.dumps(found, indent=1))
        return 0
    console = Terminal()
    for grid in rescoring_grids(found):
        print_grid(grid, console)
    if costs := costs_line(folder / "judge_costs.json"):
        say(costs, console)
    say(f"written to {folder}: rescoring.json, rescoring.md, episodes.jsonl", console)
    return 0

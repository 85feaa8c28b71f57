"""Watch a small vision-language model learn to see: real weights, generated pictures, GRPO, a CPU, a few minutes."""

import shutil
from argparse import ArgumentParser, Namespace

from sensorium.cli.dry_run import show_dry_run, show_plan
from sensorium.cli.main import ExitCode
from sensorium.recipe.load import load_recipe
from sensorium.recipe.schema import Recipe
from sensorium.recipe.yaml import read_yaml
from sensorium.report.page import write_report
from sensorium.report.tables import comparison_table
from sensorium.report.terminal import Terminal, say
from sensorium.runs.run_directory import RunDirectory, lock_run

INTRO = (
    "A tiny Qwen-VL model looks at pictures of coloured shapes and answers questions about them. It knows the form of an "
    "answer, but is often wrong. Nobody shows it the right answers: it tries each question several times, and answers with "
    "a higher reward than its others become more likely.\n"
)


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change the demo's recipe: steps=20")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved recipe and its plan, spend nothing")


def run(arguments: Namespace) -> int:
    console = Terminal()
    recipe = load_recipe("shapes", ["name=demo", *arguments.overrides])
    if arguments.dry_run:
        show_dry_run(recipe, console, named="shapes")
        return 0
    console.print(INTRO, highlight=False)
    show_plan(recipe, console)
    _clear_earlier(recipe)
    from sensorium.evaluation.evaluate import SAMPLED_AND_GREEDY, Variant
    from sensorium.report.console import ConsoleWatcher
    from sensorium.trainer.health.monitor import run_untrained
    from sensorium.trainer.run import study

    taken_away = (Variant("blank", 1.0, {"picture": "blank"}), Variant("swapped", 1.0, {"picture": "swapped"}))
    try:
        found = study(recipe, [*SAMPLED_AND_GREEDY, *taken_away], [ConsoleWatcher(console)])
    except KeyboardInterrupt:
        say(f"the demo's run lies in {recipe.directory}; the same command starts the demo over", console)
        raise
    directory = RunDirectory(found.directory)
    with lock_run(directory.path):
        for step, summaries in ((0, found.before), (recipe.warm_start.steps + recipe.steps, found.after)):
            for summary in summaries:
                directory.write_summary(step, summary)
        report = write_report(directory)
    console.print()
    console.print(comparison_table(found.before, found.after, "held-out accuracy, before and after"))
    say(f"report  {report}", console)
    return ExitCode.UNTRAINED if run_untrained(directory, recipe) else ExitCode.DONE


def _clear_earlier(recipe: Recipe) -> None:
    directory = RunDirectory(recipe.directory)
    if directory.exists():
        earlier, _ = read_yaml(directory.recipe.read_text(), str(directory.recipe))
        if isinstance(earlier, dict) and earlier.get("name") == recipe.name:
            with lock_run(directory.path):
                shutil.rmtree(directory.path)

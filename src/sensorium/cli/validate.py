"""Check a recipe's environments, tools, rewards and data without a model: a table of what was found.

Exit code 0: no errors (warnings may be intended); 1: errors; 2: the recipe itself cannot be read.
"""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from sensorium.cli.main import ExitCode
from sensorium.data.task_content import BadRow, read_bad_rows, write_bad_rows
from sensorium.recipe.load import load_recipe
from sensorium.recipe.schema import Recipe
from sensorium.report.console import WorkBar
from sensorium.report.terminal import Terminal, say

USAGE = "sensorium validate RECIPE [key=value …] [--rows N] [--episodes N] [--bad-rows FILE]"

WIDTH = 160  # columns of the table where it is written to a file or a pipe

STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("recipe", help="a YAML file, or a shipped recipe (frozen_lake)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change the recipe")
    parser.add_argument("--rows", type=int, default=0, help="rows of each source to read, drawn from all; 0: all")
    parser.add_argument("--episodes", type=int, default=16, help="tasks of each source to play")
    parser.add_argument(
        "--bad-rows", type=Path, metavar="FILE", help="list rows with a problem there; default: runs/validate/NAME.jsonl"
    )


def run(arguments: Namespace) -> int:
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    from sensorium.cli.dry_run import find_names
    from sensorium.cli.validation import BadRows, model_free_session, validate

    find_names(recipe)
    bad = BadRows()
    with WorkBar() as bar:
        bar.begin(f"validate {recipe.name}: loading the tokenizer and the chat template of {recipe.model.path}")
        with model_free_session(recipe, alone=True) as session:
            findings = list(validate(session, max(0, arguments.rows), max(1, arguments.episodes), bad, bar))
    console = Terminal(width=None if sys.stdout.isatty() else WIDTH)
    table = Table(box=SIMPLE_HEAD, title=f"validate {recipe.name}", title_justify="left")
    for name in ("where", "check", "found", ""):
        table.add_column(name, overflow="fold")
    for finding in findings:
        cells = map(Text, (finding.where, finding.check, finding.found))
        table.add_row(*cells, Text(finding.level, STYLES[finding.level]))
    console.print(table)
    counts = {level: sum(finding.level == level for finding in findings) for level in STYLES}
    console.print(f"{counts['ok']} ok, {counts['warning']} warnings, {counts['error']} errors", highlight=False)
    _list_bad_rows(recipe, list(bad.found.values()), arguments.bad_rows, console)
    return ExitCode.PROBLEMS if counts["error"] else 0


def _list_bad_rows(recipe: Recipe, bad: list[BadRow], given: Path | None, console: Terminal) -> None:
    """Write the rows with a problem, with those that are left out already, as ``tasks.exclude`` takes them."""
    path = recipe.tasks.exclude
    left_out = [] if path is None else read_bad_rows(path)
    if left_out:
        say(f"{len(left_out):,} rows are left out already (tasks.exclude)", console)
    if not bad:
        return
    place = given or Path("runs") / "validate" / f"{recipe.name}.jsonl"
    write_bad_rows(place, [*left_out, *bad])
    say(f"{len(bad):,} rows have a problem; {place} lists them. To leave them out: tasks.exclude={place}", console)

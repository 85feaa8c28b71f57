"""Check a recipe's environments, tools, rewards and data without a model: a table of what was found.

Exit code 0: no errors (warnings may be intended); 1: errors; 2: the recipe itself cannot be read.
"""

import sys
from argparse import ArgumentParser, Namespace

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from sensorium.cli.main import ExitCode
from sensorium.recipe.load import load_recipe
from sensorium.report.terminal import Terminal

USAGE = "sensorium validate RECIPE [key=value …] [--rows N] [--episodes N]"

WIDTH = 160  # columns of the table where it is written to a file or a pipe

STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("recipe", help="a YAML file, or a shipped recipe (frozen_lake)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change the recipe")
    parser.add_argument("--rows", type=int, default=0, help="rows of each source to read, drawn from all; 0: all")
    parser.add_argument("--episodes", type=int, default=16, help="tasks of each source to play")


def run(arguments: Namespace) -> int:
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    from sensorium.cli.dry_run import find_names
    from sensorium.cli.validation import model_free_session, validate

    find_names(recipe)
    with model_free_session(recipe) as session:
        findings = list(validate(session, max(0, arguments.rows), max(1, arguments.episodes)))
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
    return ExitCode.PROBLEMS if counts["error"] else 0

"""Make a recipe of another trainer's settings, and say what became of each key.

Reads the command lines and scripts of verl (TaskMem and VAGEN run on it), CapRL++'s environment variables, slime's
arguments and NeMo-RL's YAML. docs/guides/migrate.md tells more.
"""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.table import Table
from rich.text import Text

from sensorium.cli.main import ExitCode
from sensorium.report.terminal import Terminal, say
from sensorium.runs.durable import write_whole
from sensorium.systems.migration.outcomes import Migration
from sensorium.systems.migration.recognition import FRAMEWORKS, migrate
from sensorium.vocabulary.errors import RecipeError, similar_file

USAGE = "sensorium migrate FILE|- [--from NAME] [-o RECIPE.yaml]"
STYLES = {"became": "green", "no effect": "dim", "no place": "yellow", "unknown": "red"}
MOST_SHOWN = 120  # letters of a key with its value in the table


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("file", help="a shell script, a command line, a Python run script or YAML; - reads standard input")
    parser.add_argument("--from", dest="framework", choices=FRAMEWORKS, default="", help="whose it is; default: recognised")
    parser.add_argument("-o", "--out", type=Path, help="write the recipe here; default: standard output")


def run(arguments: Namespace) -> int:
    """Migrate, write the recipe, and print the table: beside a recipe on standard output, to standard error."""
    text, named, folder = _read(arguments.file)
    found = migrate(text, named, arguments.framework, folder)
    console = Terminal(stderr=arguments.out is None)
    if arguments.out is not None:
        if arguments.out.exists():
            raise RecipeError(f"'{arguments.out}' exists; choose another name for the recipe, or remove it.")
        write_whole(arguments.out, found.text)
    else:
        print(found.text, end="")
    _show(found, console)
    if found.problem:
        say(f"the recipe would be refused as it is: {found.problem}", console)
        return ExitCode.PROBLEMS
    if arguments.out is not None:
        say(f"recipe  {arguments.out}; look at it with: sensorium train {arguments.out} --dry-run", console)
    return 0


def _read(file: str) -> tuple[str, str, Path | None]:
    if file == "-":
        return sys.stdin.read(), "standard input", Path.cwd()
    path = Path(file)
    try:
        return path.read_text(encoding="utf-8"), str(path), path.resolve().parent
    except (OSError, UnicodeDecodeError) as error:
        near = similar_file(path) if not path.exists() else ""
        raise RecipeError(f"cannot read '{file}': {getattr(error, 'strerror', None) or error}{near or '.'}") from error


def _show(found: Migration, console: Terminal) -> None:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(overflow="fold")
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    counts = dict.fromkeys(STYLES, 0)
    for outcome in found.outcomes:
        counts[outcome.kind] += 1
        shown = outcome.setting.shown
        key = f"{outcome.setting.key}={shown}" if shown else outcome.setting.key
        key = key if len(key) <= MOST_SHOWN else key[: MOST_SHOWN - 1] + "…"
        if console.is_terminal:
            rows.add_row(Text(key), Text(outcome.kind, STYLES[outcome.kind]), Text(outcome.text))
        else:
            say(f"{outcome.kind:<9}  {key}  {outcome.text}", console)
    console.print(rows)
    for note in found.notes:
        say(f"note: {note}", console)
    for text in found.attention:
        console.print(Text(f"ATTENTION: {text}", "bold red"), soft_wrap=True)
    if found.kept:
        say(f"from the recipe {found.start}, since no given key sets it: {', '.join(found.kept)}", console)
    start = f"the recipe {found.start}" if found.start else "no shipped recipe"
    numbers = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    say(f"{found.framework}, starting from {start}: {len(found.outcomes)} keys, {numbers}", console)

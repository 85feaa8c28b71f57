"""Compare evaluations of the same tasks: of two models, of two runs by their own evaluations, or of groups of seeds.

Tasks are paired, which makes a small difference visible: those that both get right, or both get wrong, do not blur it.
A side is a run (its own last evaluation), the folder of an evaluation, or a quoted pattern of either, which is a group of
seeds. One side alone (an experiment) is grouped by setting, and so are more than two; each is compared with the first.
"""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from sensorium.evaluation.comparison import (
    Side,
    by_setting,
    compare_sides,
    group_notes,
    is_side,
    refuse_unequal,
    settings_of,
    side_of,
)
from sensorium.report.tables import comparison_grid, markdown, print_grid, settings_grid
from sensorium.report.terminal import Terminal, say
from sensorium.runs.durable import write_whole
from sensorium.vocabulary.errors import RecipeError

USAGE = "sensorium compare A [B …] [--out DIR]"


def configure(parser: ArgumentParser) -> None:
    given = "a run, the folder of an evaluation, an experiment, or a quoted pattern: 'sweeps/x/lr=1e-4,*'"
    parser.add_argument("sides", nargs="+", metavar="A B", help=given)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where comparison.md and comparison.json go; default: B, if that is a folder",
    )


def run(arguments: Namespace) -> int:
    console = Terminal()
    named = arguments.sides
    if len(named) > 2:  # a shell found them, and other files of an experiment too
        named = [given for given in named if not Path(given).exists() or is_side(Path(given))] or named
    sides = [side_of(given) for given in named]
    if len(sides) == 2:
        found = compare_sides(*sides)
        grid = comparison_grid(found)
    else:
        sides = sides_by_setting(sides)
        refuse_unequal(sides)
        found = {"settings": settings_of(sides), "notes": list(group_notes(sides))}
        grid = settings_grid(found["settings"], found["notes"])
    print_grid(grid, console)
    default = Path(arguments.sides[-1]) if len(sides) == 2 and len(sides[-1].members) == 1 else None
    out = arguments.out or default
    if out is None:
        return 0
    write_whole(out / "comparison.json", json.dumps(found, indent=1) + "\n")
    write_whole(out / "comparison.md", markdown(grid))
    say(f"written to {out / 'comparison.md'} and comparison.json", console)
    return 0


def sides_by_setting(sides: list[Side]) -> list[Side]:
    """One side, or single runs that a shell found, grouped by setting; several groups stay as they were named."""
    if len(sides) > 2 and any(len(side.members) > 1 for side in sides):
        return sides
    found = by_setting([member for side in sides for member in side.members])
    if len(found) < 2:
        raise RecipeError(
            f"'{sides[0].name}' is one setting, so there is nothing to compare it with. Name a second side: sensorium "
            "compare A B"
        )
    return found

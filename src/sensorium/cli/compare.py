"""Compare two finished evaluations of the same tasks: both accuracies by category, and the difference with its interval."""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from sensorium.report.terminal import Terminal, say


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="A", help="the folder of an evaluation: of the model before")
    parser.add_argument("b", type=Path, metavar="B", help="the folder of another: of the model after")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where comparison.md and comparison.json go; default: B")


def run(arguments: Namespace) -> int:
    from sensorium.evaluation.comparison import compare_folders
    from sensorium.evaluation.folder import EvaluationFolder
    from sensorium.report.tables import comparison_grid, markdown, print_grid
    from sensorium.runs.durable import write_whole

    console = Terminal()
    found = compare_folders(EvaluationFolder(arguments.a), EvaluationFolder(arguments.b))
    grid = comparison_grid(found)
    print_grid(grid, console)
    out = arguments.out or arguments.b
    write_whole(out / "comparison.json", json.dumps(found, indent=1) + "\n")
    write_whole(out / "comparison.md", markdown(grid))
    say(f"written to {out / 'comparison.md'} and comparison.json", console)
    return 0

"""Run a batch again that was kept because its loss or gradient was not finite."""

from argparse import ArgumentParser, Namespace
from pathlib import Path


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("batch", type=Path, help="the kept folder that the error named: runs/NAME/kept/step_000012")


def run(arguments: Namespace) -> int:
    """Reproduce the update; if it is not finite again, the error says so."""
    from sensorium.trainer.checkpoint import replay

    metrics = replay(arguments.batch)
    print("this time the update is finite:", ", ".join(f"{name} {value:.6g}" for name, value in metrics.items()))
    return 0

"""metrics.jsonl: one object a step, in one order of keys, so that equal runs write equal bytes."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sensorium.runs.durable import append_row, read_rows

FAMILIES = (
    "reward", "accuracy", "missing", "retries", "judge", "environment", "tasks", "groups", "episodes", "policy", "value",
    "mismatch", "packing", "eval", "sight", "health", "media", "time", "throughput", "memory",
)  # fmt: skip
UNREPEATABLE = (
    "media/", "time/", "throughput/", "memory/", "retries/", "judge/", "eval/judge/", "environment/hung", "wait/",
    "worker/", "engine/",
)  # fmt: skip
"""Metrics that differ between equal runs; a resumed one finds its caches filled and its judgements made."""


def ordered(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics in their one order: families as the design lists them, the mean first, then by name."""

    def place(name: str) -> tuple[int, bool, str]:
        family = name.partition("/")[0]
        rank = FAMILIES.index(family) if family in FAMILIES else len(FAMILIES)
        return rank, not name.endswith("/mean"), name

    return {name: metrics[name] for name in sorted(metrics, key=place)}


class MetricsFile:
    """Appends a row a step. A number that is not finite is written as null: it was not measured."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write a step's row."""
        append_row(self.path, {"step": step, **{name: _plain(value) for name, value in ordered(metrics).items()}})


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, each with its step; metrics that were not measured are left out."""
    return [{name: value for name, value in row.items() if value is not None} for row in read_rows(path)]


def repeatable(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without the metrics that differ between equal runs: what two equal runs must agree on."""
    return {name: value for name, value in row.items() if not name.startswith(UNREPEATABLE)}


def _plain(value: Any) -> Any:
    """A JSON number (or string) from what a metric is: a float, an int, a 0-d tensor or array."""
    if isinstance(value, str | bool) or value is None:
        return value
    number = value if isinstance(value, int | float) else value.item()
    return number if math.isfinite(number) else None

"""metrics.jsonl, one object a step, and health.jsonl, the findings about the run.

A finding is written when it begins, now and then while it lasts, and when it is over, not at every step:

    {"step": 3, "rule": "no_answer", "state": "began", "grave": true, "text": "exact found no answer …"}
    {"step": 9, "rule": "no_answer", "state": "ended", "grave": true, "text": "…"}
    {"step": 0, "sight": [{"kind": "picture", "tasks": 32, "shown": 0.5, "blanked": 0.5, "same": 32}]}
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from sensorium.runs.durable import append_row, read_rows

FAMILIES = (
    "reward", "accuracy", "missing", "retries", "judge", "environment", "tasks", "groups", "episodes", "policy", "value",
    "mismatch", "packing", "eval", "sight", "health", "media", "time", "throughput", "memory",
)  # fmt: skip
# Health rules that judge clocks and processes, not what the model learns: equal runs may differ in them.
OF_THE_MACHINE = ("lost_processes", "slower_computing", "slow_phase")
# Metrics that differ between equal runs: of two runs one may be slower, or resumed with filled caches.
UNREPEATABLE = (
    "media/", "time/", "throughput/", "memory/", "retries/", "judge/", "eval/judge/", "environment/hung",
    "environment/places", "wait/", "worker/", "engine/", "logger/",
    *(f"health/{rule}" for rule in OF_THE_MACHINE),
)  # fmt: skip


def ordered(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics in their one order: families in the order of ``FAMILIES``, the mean first, then by name."""

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
        append_row(self.path, {"step": step, **{name: _plain(value) for name, value in ordered(metrics).items()}})


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, each with its step; metrics that were not measured are left out."""
    return [{name: value for name, value in row.items() if value is not None} for row in read_rows(path)]


def repeatable(row: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a row in which equal runs agree."""
    return {name: value for name, value in row.items() if not name.startswith(UNREPEATABLE)}


def _plain(value: Any) -> Any:
    """A JSON number (or string) from a metric: a float, an int, a 0-d tensor or array."""
    if isinstance(value, str | bool) or value is None:
        return value
    number = value if isinstance(value, int | float) else value.item()
    return number if math.isfinite(number) else None


# "before": it was found before the run was resumed; only watchers get it, health.jsonl has the notice of then.
State = Literal["began", "goes on", "ended", "before"]


@dataclass(frozen=True)
class Finding:
    """What is wrong, the likely cause and what to do. ``grave``: the run learns nothing, or unlearns."""

    rule: str
    what: str
    cause: str
    advice: str
    grave: bool = False

    @property
    def text(self) -> str:
        """The finding in one line."""
        return " ".join(f"{self.what}: {self.cause}. {self.advice}".split())


@dataclass(frozen=True)
class Notice:
    """A finding as it is reported at a step."""

    step: int
    rule: str
    state: State
    text: str
    grave: bool = False


@dataclass(frozen=True)
class SightResult:
    """Accuracy (or mean reward, as ``measure`` says) with media of a kind shown, and with them blanked.

    ``same`` counts the tasks that were answered in the same words both times.
    """

    kind: str
    tasks: int
    shown: float
    blanked: float
    same: int
    measure: str = "accuracy"


def write_notice(path: Path, notice: Notice) -> None:
    append_row(path, asdict(notice))


def write_sight(path: Path, step: int, results: list[SightResult]) -> None:
    """Append the results of a sight check."""
    append_row(path, {"step": step, "sight": [asdict(result) for result in results]})


@dataclass(frozen=True)
class HealthRecord:
    """The content of health.jsonl: notices in order, and sight checks by step."""

    notices: tuple[Notice, ...] = ()
    sight: tuple[tuple[int, tuple[SightResult, ...]], ...] = ()

    def last(self) -> list[Notice]:
        """The last notice of each rule, in the order in which they first began."""
        return list({notice.rule: notice for notice in self.notices}.values())

    def began(self, rule: str) -> int:
        """The step at which a rule's finding last began."""
        return max((n.step for n in self.notices if n.rule == rule and n.state == "began"), default=0)


def read_health(path: Path) -> HealthRecord:
    """The record of a run; empty where there is none."""
    notices: list[Notice] = []
    sight: list[tuple[int, tuple[SightResult, ...]]] = []
    for row in read_rows(path):
        if "sight" in row:
            names = SightResult.__dataclass_fields__
            results = [SightResult(**{key: found[key] for key in names if key in found}) for found in row["sight"]]
            sight.append((int(row["step"]), tuple(results)))
        else:
            notices.append(Notice(**{key: row[key] for key in Notice.__dataclass_fields__}))
    return HealthRecord(tuple(notices), tuple(sight))

"""health.jsonl: what was found wrong with a run, and the sight checks; so that a resumed run and the report know.

A finding is written when it begins, now and then while it lasts, and when it is over, not at every step:

    {"step": 3, "rule": "no_answer", "state": "began", "grave": true, "text": "exact found no answer …"}
    {"step": 9, "rule": "no_answer", "state": "ended", "grave": true, "text": "…"}
    {"step": 0, "sight": [{"kind": "picture", "tasks": 32, "shown": 0.5, "blanked": 0.5, "same": 32}]}
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from sensorium.runs.durable import append_row, read_rows

State = Literal["began", "goes on", "ended"]


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
    """A finding at a step where it is told."""

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
    """Append a notice."""
    append_row(path, asdict(notice))


def write_sight(path: Path, step: int, results: list[SightResult]) -> None:
    """Append the results of a sight check."""
    append_row(path, {"step": step, "sight": [asdict(result) for result in results]})


@dataclass(frozen=True)
class HealthRecord:
    """What a run's health.jsonl holds: notices in order, and sight checks by step."""

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
            sight.append((int(row["step"]), tuple(_sight(found) for found in row["sight"])))
        else:
            notices.append(Notice(**{key: row[key] for key in ("step", "rule", "state", "text", "grave")}))
    return HealthRecord(tuple(notices), tuple(sight))


def _sight(found: dict[str, Any]) -> SightResult:
    fields = ("kind", "tasks", "shown", "blanked", "same", "measure")
    return SightResult(**{key: found[key] for key in fields if key in found})

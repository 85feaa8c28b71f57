"""What driver and ranks send each other: pickled, since both ends are ours and started by one of us."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sensorium.recipe.schema import Recipe
from sensorium.vocabulary.errors import LearnerLost, SensoriumError
from sensorium.workers import plain_errors
from sensorium.workers.plain_errors import plain_error


@dataclass(frozen=True)
class RankSettings:
    """All that a rank must know to open: which it is, where the ranks meet, and what they train."""

    rank: int
    size: int
    meeting: str
    recipe: Recipe
    run: Path
    saved: Path | None
    device: str
    backend: str
    threads: int


@dataclass(frozen=True)
class Call:
    """A method of the rank's learner, or ``open`` and ``close``."""

    name: str
    given: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What a call returned, or why it failed; with the version of the policy afterwards."""

    value: Any = None
    version: int = 0
    error: str = ""
    kind: str = ""
    versions: dict[str, str] = field(default_factory=dict)


def failed(error: BaseException) -> Answer:
    """The answer of a call that raised. torch's error about a checkpoint holds those of the ranks that failed."""
    failures: Mapping[int, Any] = getattr(error, "failures", None) or {}
    if failures:
        rank, (cause, *_) = min(failures.items())
        return Answer(error=f"{cause!r} on rank {rank}", kind=type(error).__name__)
    plain = plain_error(error)
    return Answer(error=plain["error"], kind=plain["kind"])


def error_of(answer: Answer, rank: int) -> SensoriumError:
    """The error behind an answer; one that is not of ours is the rank's own."""
    return plain_errors.error_of({"kind": answer.kind, "error": answer.error}, LearnerLost, f"rank {rank} of the learner")

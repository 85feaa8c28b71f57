"""What driver and ranks send each other: pickled, since both ends are ours and started by one of us."""

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sensorium.engines.process.channel import Channel
from sensorium.recipe.schema import Recipe
from sensorium.vocabulary import errors


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


class PickledChannel(Channel):
    """Messages as objects."""

    def encode(self, message: Any) -> bytes:
        """A message as bytes."""
        return pickle.dumps(message, protocol=5)

    def decode(self, data: bytes) -> Any:
        """The message that bytes stand for."""
        return pickle.loads(data)


def failed(error: BaseException) -> Answer:
    """The answer of a call that raised."""
    known = isinstance(error, errors.SensoriumError)
    return Answer(error=str(error) if known else repr(error), kind=type(error).__name__)


def error_of(answer: Answer, rank: int) -> errors.SensoriumError:
    """The error behind an answer; one that is not of ours is the rank's own."""
    kind = getattr(errors, answer.kind, None)
    if isinstance(kind, type) and issubclass(kind, errors.SensoriumError):
        return kind(answer.error)
    return errors.LearnerLost(f"rank {rank} of the learner failed: {answer.error}.")

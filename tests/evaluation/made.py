"""Samples and episodes made by hand, for tests of what is counted."""

from collections.abc import Sequence
from typing import Any

from sensorium.evaluation.sample import Sample
from sensorium.vocabulary import Episode, Group, Score, Segment, Status, Task, Thread, Turn


def episode(id: str, *scores: Score, status: Status = Status.FINISHED, tokens: int = 3, text: str = "") -> Episode:
    response = Segment("model", tuple(range(tokens)), text=text, name=id)
    thread = Thread((Segment("environment", (1,)), response), (False, True))
    return Episode(id, "t", "g", 0, (thread,), (Turn(0, (), response, 0, 1),), status, scores=scores)


def group(category: str, *episodes: Episode) -> Group:
    return Group("g", Task("t", metadata={"category": category}), episodes)


def sample(task: int, index: int = 0, correct: bool | None = True, extracted: str | None = None, **rest: Any) -> Sample:
    given: dict[str, Any] = {"category": "all", "status": Status.FINISHED, "reward": 1.0, "votes": True, "answer": "?"}
    return Sample(f"t{task}", task, index, correct=correct, extracted=extracted, **(given | rest))


def samples(verdicts: Sequence[bool | None], **rest: Any) -> list[Sample]:
    """One sample a task."""
    return [sample(i, correct=correct, **rest) for i, correct in enumerate(verdicts)]

"""Samples and episodes made by hand, for tests of what is counted."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sensorium.evaluation.folder import EvaluationFolder
from sensorium.evaluation.summary import Sample, row_of, summarize_samples
from sensorium.report.tables import markdown, summary_grid
from sensorium.vocabulary import Episode, Group, Score, Segment, Status, Task, Thread, Turn, user


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


def evaluated(path: Path, samples: Sequence[Sample], *, model: str = "m", columns: dict[str, str] | None = None) -> Path:
    """The folder of a finished evaluation that found these samples."""
    folder = EvaluationFolder(path)
    settings = {"temperature": 0.0, "samples": 1, "seed": 0}
    folder.take({"settings": settings, "model": model, "weights": model, "surroundings": {}})
    rows = []
    for one in samples:
        task = Task(one.task, (user(one.question or one.task),), one.answer, metadata={"category": one.category})
        rows.append(row_of(one, task, episode("e"), 0))
    with folder.journal() as journal:
        journal.append(rows)
    summary = summarize_samples(samples, "greedy", columns) | {"model": model, "temperature": 0.0}
    folder.finish(summary, markdown(summary_grid(summary)))
    return path

"""A worker process of a run that scores: it builds the recipe's terms and answers calls of them.

``python -m sensorium.rewards.worker FD``; ``cluster/placed_workers.py`` has the rest.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sensorium.cluster.placed_workers import Answer, serve
from sensorium.rewards.functions import build_term
from sensorium.rewards.scorer import asked_of
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.task import Task

TermSettings = tuple[str, dict[str, Any], str]  # a term's name in the recipe, its options, and its key there


def open_work(settings: dict[int, TermSettings], folder: Path) -> tuple[None, Answer]:
    """Build the terms."""
    terms = {number: build_term(name, options, where) for number, (name, options, where) in settings.items()}

    def answer(question: tuple[int, Task, Sequence[Episode]]) -> Any:
        number, task, episodes = question
        return asked_of(terms[number], task, episodes)

    return None, answer


if __name__ == "__main__":
    serve(open_work)

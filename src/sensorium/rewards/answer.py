"""What the model answered, taken from what it wrote; and what was expected, taken from the task."""

import re
from collections.abc import Sequence

from sensorium.rewards.reward_term import Term
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import RewardFailure, TaskError
from sensorium.vocabulary.task import Task

BRACE = re.compile(r"\\boxed\{|\\(?!\\boxed\{).|[{}]", re.DOTALL)
"""An opening box, an escaped character, or a brace."""


def last_response(episode: Episode) -> str:
    """The text of the model's last turn. Observations are never part of it."""
    if not episode.turns:
        raise RewardFailure(f"episode {episode.id} has no response to score")
    return episode.turns[-1].response.text


def tagged(text: str, tag: str = "answer") -> str | None:
    """The content of the last ``<tag>…</tag>``, or None."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = text.rfind(closing)
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    return text[start + len(opening) : end].strip() if start >= 0 else None


def given_answer(episode: Episode, *, fallback: bool = False) -> str | None:
    """The answer the model gave in ``<answer>``; with ``fallback`` the whole last response where the tag is missing."""
    text = last_response(episode)
    answer = tagged(text)
    return text.strip() if answer is None and fallback else answer


def boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{…}`` whose braces balance, or None."""
    open_braces: list[int] = []  # where the content of a box begins, -1 for a brace of another kind
    found = (-1, -1)
    for mark in BRACE.finditer(text):
        if mark[0].endswith("{") and mark[0] != "\\{":
            open_braces.append(-1 if mark[0] == "{" else mark.end())
        elif mark[0] == "}" and open_braces:
            found = max(found, (open_braces.pop(), mark.start()))
    return text[slice(*found)].strip() if found[0] >= 0 else None


def without_answer(terms: Sequence[tuple[Term, float]], tasks: Sequence[Task]) -> str:
    """A sentence about tasks that a term cannot judge, since they have no answer; empty if there are none."""
    needing = [term.name for term, _ in terms if getattr(term, "needs_answer", False)]
    lacking = [task.id for task in tasks if task.answer is None]
    if not needing or not lacking:
        return ""
    term = f"the reward {'terms' if len(needing) > 1 else 'term'} {', '.join(needing)}"
    return (
        f"{len(lacking)} of {len(tasks)} tasks looked at have no answer, '{lacking[0]}' for one, and {term} cannot judge "
        "without: such episodes get a missing score and are left out. Give the rows an 'answer' (flat rows: columns: "
        "{answer: COLUMN}), or use a term that needs none."
    )


def expected_answers(task: Task) -> tuple[str, ...]:
    """The answers that count as right: one, or any of a list. A task without an answer cannot be scored."""
    known = task.answer if isinstance(task.answer, list | tuple) else [task.answer]
    if not known or any(isinstance(answer, bool) or not isinstance(answer, str | int | float) for answer in known):
        raise TaskError(
            f"task {task.id}: the answer {task.answer!r:.80} is no text, number or list of these to compare with."
        )
    return tuple(str(answer) for answer in known)

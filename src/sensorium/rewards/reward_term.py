"""The reward-term protocol: a named function of a task and an episode; the answer in a response, and the expected one."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from sensorium.data.media_store import MediaStore
from sensorium.rewards.judges.client import JudgeClient
from sensorium.vocabulary.content import Message
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import RewardFailure, TaskError
from sensorium.vocabulary.task import Task


class RewardTerm(Protocol):
    """Scores one episode. Raises RewardFailure (or anything) when it cannot judge: that becomes a missing score.

    ``score`` returns a number, a Score, a tuple of Scores or ``{name: number}``; the scorer sets the weights. It may be
    slow, or ``async``: it runs off the event loop under a deadline and is retried. Attributes a term may have:

    - ``instant = True``: plain computation, which runs in place and is not cached. Without it a term is taken for slow.
    - ``needs_answer = True``: it cannot judge a task without an answer.
    - ``check_task(task)``: raises TaskError for an answer that it could not compare with, which makes its row a bad one.
    - ``version``: changes whenever its judgements do, which are made once for equal content (``rewards/scorer.py``).
    - ``deterministic = False``: equal content may be judged differently.
    - ``caches_answers = True``: it asks judges, whose answers are cached by content. It is asked about every episode, so
      that each has its transcript.
    - ``asks_service = True``: it asks a service, and is not asked by ``sensorium show`` and the checks of single rows.
    - ``recall_judgement(task, episodes, scores)``: called when its scores, a tuple for each episode of a call, came from
      the cache: ``remote`` then gives these episodes their transcripts.

    A constructor with a keyword-only parameter ``context`` is given a RewardContext.
    """

    name: str

    def score(self, task: Task, episode: Episode) -> Any: ...


class GroupTerm(Protocol):
    """Scores the episodes of a group together: ``score_group`` returns a list with an entry for each, in their order.

    An entry is what ``score`` may return, or None for no score. Of a term with both methods only this one is called.
    Failed episodes are left out.
    """

    name: str

    def score_group(self, task: Task, episodes: Sequence[Episode]) -> Any: ...


Term = RewardTerm | GroupTerm


@runtime_checkable
class ComparingTerm(RewardTerm, Protocol):
    """A term that compares an answer with the known one, and can extract that answer.

    ``extract`` gives the answer in the form in which it is compared: equal answers are equal texts, so that attempts at one
    task can vote. None where the episode gives no answer.
    """

    def extract(self, task: Task, episode: Episode) -> str | None: ...


def asks_others(term: Term) -> bool:
    """True for a term that asks a judge or a service: it is not asked where nothing may be spent."""
    return bool(getattr(term, "caches_answers", False) or getattr(term, "asks_service", False))


@dataclass(frozen=True)
class RewardContext:
    """Given to a term whose constructor (or function) has a keyword-only parameter ``context``.

    ``store`` holds the media of tasks and environments; ``judges`` asks the models of the recipe's section ``judges``.
    """

    store: MediaStore
    judges: JudgeClient | None = None


BRACE = re.compile(r"\\boxed\{|\\(?!\\boxed\{).|[{}]", re.DOTALL)  # an opening box, an escaped character, or a brace


def question_messages(task: Task, episode: Episode) -> Sequence[Message]:
    """The messages of the question: the task's, or the first observation of its environment."""
    return task.messages or (*episode.head, *(episode.turns[0].observation if episode.turns else ()))


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


def refuse_unreadable(terms: Sequence[tuple[Term, float]], task: Task) -> None:
    """Refuse a task whose answer a term with a weight could not compare with; one without an answer is another matter."""
    for term, weight in terms:
        check = getattr(term, "check_task", None)
        if weight and check is not None and task.answer is not None:
            check(task)


def expected_answers(task: Task) -> tuple[str, ...]:
    """The answers that count as right: one, or any of a list. A task without an answer cannot be scored."""
    known = task.answer if isinstance(task.answer, list | tuple) else [task.answer]
    plain = all(isinstance(answer, str | int | float) and not isinstance(answer, bool) for answer in known)
    if not known or not plain or "" in known:
        raise TaskError(
            f"task {task.id}: the answer {task.answer!r:.80} is no text, number or list of these to compare with, or an "
            "empty one."
        )
    return tuple(str(answer) for answer in known)

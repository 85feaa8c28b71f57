"""The reward-term protocol: a named function of a task and an episode."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from sensorium.data.media_store import MediaStore
from sensorium.rewards.judges.client import JudgeClient
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.task import Task


class RewardTerm(Protocol):
    """Scores one episode. Raises RewardFailure (or anything) when it cannot judge: that becomes a missing score.

    ``score`` returns a number, a Score, a tuple of Scores or ``{name: number}``; the scorer sets the weights. It may be
    slow, or ``async``: it runs off the event loop under a deadline and is retried. A term with ``instant = True`` is plain
    computation: it runs in place, and its scores are not kept in the ledger's cache of judgements. Without ``instant`` a
    term is taken for slow. One with ``needs_answer = True`` cannot judge a task without an answer.

    A judgement is made once for equal content (``rewards/judgements.py``): ``version`` tells a term that has changed from
    what it was, and ``deterministic = False`` says that equal content may be judged differently. ``caches_answers = True``:
    it asks judges, whose answers are cached by content; it is asked about every episode, so that each has its transcript.
    A term with a method ``recall_judgement(task, episodes, scores)`` is told when its scores, a tuple for each episode of a
    call, came from the cache of judgements: ``remote`` then gives these episodes their transcripts.
    A constructor with a keyword-only parameter ``context`` is given a RewardContext.
    """

    name: str

    def score(self, task: Task, episode: Episode) -> Any: ...


class GroupTerm(Protocol):
    """Scores the episodes of a group together: ``score_group`` returns a list with an entry for each, in their order.

    An entry is what ``score`` may return, or None for no score. A term that has both methods is asked by this one. Episodes
    that failed are not among those it gets.
    """

    name: str

    def score_group(self, task: Task, episodes: Sequence[Episode]) -> Any: ...


Term = RewardTerm | GroupTerm


@runtime_checkable
class ComparingTerm(RewardTerm, Protocol):
    """A term that compares an answer with the known one, and can say what it takes for the answer.

    ``extract`` gives the answer in the form in which it is compared: equal answers are equal texts, so that attempts at one
    task can vote. None where the episode gives no answer.
    """

    def extract(self, task: Task, episode: Episode) -> str | None: ...


@dataclass(frozen=True)
class RewardContext:
    """Given to a term whose constructor (or function) has a keyword-only parameter ``context``.

    ``store`` gives the pictures, videos and sounds that a task or an environment showed, ``judges`` asks the models of the
    recipe's section ``judges``.
    """

    store: MediaStore
    judges: JudgeClient | None = None

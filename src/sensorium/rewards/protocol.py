"""The reward-term protocol: a named function of a task and an episode."""

from typing import Any, Protocol, runtime_checkable

from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.task import Task


class RewardTerm(Protocol):
    """Scores one episode. Raises RewardFailure (or anything) when it cannot judge: that becomes a missing score.

    ``score`` returns a number, a Score, a tuple of Scores or ``{name: number}``; the scorer sets the weights. It may be
    slow, or ``async``: it runs off the event loop under a deadline and is retried. A term with ``instant = True`` is plain
    computation: it runs in place, and its scores are not kept in the ledger's cache of judgements. Without ``instant`` a
    term is taken for slow. One with ``needs_answer = True`` cannot judge a task without an answer.
    """

    name: str

    def score(self, task: Task, episode: Episode) -> Any: ...


@runtime_checkable
class ComparingTerm(RewardTerm, Protocol):
    """A term that compares an answer with the known one, and can say what it takes for the answer.

    ``extract`` gives the answer in the form in which it is compared: equal answers are equal texts, so that attempts at one
    task can vote. None where the episode gives no answer.
    """

    def extract(self, task: Task, episode: Episode) -> str | None: ...

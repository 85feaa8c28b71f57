"""The reward-term protocol: a named function of a task and an episode."""

from typing import Protocol, runtime_checkable

from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.score import Score
from sensorium.vocabulary.task import Task


class RewardTerm(Protocol):
    """Scores one episode. Raises RewardFailure (or anything) when it cannot judge: that becomes a missing score.

    Returned scores carry the term's name; the scorer sets their weight. ``score`` may be slow: it runs off the event
    loop under a deadline and is retried. ``instant`` terms are plain computation: they run in place, and their scores are
    not kept in the ledger's cache of judgements.
    """

    name: str
    instant: bool

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]: ...


@runtime_checkable
class ComparingTerm(RewardTerm, Protocol):
    """A term that compares an answer with the known one, and can say what it takes for the answer.

    ``extract`` gives the answer in the form in which it is compared: equal answers are equal texts, so that attempts at one
    task can vote. None where the episode gives no answer.
    """

    def extract(self, task: Task, episode: Episode) -> str | None: ...

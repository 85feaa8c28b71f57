"""Format: is what the model wrote laid out in the tags that were asked for?"""

from collections.abc import Mapping

from sensorium.rewards.answer import tagged
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import RecipeError, RewardFailure
from sensorium.vocabulary.score import Score
from sensorium.vocabulary.task import Task

THINK_AND_ANSWER = {"think": 0.25, "answer": 0.75}


class Format:
    """Pays each tag that is opened and closed its part; several turns pay their mean. Says nothing of right or wrong.

    ``tags: {answer: 1.0}`` asks for the answer alone.
    """

    instant = True

    def __init__(self, tags: Mapping[str, float] | None = None, name: str = "format") -> None:
        self.name = name
        self.tags = dict(THINK_AND_ANSWER if tags is None else tags)
        if not self.tags:
            raise RecipeError(f"reward '{name}': tags is empty; name at least one, as in {{answer: 1.0}}.")

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        """One score for the episode."""
        if not episode.turns:
            raise RewardFailure(f"episode {episode.id} has no response to score")
        paid = [self.paid(turn.response.text) for turn in episode.turns]
        return (Score(self.name, sum(paid) / len(paid)),)

    def paid(self, text: str) -> float:
        """What one response earns."""
        return sum(part for tag, part in self.tags.items() if tagged(text, tag) is not None)

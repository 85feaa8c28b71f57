"""EnvironmentReward: what the world paid, and whether it calls the episode a success."""

from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import RewardFailure
from sensorium.vocabulary.score import Score
from sensorium.vocabulary.task import Task


class EnvironmentReward:
    """The sum of the turns' rewards, or with ``per_turn`` one score for each turn that was paid.

    Correct is the world's success: the episode's, or else what the last turn says of it.
    """

    instant = True

    def __init__(self, per_turn: bool = False, name: str = "environment") -> None:
        self.name = name
        self.per_turn = per_turn

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        """One score for the episode, or one per paid turn; the last one carries right or wrong."""
        paid = [(turn.index, turn.reward) for turn in episode.turns if turn.reward is not None]
        if not paid:
            raise RewardFailure(f"task {task.id}: its environment paid nothing in {len(episode.turns)} turns")
        success = episode.info.get("success", episode.turns[-1].info.get("success"))
        correct = None if success is None else bool(success)
        if not self.per_turn:
            return (Score(self.name, sum(reward for _, reward in paid), correct=correct),)
        last = paid[-1][0]
        return tuple(
            Score(self.name, reward, scope="turn", turn=index, correct=correct if index == last else None)
            for index, reward in paid
        )

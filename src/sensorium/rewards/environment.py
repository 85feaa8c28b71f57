"""EnvironmentReward: what the environment paid, by name where it names it, and whether it calls the episode a success."""

from collections.abc import Iterator
from dataclasses import replace

from sensorium.vocabulary.episode import Episode, Turn
from sensorium.vocabulary.errors import RewardFailure
from sensorium.vocabulary.score import Score
from sensorium.vocabulary.task import Task


class EnvironmentReward:
    """The sum of the turns' rewards, or with ``per_turn`` one score for each turn that was paid.

    Named parts of the pay are scores of their own: ``{"goal": 1.0}`` is paid as ``environment/goal``. Correct is the
    environment's success: the episode's, or else what the last turn says of it.
    """

    instant = True

    def __init__(self, per_turn: bool = False, name: str = "environment") -> None:
        self.name = name
        self.per_turn = per_turn

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        """A score of each part for the episode, or for each paid turn; the last one carries right or wrong."""
        paid = [(turn.index, name, value) for turn in episode.turns for name, value in self._parts(turn)]
        if not paid:
            raise RewardFailure(f"task {task.id}: its environment paid nothing in {len(episode.turns)} turns")
        success = episode.info.get("success", episode.turns[-1].info.get("success"))
        correct = None if success is None else bool(success)
        if self.per_turn:
            *before, last = (Score(name, value, scope="turn", turn=index) for index, name, value in paid)
        else:
            sums: dict[str, float] = {}
            for _, name, value in paid:
                sums[name] = sums.get(name, 0) + value
            *before, last = (Score(name, value) for name, value in sums.items())
        return (*before, replace(last, correct=correct))

    def _parts(self, turn: Turn) -> Iterator[tuple[str, float]]:
        """What a turn was paid, by the name of the score."""
        if turn.parts:
            yield from ((f"{self.name}/{part}", value) for part, value in turn.parts.items())
        elif turn.reward is not None:
            yield self.name, turn.reward

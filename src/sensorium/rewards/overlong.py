"""Overlong: what a response costs that comes near the longest it may be."""

from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import RecipeError, RewardFailure
from sensorium.vocabulary.score import Score
from sensorium.vocabulary.task import Task


class Overlong:
    """Costs nothing up to ``max_tokens - buffer_tokens``, then in a straight line ``penalty`` at ``max_tokens`` and beyond.

    Counts the tokens the model wrote in the whole episode. With no buffer the price is due at ``max_tokens`` at once.
    """

    instant = True

    def __init__(self, max_tokens: int, buffer_tokens: int, penalty: float = 1.0, name: str = "overlong") -> None:
        if not 0 <= buffer_tokens <= max_tokens or max_tokens < 1:
            raise RecipeError(
                f"reward '{name}': buffer_tokens is {buffer_tokens} and max_tokens {max_tokens}; the buffer is the last "
                "part of max_tokens, so it must lie between 0 and that."
            )
        if penalty < 0:
            raise RecipeError(
                f"reward '{name}': penalty is {penalty}; give what being overlong costs, as a positive number."
            )
        self.name = name
        self.max_tokens, self.buffer_tokens, self.penalty = max_tokens, buffer_tokens, penalty

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        """One score for the episode, never above 0."""
        if not episode.turns:
            raise RewardFailure(f"episode {episode.id} has no response to score")
        return (Score(self.name, -self.penalty * self.share(episode.sampled_tokens)),)

    def share(self, tokens: int) -> float:
        """Which part of the penalty so many tokens cost."""
        left = self.max_tokens - tokens
        if left <= 0:
            return 1.0
        return 0.0 if left >= self.buffer_tokens else 1 - left / self.buffer_tokens

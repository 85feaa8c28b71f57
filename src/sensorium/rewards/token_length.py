"""Token length: a response is paid for not being too long."""

from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import RecipeError, RewardFailure
from sensorium.vocabulary.score import Score
from sensorium.vocabulary.task import Task


class TokenLength:
    """1 up to ``full_until`` tokens, in a straight line down to 0 at ``none_from``, 0 beyond."""

    instant = True

    def __init__(self, full_until: int = 2048, none_from: int = 3072, name: str = "token_length") -> None:
        if not 0 <= full_until < none_from:
            raise RecipeError(
                f"reward '{name}': full_until is {full_until} and none_from {none_from}; the whole pay must end before "
                "there is none."
            )
        self.name, self.full_until, self.none_from = name, full_until, none_from

    def score(self, task: Task, episode: Episode) -> Score:
        """One score for the episode, of the tokens the model wrote in it."""
        if not episode.turns:
            raise RewardFailure(f"episode {episode.id} has no response to score")
        return Score(self.name, self.paid(episode.sampled_tokens))

    def paid(self, tokens: int) -> float:
        """What so many tokens earn."""
        return min(1.0, max(0.0, (self.none_from - tokens) / (self.none_from - self.full_until)))

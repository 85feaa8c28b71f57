"""A term that is no plain computation, so that workers are asked for it."""

from typing import Any


class SlowParity:
    """Pays every other attempt."""

    name = "slow parity"
    deterministic = False

    def score(self, task: Any, episode: Any) -> float:
        return float(episode.index % 2)


class Refusing(SlowParity):
    """Judges nothing."""

    def score(self, task: Any, episode: Any) -> float:
        raise ValueError("there is nothing to say")

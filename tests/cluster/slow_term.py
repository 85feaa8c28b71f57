"""A term that is no plain computation, so that workers are asked for it."""

import os
from typing import Any


class SlowParity:
    """Pays every other attempt."""

    name = "slow parity"
    deterministic = False

    def score(self, task: Any, episode: Any) -> float:
        return float(episode.index % 2)


class Deadly(SlowParity):
    """Ends its worker at one episode of one task, as often as it is asked."""

    def score(self, task: Any, episode: Any) -> float:
        if (task.answer, episode.index) == ("4", 1):
            os._exit(9)
        return super().score(task, episode)


class Refusing(SlowParity):
    """Judges nothing."""

    def score(self, task: Any, episode: Any) -> float:
        raise ValueError("there is nothing to say")
